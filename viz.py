"""Pictures of a decode: the trie, a draft tree, its mask, the cache, the text, the pace.

Each is one call on what `decode` and `generate` return, and gives a `Picture` (picture.py): a notebook shows it,
`print` writes its twin in words, `save` makes an SVG or PNG. `decode` turns ids into text (a tokenizer's method);
`dark=True` is for dark pages. beamviz.py does the same for beam search, plots.py for benchmarks.

Long things are cut, and the picture says so: a lecture hall reads thirty boxes, not three hundred.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from beamviz import draw_beam_slots, draw_beams  # noqa: F401  (so that all pictures of a run are found here)
from lookahead import Generation, Step
from picture import (
    CHAR,
    DASHES,
    MARKS,
    Decode,
    Item,
    Picture,
    box,
    canvas,
    draw_tree,
    label,
    legend,
    plot,
    theme_of,
    tree_size,
    write,
)
from plots import draw_cost  # noqa: F401
from tree import DraftTree

MOST_NODES, MOST_DEPTH = 32, 14  # of a tree that is drawn


def draw_trie(
    trie: Any, context: Sequence[int], decode: Decode, *, depth: int = 3, width: int = 4, dark: bool = False
) -> Picture:
    """What the outputs in a TokenTrie say after `context`: below its longest suffix that was ever continued, the
    `width` most frequent followers of each node, `depth` levels deep. Numbers are counts; so are the lines' widths.

    Raises ValueError for a depth or width below 1.
    """
    if depth < 1 or width < 1:
        raise ValueError(f"depth and width must be 1 or more, not {depth} and {width}")
    theme = theme_of(dark)
    recent = list(context)[-(trie.max_depth - 1) :]
    suffix = next((recent[i:] for i in range(len(recent)) if trie.outputs.find(recent[i:])), [])
    top = trie.outputs.find(suffix)
    root = " ".join(label(token, decode) for token in suffix) or "(anything)"
    items: list[Item] = []
    level, left_out = [(top, -1)], 0
    for _ in range(depth):
        below = []
        for node, number in level:
            children = sorted(node.items(), key=lambda entry: (-entry[1].count, entry[0]))
            left_out += len(children[width:])
            for token, child in children[:width]:
                share = child.count / max(top.total, 1)
                items.append(Item(label(token, decode), number, str(child.count), width=0.6 + 7 * share))
                below.append((child, len(items) - 1))
        level = below
    more = f"; {left_out:,} rarer ones are not shown" if left_out else ""
    title = f"after {root!r}: {top.total:,} continuations by {len(top):,} different tokens{more}"
    if not items:
        title = "the trie knows nothing that followed this text"
    room = tree_size(root, items)
    figure, axes = canvas(max(room[0] + 1, CHAR * len(title) + 1), room[1] + 2.2, theme)
    write(axes, 0.5, 0.8, title, theme.ink)
    draw_tree(axes, 0.5, 1.6, root, items, theme)
    return Picture(figure, "\n".join([title, *_indented(items)]))


def draw_draft(step: Step | DraftTree, decode: Decode, *, dark: bool = False) -> Picture:
    """The draft tree of a Step: thick and filled what was accepted, dotted what was rejected, above each node the
    estimated probability that it is accepted. Of a bare DraftTree nothing is known yet, so nothing is marked.
    """
    theme = theme_of(dark)
    tree, accepted, emitted = (
        (step, [], None) if isinstance(step, DraftTree) else (step.draft, step.accepted, step.tokens)
    )
    items, left_out = tree_items(tree, decode, None if emitted is None else accepted)
    title = f"{len(tree)} nodes drafted" + (f", {left_out} of them not shown" if left_out else "")
    if emitted is not None:
        title += f", {len(accepted)} accepted; emitted: " + " ".join(label(token, decode) for token in emitted)
    room = tree_size("(root)", items)
    figure, axes = canvas(max(room[0] + 1, CHAR * len(title) + 1), room[1] + 2.2, theme)
    write(axes, 0.5, 0.8, title, theme.ink)
    draw_tree(axes, 0.5, 1.6, "(root)", items, theme)
    return Picture(figure, f"{title}\n{tree.render(decode, accepted)}")


def tree_items(tree: DraftTree, decode: Decode, accepted: Sequence[int] | None) -> tuple[list[Item], int]:
    """The nodes of a draft tree that are drawn, and how many are not: the first MOST_NODES (the most probable, if a
    trie made it) and the accepted ones, down to MOST_DEPTH. `accepted` None: not verified yet."""
    kept = set(accepted or ())
    shown = [n for n in range(len(tree)) if (n < MOST_NODES or n in kept) and tree.depths[n] <= MOST_DEPTH]
    new = {-1: -1} | {node: i for i, node in enumerate(shown)}
    items = []
    for node in shown:
        style = "plain" if accepted is None else "kept" if node in kept else "freed"
        note = f"{tree.probs[node]:.2f}" if tree.probs else ""
        width = 2.5 if style == "kept" else 1.2
        items.append(Item(label(tree.tokens[node], decode), new[tree.parents[node]], note, style, width))
    return items, len(tree) - len(shown)


def _indented(items: Sequence[Item]) -> list[str]:
    """A line for each item, below its parent."""
    children: list[list[int]] = [[] for _ in range(len(items) + 1)]
    for node, item in enumerate(items):
        children[item.parent].append(node)
    lines, stack = [], [(node, 1) for node in reversed(children[-1])]
    while stack:
        node, depth = stack.pop()
        lines.append(f"{'  ' * depth}{items[node].text}  {items[node].note}")
        stack += [(child, depth + 1) for child in reversed(children[node])]
    return lines


def draw_mask(tree: DraftTree, decode: Decode, *, prefix: Sequence[int] = (), dark: bool = False) -> Picture:
    """A draft tree and the mask of the forward that verifies it, side by side: row i + 1 is node i, and sees (x) the
    root, its ancestors and itself. `prefix`: the last tokens before the root, as columns that everybody sees.
    """
    theme = theme_of(dark)
    size = min(len(tree), MOST_NODES - 8)
    part = tree.trim(max(tree.depths, default=0), size)
    items, _ = tree_items(part, decode, None)
    names = ["(root)", *(label(token, decode) for token in part.tokens)]
    above = [*(label(token, decode) for token in prefix), *names]
    seen = [[1] * len(prefix) + row for row in part.mask().int().tolist()]
    room, side, high = tree_size("(root)", items), CHAR * max(map(len, names)) + 0.5, CHAR * max(map(len, above)) + 0.6
    left, top = room[0] + 1.8 + side, 1.4 + high
    title = f"{len(tree)} nodes: {len(tree) + 1} rows" + (f", the first {size + 1} shown" if size < len(tree) else "")
    figure, axes = canvas(
        max(left + len(above) + 0.6, CHAR * len(title) + 1), max(room[1] + 1.6, top + len(names)) + 0.6, theme
    )
    write(axes, 0.5, 0.8, title, theme.ink)
    draw_tree(axes, 0.5, 1.4, "(root)", items, theme)
    for column, name in enumerate(above):
        colour = theme.quiet if column < len(prefix) else theme.ink
        write(axes, left + column + 0.5, top - 0.2, name, colour, 9, rotation=90, ha="center", va="bottom")
    for row, (name, sees) in enumerate(zip(names, seen)):
        write(axes, left - 0.3, top + row + 0.5, name, theme.ink, ha="right")
        for column, yes in enumerate(sees):
            style = "plain" if column < len(prefix) else "kept" if yes else "freed"
            box(axes, left + column + 0.08, top + row + 0.08, 0.84, 0.84, style, theme)
            if yes:
                write(axes, left + column + 0.5, top + row + 0.5, "x", theme.ink, ha="center")
    widest = max(map(len, names))
    lines = [f"{name:>{widest}}  " + " ".join(".x"[yes] for yes in row) for name, row in zip(names, seen)]
    columns = f"columns: {' '.join(above)}"
    return Picture(figure, "\n".join([title, *lines, columns]))


SLOTS = {
    ".": "before this pass",
    "R": "root",
    "+": "accepted, stays",
    "<": "accepted, moves left",
    "x": "rejected, freed",
}


def slots_of(step: Step) -> str:
    """A character (of SLOTS) for each cache slot that is in use while this step's forward runs.

    A prefill's are all of its prompt. Later, with position = the first emitted token's, slot position - 1 is the root's
    and node i has the slot i places behind it + 1; the accepted path is moved to the slots right behind the root.
    """
    if step.prefill:
        return "+" * step.position
    nodes = ["x"] * len(step.draft)
    for place, node in enumerate(step.accepted):
        nodes[node] = "+" if node == place else "<"
    return "." * (step.position - 1) + "R" + "".join(nodes)


def draw_slots(
    generation: Generation | Sequence[Step], *, most: int = 12, before: int = 6, dark: bool = False
) -> Picture:
    """The cache over time: a line for each pass (`most` at most), a square for each slot. A line shows what the pass
    found there and wrote; what moves left or is freed is gone on the next line. Of the slots that all of the passes
    find in use the last `before` are drawn.
    """
    theme = theme_of(dark)
    steps = [generation.prefill, *generation.steps] if isinstance(generation, Generation) else list(generation)
    if not steps or any(not step.tokens for step in steps):
        raise ValueError("there is no pass to draw: this text ended before its first token")
    shown, rows = steps[:most], [slots_of(step) for step in steps[:most]]
    first = max(min(step.position - (not step.prefill) for step in shown) - before, 0)
    widest = max(len(row) for row in rows)
    cut = f", the first {len(shown)} of {len(steps)} passes" if len(steps) > most else ""
    title = f"cache slots {first} to {widest - 1}{cut}"
    names = ["prefill" if step.prefill else f"pass {i}" for i, step in enumerate(shown, not shown[0].prefill)]
    left, top, cell = 3.2, 2.6, 0.8
    width = max(left + (widest - first) * cell + 0.6, 30)
    figure, axes = canvas(width, top + len(rows) + 2.6, theme)
    write(axes, 0.5, 0.8, title, theme.ink)
    for slot in range(first, widest):
        if slot % 5 == 0:
            write(axes, left + (slot - first + 0.5) * cell, top - 0.5, str(slot), theme.quiet, 9, ha="center")
    marks = {".": ("plain", ""), "R": ("plain", "R"), "+": ("kept", "+"), "<": ("kept", "<"), "x": ("freed", "x")}
    for line, (name, row) in enumerate(zip(names, rows)):
        write(axes, left - 0.3, top + line + 0.5, name, theme.ink, ha="right")
        for slot in range(first, len(row)):
            style, mark = marks[row[slot]]
            x = left + (slot - first) * cell
            box(axes, x + 0.05, top + line + 0.1, cell - 0.1, 0.8, style, theme)
            write(axes, x + cell / 2, top + line + 0.5, mark, theme.ink, 9, ha="center")
    x, y = left, top + len(rows) + 1.1
    for (style, mark), meaning in zip(marks.values(), SLOTS.values()):
        if x + 1 + CHAR * len(meaning) > width:
            x, y = left, y + 1
        box(axes, x, y - 0.4, cell - 0.1, 0.8, style, theme)
        write(axes, x + cell / 2, y, mark, theme.ink, 9, ha="center")
        write(axes, x + cell + 0.2, y, meaning, theme.quiet, 9)
        x += cell + 1 + CHAR * len(meaning)
    lines = [f"{name:>8}  {row[first:]}" for name, row in zip(names, rows)]
    key = ", ".join(f"{mark} {meaning}" for mark, meaning in SLOTS.items())
    return Picture(figure, "\n".join([title, *lines, key]))


def draw_text(generation: Generation, decode: Decode, *, columns: int = 76, dark: bool = False) -> Picture:
    """The text, its background by the step that emitted each token (four in turn); underlined is what was drafted and
    accepted, the rest is the model's own pick behind it. A small number says how many tokens a step emitted.
    """
    theme = theme_of(dark)
    runs: list[tuple[int, bool, str]] = []  # (number of the step, drafted, text)
    tokens, written = [], ""
    for number, step in enumerate([generation.prefill, *generation.steps]):
        for i, token in enumerate(step.tokens):
            tokens.append(token)
            whole = decode(tokens).rstrip("\ufffd")  # half a character waits for its other half
            runs.append((number, i < len(step.accepted), whole[len(written) :]))
            written = whole
    lines: list[list[tuple[int, int, bool, str]]] = [[]]  # of each line: (column, step, drafted, text)
    column = 0
    for number, drafted, text in runs:
        for i, part in enumerate(text.split("\n")):
            if i or column + len(part) > columns:
                lines.append([])
                column = 0
            if part:
                lines[-1].append((column, number, drafted, part))
            column += len(part)
    steps = len(generation.steps)
    title = f"{len(generation.tokens)} tokens, {steps + 1} passes"
    title += f", {generation.tokens_per_step:.2f} tokens per step" if steps else ""
    figure, axes = canvas(CHAR * columns + 1, 2.2 + 1.5 * len(lines), theme)
    write(axes, 0.5, 0.8, title, theme.ink)
    begun = -1
    for row, line in enumerate(lines):
        y = 2.2 + 1.5 * row
        for at, number, drafted, part in line:
            x, wide = 0.5 + CHAR * at, CHAR * len(part)
            box(axes, x, y - 0.5, wide, 1.0, "plain", theme)
            axes.patches[-1].set(facecolor=theme.tints[number % len(theme.tints)], linewidth=0, boxstyle="square,pad=0")
            write(axes, x, y, part, theme.ink, size=10 * CHAR / 0.2785)
            if drafted:
                axes.plot([x, x + wide], [y + 0.42, y + 0.42], color=theme.kept, linewidth=1.6, zorder=3)
            if number != begun:
                axes.plot([x, x], [y - 0.5, y + 0.5], color=theme.ink, linewidth=0.8, zorder=3)
                begun = number
    words = [
        "[" + "".join(t for _, drafted, t in part if drafted) + "|" + "".join(t for _, d, t in part if not d) + "]"
        for part in (list(run) for _, run in itertools.groupby(runs, key=lambda run: run[0]))
    ]
    return Picture(figure, f"{title}; [drafted and accepted|the model's own pick]\n{''.join(words)}")


def draw_pace(generations: Mapping[str, Generation], *, dark: bool = False) -> Picture:
    """How several decodes went on: tokens over forward passes (left) and over seconds (right); steps' times only, so
    that whatever a caller did between them does not count.
    """
    if not generations:
        raise ValueError("give at least one generation, as {name: generation}")
    theme = theme_of(dark)
    figure, (left, right) = plot(9, 3.6, theme, 2)
    lines = []
    for number, (name, generation) in enumerate(generations.items()):
        steps = [generation.prefill, *generation.steps]
        tokens = [0, *itertools.accumulate(len(step.tokens) for step in steps)]
        seconds = [0.0, *itertools.accumulate(sum(step.seconds) for step in steps)]
        rate = tokens[-1] / seconds[-1] if seconds[-1] else 0.0
        look = {
            "color": theme.series[number % len(theme.series)], "linestyle": DASHES[number % len(DASHES)],
            "marker": MARKS[number % len(MARKS)], "markevery": max(len(steps) // 8, 1), "markersize": 4,
        }  # fmt: skip
        left.plot(range(len(tokens)), tokens, label=f"{name}: {generation.tokens_per_step:.2f} tokens per step", **look)
        right.plot(seconds, tokens, label=f"{name}: {rate:.0f} tokens/s", **look)
        lines.append(
            f"{name}: {tokens[-1]} tokens in {len(steps)} passes, {generation.tokens_per_step:.2f} per step, "
            f"{rate:.0f} per second"
        )
    for axes, unit in ((left, "forward passes"), (right, "seconds")):
        axes.set_xlabel(unit)
        axes.set_ylabel("tokens")
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        legend(axes, theme, loc="lower right")
    return Picture(figure, "\n".join(lines))
