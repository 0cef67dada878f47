"""Pictures of trees: what a trie knows, what is drafted and accepted, who sees whom."""

import math
from collections.abc import Sequence

from counts import EMPTY, Counts, Node
from lookahead import Step
from picture import CHAR, WIDTH, Box, Boxes, Decode, Picture, Sheet, label, left_out, plural, quote
from tree import DraftTree
from trie import TokenTrie

ROWS = 24  # of boxes: more are counted, not drawn

# --- the trie ---------------------------------------------------------------------------------------------------------


def draw_trie(
    trie: TokenTrie, context: Sequence[int], decode: Decode, *, depth: int = 3, width: int = 4, dark: bool = False
) -> Picture:
    """What followed the longest known suffix of `context` (ids) in the trie's outputs, `depth` tokens far, the `width`
    most frequent at each place, as far as the sheet has room. Numbers are counts, and so is the thickness of the lines.

    A path in the trie ends at its max_depth. Beyond that, the picture goes on as a draft does: with the longest suffix
    of the path that was followed by something. Such lines are dashed; their counts are those of the shorter suffix.
    """
    if depth < 1 or width < 1:
        raise ValueError(f"depth and width must be 1 or more, not {depth} and {width}")
    counts = trie.outputs
    suffix, node = _longest(counts, list(context))
    most = max((child.count for child in node.values()), default=0)
    widths = [min(width, ROWS)] * min(depth, 10)  # the sheet has no room for more tokens in a line, and ...
    while math.prod(widths) > 5000:  # ... not for so many lines: do not even look at them
        widths[max(level for level, most_here in enumerate(widths) if most_here > 1)] -= 1
    while True:  # at most ROWS of them: else fewer children, the deepest first
        root = Box(" ".join(label(decode([token]), 10) for token in suffix[-4:]) or "(nothing known)", kind="root")
        root.text += f"  {node.total}x" * bool(suffix)
        lines = [f"{quote(suffix, decode) or '(no suffix is known)'}  followed {node.total} times"]
        _grow(counts, root, suffix, node, widths, "", lines, most, decode)
        if len(widths) > 1 and Boxes(root, gap=0.6).width > WIDTH - 0.5:  # no room for the deepest tokens
            widths.pop()
            continue
        wide = [level for level in range(len(widths)) if widths[level] > 1]
        if max(box.row for box in root.walk()) < ROWS or not wide:
            break
        widths[wide[-1]] -= 1
    seen = f"{most}x: seen {plural(most, 'time')}, in a trie" if most else "A trie"
    remarks = [
        f"{seen} of {plural(counts.n_nodes, 'node')}; its paths have at most {plural(counts.max_depth, 'token')}."
    ]
    if len(widths) < depth:
        remarks.append(f"Cut after {plural(len(widths), 'token')}: the sheet is not wider.")
        lines.append(f"cut after {plural(len(widths), 'token')}")
    if any(box.dashed for box in root.walk()):
        remarks.append("Dashed: the path is longer than the trie remembers; the count is that behind a shorter suffix.")
        lines.append("~ counted behind a shorter suffix: the path is longer than the trie remembers")
    title = f"What followed {plural(len(suffix), 'token')} of context, and how often" if suffix else "Nothing known"
    tree = Boxes(root, gap=0.6)
    sheet = Sheet(tree.width + 0.5, tree.height, title, dark, remarks)
    tree.draw(sheet, sheet.MARGIN, sheet.top)
    return sheet.picture("\n".join(lines))


def _grow(
    counts: Counts, box: Box, path: list[int], node: Node, widths: list[int], indent: str, lines: list[str],
    most: int, decode: Decode, beyond: bool = False,
) -> None:  # fmt: skip
    """Followers of `path`, whose node is `node`, as children of `box` and as lines of text."""
    followers = sorted(node.items(), key=lambda item: (-item[1].count, item[0]))
    for number, (token, child) in enumerate(followers[: widths[0]]):
        last = number == len(followers) - 1
        below = Box(
            f"{label(decode([token]))}  {child.count}x", line=0.8 + 6 * min(1, child.count / most), dashed=beyond
        )
        box.children.append(below)
        lines.append(f"{indent}{'`' if last else '|'}-- {decode([token])!r} {child.count}{' ~' * beyond}")
        if widths[1:]:
            known, following = _longest(counts, [*path, token])
            more = (indent + ("    " if last else "|   "), lines, most, decode, beyond or len(known) <= len(path))
            _grow(counts, below, known, following, widths[1:], *more)
    if (hidden := len(followers) - widths[0]) > 0:
        box.children.append(Box(f"... and {hidden:,} more", kind="more", line=0.8))
        lines.append(f"{indent}`-- ... and {hidden:,} more")


