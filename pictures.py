"""The README's two pictures, made from a real run: `python pictures.py` writes them to assets/.

recording.svg   the README's first command as an animation: plain decoding and lookahead write the same text, each at
                the speed that was measured, slowed down so that an eye can follow
idea.svg        one step of it: the text so far, the draft tree, the one pass that checks it, what was kept

Both are plain SVG with CSS inside, no script. They follow the reader's light or dark setting, and whoever asked for
less motion sees the last frame only.
"""

import copy
import itertools
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from cli import read_responses
from lookahead import Generation, Step, generate
from model import GPT
from options import Parser
from picture import Box, label
from tokenizer import Tokenizer
from tree import DraftTree
from trie import TokenTrie

PROMPT = (
    "Question: A baker sells bread for $4 each. He sells 30 of them in the morning and 12 in the afternoon. "
    "How much money does he make?\nAnswer:"
)
ASSETS = Path(__file__).parent / "assets"
RUNS = 9  # of each side, in turn; the one with the median ratio is shown
SLOWER = 20  # times: a text of 115 tokens takes a quarter of a second
WIDTH = 56  # characters of a line
CHAR, LINE = 7.8, 19  # pixels at a font size of 13

STYLE = """
text { font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: #1f2328;
       white-space: pre }
.page { fill: #ffffff } .pane, .node { fill: #f6f8fa; stroke: #8c959f } .quiet { fill: #59636e }
.kept { fill: #00664d; font-weight: bold } .box { fill: none; stroke: #8c959f } .edge { fill: none; stroke: #8c959f }
.path { fill: none; stroke: #00664d; stroke-width: 3 } .yes { fill: #d5efe6; stroke: #00664d; stroke-width: 2 }
.no { stroke-dasharray: 4 3 } .head { font-weight: bold } .small { font-size: 10px }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .page { fill: #0d1117 } .pane, .node { fill: #161b22; stroke: #6e7681 }
  .quiet { fill: #9198a1 } .kept { fill: #56d4a8 } .box, .edge { stroke: #6e7681 } .path { stroke: #56d4a8 }
  .yes { fill: #12382c; stroke: #56d4a8 }
}
"""


def svg(width: float, height: float, title: str, style: str, parts: Sequence[str]) -> str:
    """A whole file; `title` is what a screen reader says."""
    box = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img" aria-label="{escape(title)}">'
    page = f'<rect class="page" width="{width:g}" height="{height:g}"/>'
    return "\n".join(
        [head, f"<title>{escape(title)}</title>", f"<style>{STYLE}{style}</style>", page, *parts, "</svg>\n"]
    )


def at(x: float, y: float, text: str, name: str = "", anchor: str = "start") -> str:
    return f'<text class="{name}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'


# --- the recording ----------------------------------------------------------------------------------------------------


def moments(generation: Generation) -> list[tuple[float, Step]]:
    """Each step, the prefill first, with the seconds after which it was done."""
    steps = [generation.prefill, *generation.steps]
    return list(zip(itertools.accumulate(sum(step.seconds) for step in steps), steps))


def pane(
    left: float, name: str, kind: str, generation: Generation, whole: float, tokenizer: Tokenizer
) -> tuple[list[str], list[str], int]:
    """One side: its text elements, their keyframes and how many lines the text takes.

    Everything that one step emits appears at once. `whole` is the length of the animation, in seconds as measured.
    """
    parts, frames, line, column, written = [], [], 0, 0, 0
    text, done = tokenizer.stream(), moments(generation)
    for number, (seconds, step) in enumerate(done):
        here = []
        for i, token in enumerate(step.tokens):
            piece = text.push([token] if token != tokenizer.eot else [])
            for j, run in enumerate(piece.split("\n")):
                if j or column + len(run) > WIDTH:
                    line, column = line + 1, 0
                if run:
                    style = "kept" if i < len(step.accepted) else ""
                    here.append(at(left + 12 + column * CHAR, 64 + line * LINE, run, style))
                column += len(run)
        written += len(step.tokens)
        here.append(at(left + 12, 30, f"{name}: {written} tokens, {number + 1} forward passes", "head"))
        moment = 100 * seconds / whole
        last = number == len(generation.steps)
        until = "" if last else f"{100 * done[number + 1][0] / whole:.2f}%,100%{{visibility:hidden}}"
        frames.append(f"@keyframes {kind}{number}{{0%{{visibility:hidden}}{moment:.2f}%,100%{{visibility:visible}}}}")
        frames.append(
            f"@keyframes {kind}t{number}{{0%{{visibility:hidden}}{moment:.2f}%{{visibility:visible}}{until}}}"
        )
        *words, title = here
        parts.append(f'<g class="step" style="animation-name:{kind}{number}">{"".join(words)}</g>')
        name_of = "step" if last else "step title"
        parts.append(f'<g class="{name_of}" style="animation-name:{kind}t{number}">{title}</g>')
    return parts, frames, line + 1