def _longest(counts: Counts, path: list[int]) -> tuple[list[int], Node]:
    """The longest suffix of `path` that was followed by something, and its node; ([], EMPTY) if there is none."""
    for length in range(min(len(path), counts.max_depth - 1), 0, -1):
        if node := counts.find(path[-length:]):
            return path[-length:], node
    return [], EMPTY


# --- draft trees ------------------------------------------------------------------------------------------------------


def _shown(
    tree: DraftTree, decode: Decode, accepted: Sequence[int], inches: float, rows: int, gap: float = 0.34
) -> set[int]:
    """The nodes that there is room for: the accepted path, then by number (drafters put the best first)."""
    levels = [0.4] * (1 + max(tree.depths, default=0))
    for node, depth in enumerate(tree.depths):
        levels[depth] = max(levels[depth], CHAR * (len(label(decode([tree.tokens[node]]))) + 2) + 0.2)
    deepest, across = 0, 0.85
    while deepest + 1 < len(levels) and across + levels[deepest + 1] + gap <= inches:
        deepest += 1
        across += levels[deepest] + gap
    shown = {node for node in accepted if tree.depths[node] <= deepest}
    leaves = min(1, len(shown))
    parents = {tree.parents[node] for node in shown}
    for node, parent in enumerate(tree.parents):
        if node in shown or tree.depths[node] > deepest or (parent >= 0 and parent not in shown):
            continue
        new_row = bool(parents & {parent}) or not shown
        if leaves + new_row <= rows:
            shown.add(node)
            parents.add(parent)
            leaves += new_row
    return shown


def _boxes(
    tree: DraftTree, decode: Decode, accepted: Sequence[int] | None, shown: set[int], numbers: bool = False
) -> Box:
    """A draft tree as boxes with probabilities or node numbers; `accepted` None: nothing was verified."""
    hidden = [0] * (len(tree) + 1)
    for node, parent in enumerate(tree.parents):
        if node not in shown:
            while parent >= 0 and parent not in shown:
                parent = tree.parents[parent]
            hidden[parent] += 1
    boxes = {-1: Box("root", kind="root")}
    path = set(accepted or ())
    for node in sorted(shown):
        prob = str(node) if numbers else "" if tree.probs is None else f"{tree.probs[node]:.2f}"
        more = f" +{hidden[node]}" if hidden[node] else ""
        kind = "kept" if node in path else "plain" if accepted is None else "rejected"
        boxes[node] = Box(label(decode([tree.tokens[node]])), (prob + more).strip(), kind, 3.0 if node in path else 1.2)
        boxes[node].dashed = kind == "rejected"
        boxes[tree.parents[node]].children.append(boxes[node])
    boxes[-1].note = ("-1" * numbers + f" +{hidden[-1]}" * bool(hidden[-1])).strip()
    return boxes[-1]


def draw_draft(step: Step | DraftTree, decode: Decode, *, dark: bool = False) -> Picture:
    """The draft tree of a Step: its nodes with the drafter's probabilities, if it has any, the accepted path marked,
    the rejected branches dashed. Or a bare DraftTree, of which nothing was verified yet."""
    tree, accepted = (step, None) if isinstance(step, DraftTree) else (step.draft, step.accepted)
    if accepted is None:
        title = f"A draft tree of {plural(len(tree), 'node')}"
        legend = [("root", "root: the text's last token"), ("plain", "drafted")]
    else:
        emitted = plural(len(step.tokens), "token")
        what = f"{len(accepted)} of {plural(len(tree), 'drafted node')} accepted" if tree else "Nothing drafted"
        title = f"{'Prefill' if step.prefill else f'Position {step.position}'}: {what}, {emitted} emitted"
        legend = [("root", "root: the text's last token"), ("kept", "accepted"), ("rejected", "rejected")]
    lines = [title, tree.render(decode, accepted or ())]
    if accepted is not None:
        lines.append(f"emitted: {quote(step.tokens, decode)}")
    remarks = []
    if accepted is not None and step.tokens:
        own = label(decode([step.tokens[-1]]), 20)
        remarks.append(f"The last emitted token is the model's own choice: {own}")
    if tree.probs is not None and tree:
        remarks.append("Numbers: estimated probability that the node is accepted.")
    room = WIDTH - 0.5
    while True:
        shown = _shown(tree, decode, accepted or (), room, ROWS)
        boxes = Boxes(_boxes(tree, decode, accepted, shown))
        if boxes.width <= WIDTH - 0.5 or not shown:
            break
        room -= boxes.width - WIDTH + 0.5  # notes below the tokens have made boxes wider
    remarks += left_out(len(tree) - len(shown), "node", "; +n: so many of them below this node")
    sheet = Sheet(boxes.width + 0.5, boxes.height, title, dark, remarks, legend)
    boxes.draw(sheet, sheet.MARGIN, sheet.top)
    return sheet.picture("\n".join(lines))


def draw_mask(tree: DraftTree, decode: Decode, *, prefix: Sequence[int] = (), dark: bool = False) -> Picture:
    """A draft tree and its attention mask, side by side: a row for each token of the pass, a column for each slot that
    it may see (filled) or not. `prefix`: ids of the last tokens before the root's, which everybody sees."""
    whole, past = tree, list(prefix)
    tree, past = tree.trim(len(tree), 24), past[-8:]
    names = ["root", *(label(decode([token]), 8) for token in tree.tokens)]
    before = [label(decode([token]), 8) for token in past]
    mask = tree.mask().tolist()
    n = len(names)
    cell = 0.3 if n <= 12 else 0.25

    lines = [f"{plural(len(whole), 'drafted node')}; x: the row's token sees the column's"]
    own = ["root", *(repr(decode([token])) for token in whole.tokens)]
    wide = max(map(len, own)) + 3
    full = whole.mask().tolist()
    for i, (name, row) in enumerate(zip(own, full)):
        seen = " ".join("x" if sees else "." for sees in row)
        lines.append(f"{i - 1:3} {name:{wide}} {'x ' * len(prefix)}{'| ' if len(prefix) else ''}{seen}")
    remarks = ["Small numbers: the nodes; the root is -1."]
    remarks += left_out(len(whole) - len(tree), "node")
    remarks += left_out(len(prefix) - len(past), "token", " before these, seen by all")
    legend = [("past", "in the cache: seen by all"), ("kept", "itself, its ancestors, the root"), ("empty", "not seen")]

    names_width = CHAR * max(map(len, names)) + 0.75  # with the number behind
    heads = CHAR * max(map(len, [*names, *before])) + 0.15
    right, gap = names_width + cell * (len(past) + n), 0.2
    room = WIDTH - 2 * Sheet.MARGIN - right - 0.2
    shown = _shown(tree, decode, (), room, n, gap)
    beside = len(shown) == len(tree)  # else the tree stands above its mask
    if not beside:
        shown = _shown(tree, decode, (), WIDTH - 2 * Sheet.MARGIN, 10, gap)
    if hidden := len(tree) - len(shown):
        remarks.append(f"In the tree: +n, so many nodes below are left out ({hidden} in all).")
    boxes = Boxes(_boxes(tree, decode, None, shown, numbers=True), gap)
    tall = heads + cell * n
    height = max(boxes.height, tall) if beside else boxes.height + 0.2 + tall
    width = boxes.width + right + 0.3 if beside else max(boxes.width, right)
    sheet = Sheet(width + 2 * Sheet.MARGIN, height, "A draft tree, and who sees whom", dark, remarks, legend)
    boxes.draw(sheet, sheet.MARGIN, sheet.top + max(0.0, (tall - boxes.height) / 2) * beside)
    x0 = sheet.MARGIN + names_width if not beside else sheet.width - sheet.MARGIN - cell * (len(past) + n)
    y0 = sheet.top + height - cell * n
    for i, name in enumerate(names):
        sheet.text(x0 - 0.45, y0 + cell * (i + 0.5), name, mono=True, align="right")
        sheet.text(x0 - 0.1, y0 + cell * (i + 0.5), str(i - 1), size=9, align="right", colour=sheet.theme.quiet)
        for j in range(len(past)):
            sheet.cell(x0 + cell * j, y0 + cell * i, cell, cell, "past", "")
        for j, sees in enumerate(mask[i]):
            at = x0 + cell * (len(past) + j)
            sheet.cell(at, y0 + cell * i, cell, cell, "kept" if sees else "empty", "" if not sees else None)
    for j, name in enumerate([*before, *names]):
        sheet.text(x0 + cell * (j + 0.5), y0 - 0.08, name, mono=True, rotation=90, valign="center")
    return sheet.picture("\n".join(lines))