def recording(plain: Generation, ahead: Generation, tokenizer: Tokenizer) -> str:
    """Both texts side by side as they were written; the animation ends with a pause and begins again."""
    slow = max(moments(side)[-1][0] for side in (plain, ahead))
    whole = slow * 1.35
    width = 24 + WIDTH * CHAR
    parts, frames, lines = [], [], 0
    for left, name, kind, side in ((8, "plain decoding", "p", plain), (width + 16, "lookahead", "l", ahead)):
        texts, keys, used = pane(left, name, kind, side, whole, tokenizer)
        parts.append((left, texts))
        frames, lines = frames + keys, max(lines, used)
    height = 64 + lines * LINE
    drawn = []
    for left, texts in parts:
        drawn.append(f'<rect class="pane" x="{left}" y="8" width="{width:g}" height="{height}" rx="6"/>')
        drawn += texts
    note = f"green: guessed by the trie, checked by the model; slowed down {SLOWER} times; {faster(plain, ahead)}"
    drawn.append(at(20, height + 30, note, "quiet"))
    style = "\n".join(
        [
            f".step {{ animation: {whole * SLOWER:.2f}s infinite step-end }}",
            "@media (prefers-reduced-motion: reduce) { .step { animation: none } .title { visibility: hidden } }",
            *frames,
        ]
    )
    about = f"Plain decoding and lookahead write the same text. {counted(plain)} and {counted(ahead)}."
    return svg(2 * width + 24, height + 44, about, style, drawn)


def counted(side: Generation) -> str:
    return f"{len(side.tokens)} tokens in {len(side.steps) + 1} forward passes"


def faster(plain: Generation, ahead: Generation) -> str:
    ratio = moments(plain)[-1][0] / moments(ahead)[-1][0]
    return f"{ratio:.1f} times as fast here, and the same text"


# --- the idea ---------------------------------------------------------------------------------------------------------


def rows_of(tree: DraftTree) -> dict[int, int]:
    """A line for each node: a node's first child on its own line, the others below."""
    boxes = {-1: Box("")}
    for node, parent in enumerate(tree.parents):
        boxes[node] = Box("")
        boxes[parent].children.append(boxes[node])
    list(boxes[-1].walk())  # numbers the rows
    return {node: box.row for node, box in boxes.items()}


def idea(step: Step, before: list[int], decode: Callable[[list[int]], str]) -> str:
    """One step of a decode in three boxes, from left to right: draft, verify, accept."""
    tree, rows = step.draft, rows_of(step.draft)

    def shown(token: int) -> str:
        return label(decode([token]))

    cell, top, tree_left = 24, 92, 24
    column = max(len(shown(token)) for token in [*tree.tokens, before[-1]]) * CHAR + 26
    column = max(column, 74)
    deepest = max(tree.depths)

    def place(node: int) -> tuple[float, float]:
        depth = 0 if node < 0 else tree.depths[node]
        return tree_left + depth * (column + 14), top + rows[node] * 48

    parts = [
        at(tree_left, 30, "1  Draft: a trie of earlier text guesses", "head"),
        at(tree_left, 50, "what may follow, and how probable it is", "quiet"),
    ]
    kept = {-1, *step.accepted}
    for node, parent in sorted(enumerate(tree.parents), key=lambda edge: edge[0] in kept):  # the path over the others
        (x0, y0), (x1, y1) = place(parent), place(node)
        x0, y0, y1 = x0 + column, y0 + 13, y1 + 13
        bend = f"M{x0:g} {y0:g} H{x0 + 7:g} V{y1:g} H{x1:g}" if y0 != y1 else f"M{x0:g} {y0:g} H{x1:g}"
        parts.append(f'<path class="{"path" if node in kept else "edge"}" d="{bend}"/>')
    for node in range(-1, len(tree)):
        x, y = place(node)
        token = before[-1] if node < 0 else tree.tokens[node]
        name = "yes" if node in kept else "node no"
        parts.append(f'<rect class="{name}" x="{x:g}" y="{y:g}" width="{column:g}" height="26" rx="5"/>')
        parts.append(at(x + column / 2, y + 18, shown(token), "kept" if node in kept else "", "middle"))
        if node >= 0 and tree.probs:
            parts.append(at(x + column / 2, y - 3, f"{tree.probs[node]:.2f}", "quiet small", "middle"))
    parts.append(at(tree_left, top + 44, "last token", "quiet"))

    left = tree_left + max((deepest + 1) * (column + 14), 42 * CHAR) + 36
    names = [before[-1], *tree.tokens]
    longest = max(len(shown(token)) for token in names) * CHAR
    grid = left + longest + 10
    parts += [
        at(left, 30, "2  Verify: one forward pass over all of them", "head"),
        at(left, 50, "each row sees the text, its own path and itself", "quiet"),
    ]
    for i, row in enumerate(tree.mask().tolist()):
        y = top + i * cell
        parts.append(at(grid - 8, y + 17, shown(names[i]), "kept" if i - 1 in kept else "", "end"))
        for j, sees in enumerate(row):
            name = "yes" if sees else "box"
            parts.append(
                f'<rect class="{name}" x="{grid + j * cell:g}" y="{y:g}" width="{cell - 3}" height="{cell - 3}"/>'
            )
            if sees:
                parts.append(at(grid + j * cell + 7, y + 16, "x", "kept"))

    right = max(grid + (len(tree) + 1) * cell, left + 46 * CHAR) + 36
    parts += [
        at(right, 30, "3  Accept: follow the model's own picks", "head"),
        at(right, 50, "what it would have written one by one", "quiet"),
    ]
    for i, token in enumerate(step.tokens):
        from_draft = i < len(step.accepted)
        y = top + 18 + i * 28
        after = before[-1] if i == 0 else step.tokens[i - 1]
        said = f"after {shown(after)!s:<6} the model picks {shown(token)}"
        parts.append(at(right, y, said, "kept" if from_draft else ""))
        parts.append(at(right, y + 13, "drafted: go on there" if from_draft else "not drafted: stop here", "quiet"))
    bottom = top + 18 + len(step.tokens) * 28 + 12
    parts.append(at(right, bottom + 6, f"{len(step.tokens)} tokens for one pass", "head"))
    height = max(bottom + 6, top + (max(rows.values()) + 1) * 48, top + (len(tree) + 1) * cell) + 34
    parts.append(at(tree_left, height - 12, "␣ is a space; dashed: rejected", "quiet"))
    about = f"One step: {len(tree)} tokens are drafted, one pass verifies them, {len(step.tokens)} are emitted."
    return svg(right + 42 * CHAR, height, about, "", parts)


def main(argv: list[str] | None = None) -> int:
    Parser(
        prog="pictures.py", description="make the README's two pictures anew, from a run on this machine"
    ).parse_args(argv)
    try:
        return make()
    except (ValueError, OSError) as error:
        print(f"pictures: {error}", file=sys.stderr)
        return 2


def make() -> int:
    model = GPT.load("tiny")
    tokenizer = Tokenizer.for_model(model)
    prompt = tokenizer.encode(PROMPT)
    trie = TokenTrie(model.vocab_size)
    for response in read_responses(str(ASSETS / "responses.jsonl")):
        trie.insert([*tokenizer.encode(response), tokenizer.eot])
    settings = {"stop_ids": [tokenizer.eot]}
    generate(model, prompt, **settings)  # the first forwards of a process are slow
    pairs = [
        (generate(model, prompt, **settings), generate(model, prompt, drafter=fresh(trie), **settings))
        for _ in range(RUNS)
    ]
    if any(plain.tokens != ahead.tokens for plain, ahead in pairs):
        print("pictures: the two texts part at a near-tie on this machine: choose another prompt", file=sys.stderr)
        return 1
    pairs.sort(key=lambda pair: pair[0].seconds / pair[1].seconds)
    write("recording.svg", recording(*pairs[RUNS // 2], tokenizer))

    few = generate(model, prompt, drafter=fresh(trie), budget=7, **settings)
    texts = [token for step in (few.prefill, *few.steps) for token in step.tokens]
    written, best = len(few.prefill.tokens), None
    for step in few.steps:  # an example with something of everything: branches, and a path that ends half-way
        branches = len(step.draft) + 1 - len({-1, *step.draft.parents})  # leaves
        words = sum(tokenizer.decode([token]).strip().isalpha() for token in step.draft.tokens)
        worth = 2 <= len(step.accepted) <= 3 and 3 <= branches <= 4, words
        if step.draft and (best is None or worth > best[0]):
            best = worth, step, texts[:written]
        written += len(step.tokens)
    write("idea.svg", idea(best[1], best[2], tokenizer.decode))
    return 0


def fresh(trie: TokenTrie) -> TokenTrie:
    """A copy, so that no run can draft from what another one wrote."""
    return copy.deepcopy(trie)


def write(name: str, text: str) -> None:
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=ASSETS) as scratch:
        Path(scratch, name).write_text(text, encoding="utf-8")
        os.replace(Path(scratch, name), ASSETS / name)
    print(f"{ASSETS.name}/{name}: {len(text):,} characters")


if __name__ == "__main__":
    sys.exit(main())
