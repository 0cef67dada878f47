"""Pictures of what the decoders do. Each is one call on the records that they return anyway:

    draw_trie(trie, context, decode)         what followed the end of a text, in the outputs seen so far    treeviz.py
    draw_draft(step, decode)                 a step's draft tree: the accepted path, rejected branches
    draw_mask(tree, decode)                  a draft tree, and who sees whom in the pass that verifies it
    draw_slots(generation)                   the KV cache, pass by pass: drafted, kept, moved, freed
    draw_text(generation, decode)            the text, by the pass that wrote each token
    draw_pace({"name": generation, ...})     tokens over passes and over time
    draw_beams(beam_steps, decode)           the beams as a tree: who has heirs, who is a dead end          beamviz.py
    draw_beam_slots(beam_steps, length)      the beams' caches, step by step
    draw_cost(rows)                          the time of a pass by its width                                plots.py

In a notebook the last line of a cell shows its picture; `print(picture)` is its twin in text; `picture.save("x.svg")`
writes it; all take `dark=True`. `decode` turns ids into text: `tokenizer.decode`.

    tokenizer = Tokenizer.for_model(model)
    generation = generate(model, tokenizer.encode(prompt), drafter=trie)
    draw_draft(generation.steps[3], tokenizer.decode).save("draft.png")

Pictures import what they like, and no decoder imports them. How they are drawn is in picture.py.
"""

import math
from collections.abc import Mapping, Sequence

from beamviz import draw_beam_slots, draw_beams
from lookahead import Generation, Step
from picture import (
    CHAR,
    LINES,
    MARKERS,
    WIDTH,
    Decode,
    Picture,
    Sheet,
    cut,
    figure_of,
    label,
    laid_out,
    left_out,
    plain,
    plural,
    settings,
    theme_of,
)
from plots import draw_cost
from treeviz import draw_draft, draw_mask, draw_trie

__all__ = [
    "Picture", "draw_beam_slots", "draw_beams", "draw_cost", "draw_draft", "draw_mask", "draw_pace", "draw_slots",
    "draw_text", "draw_trie",
]  # fmt: skip

ROWS = 20  # passes, lines of text: more are counted, not drawn


# --- the cache, pass by pass ------------------------------------------------------------------------------------------


def slots_of(step: Step) -> tuple[int, list[str], list[tuple[int, int]]]:
    """(base, kinds, moves) of a pass: `base` slots are committed before it, slot base + i then holds what kinds[i] says
    ("root", "kept", "freed"), and the kept ones move from slot to slot. (A prefill commits its tokens, no more.)"""
    if step.prefill:
        return (step.position if step.tokens else 0), [], []
    base = step.position - 1  # the root, the token before the first emitted one, is not in the cache yet
    kinds = ["root"] + ["freed"] * len(step.draft)
    for node in step.accepted:
        kinds[1 + node] = "kept"
    return base, kinds, [(base + 1 + node, base + 1 + rank) for rank, node in enumerate(step.accepted)]


def passes_of(number: int, kind: str = "") -> str:
    return f"{number} {kind}pass{'es' * (number != 1)}"


def draw_slots(generation: Generation | Sequence[Step], *, dark: bool = False) -> Picture:
    """The slots of the KV cache (across) over the passes (down). A pass writes the root and the draft's nodes behind
    what is committed; then root and accepted path stay, moved together, and the rest is freed: the next pass writes
    over it. Takes a Generation or a list of Steps, a part of a decode too."""
    steps = [generation.prefill, *generation.steps] if isinstance(generation, Generation) else list(generation)
    steps = [step for step in steps if step.tokens]  # a full context: no pass
    passes = [slots_of(step) for step in steps]
    lines, kept, freed, moved = [], 0, 0, 0
    for step, (base, kinds, moves) in zip(steps, passes):
        signs = {"root": "R", "kept": "k", "freed": "."}
        away = [f"{a}->{b}" for a, b in moves if a != b]
        kept, freed, moved = kept + len(moves), freed + kinds.count("freed"), moved + len(away)
        if step.prefill:
            lines.append(f"prefill: {plural(base, 'slot')} committed")
        else:
            after = base + 1 + len(moves)
            drawn = "".join(signs[kind] for kind in kinds)
            told = f"kept {len(moves)}, freed {kinds.count('freed')}, {plural(after, 'slot')} committed"
            lines.append(f"from slot {base}: [{drawn}] {told}{'; moved ' * bool(away)}{', '.join(away)}")
    total = f"{kept} of {plural(kept + freed, 'drafted slot')} kept, {moved} of them moved, {freed} freed"
    if not kept + freed:
        total = "nothing was drafted"
    decoded = len(passes) - sum(step.prefill for step in steps)
    lines.append(f"{passes_of(decoded)}: {total}  (R root, k kept, . freed)")

    shown, room = passes[:ROWS], 70  # columns
    start = max(0, min((base for base, kinds, _ in shown if kinds), default=shown[0][0] if shown else 0) - 3)
    # columns that a pass needs (a tail of freed slots may be left out)
    needs = [max([base, *(a for a, _ in moves)]) + 2 - start for base, _, moves in shown]
    least = next((i for i, (_, kinds, _) in enumerate(shown, 1) if kinds), 1)  # a pass that drafts is always drawn
    while len(shown) > least and max(needs[: len(shown)]) > room:
        shown = shown[:-1]
    most = max((base + len(kinds) for base, kinds, _ in shown), default=0) - start
    columns = min(room, max(12, most))
    remarks = []
    if len(passes) > len(shown):
        remarks.append(f"... and {passes_of(len(passes) - len(shown), 'more ')}.")
    if most > columns:
        far = sum(a - start >= columns for _, _, moves in shown for a, _ in moves)
        told = f"; {far} of those moved to the left" if far else ""
        remarks.append(f"... and up to {plural(most - columns, 'more slot')} to the right{told}.")
    legend = [("past", "committed"), ("root", "root"), ("kept", "drafted, accepted: kept"),
              ("freed", "drafted, rejected: freed")]  # fmt: skip
    if any(a != b for _, _, moves in shown for a, b in moves):
        remarks.append("Lines: where a kept slot moves, so that the committed ones stay together.")
    left, pitch, height = 1.0, 0.46, 0.26
    cell = min(0.26, (WIDTH - left - 1.7) / columns)
    sheet = Sheet(
        left + cell * columns + 1.7,
        0.3 + pitch * (len(shown) + 1),
        f"KV cache, {passes_of(decoded)}: {total}",
        dark,
        remarks,
        legend,
    )
    x0, y0 = left, sheet.top + 0.3
    for slot in range(start, start + columns):
        if slot % 5 == 0:
            sheet.text(x0 + cell * (slot - start + 0.5), sheet.top + 0.1, str(slot), size=9, align="center")
    sheet.text(x0 - 0.12, sheet.top + 0.1, "slot", size=9, align="right")
    for row, ((base, kinds, moves), step) in enumerate(zip(shown, steps)):
        y = y0 + pitch * row
        name = "prefill" if step.prefill else f"pass {row}" if steps[0].prefill else f"from {base}"
        sheet.text(x0 - 0.12, y + height / 2, name, align="right")
        _committed(sheet, x0, y, cell, height, min(base - start, columns), start)
        for i, kind in enumerate(kinds):
            if base + i - start < columns:
                sheet.cell(x0 + cell * (base + i - start), y, cell, height, kind)
        for a, b in moves:
            if a != b and a - start < columns:
                x = [x0 + cell * (slot - start + 0.5) for slot in (a, b)]
                sheet.line(x, [y + height, y + pitch], sheet.theme.ink, 1.2)
        if kinds:
            told = f"{len(moves)} of {len(kinds) - 1} kept" if len(kinds) > 1 else "no draft"
            sheet.text(x0 + cell * columns + 0.12, y + height / 2, told)
    if shown:
        base, kinds, moves = shown[-1]
        y = y0 + pitch * len(shown)
        sheet.text(x0 - 0.12, y + height / 2, "after", align="right")
        after = base + len(moves) + bool(kinds)
        _committed(sheet, x0, y, cell, height, min(after - start, columns), start)
    return sheet.picture("\n".join(lines))


def _committed(sheet: Sheet, x: float, y: float, cell: float, height: float, count: int, start: int) -> None:
    for i in range(count):
        sheet.cell(x + cell * i, y, cell, height, "past", "…" if i == 0 and start else "")


# --- the text ---------------------------------------------------------------------------------------------------------


def _pieces(tokens: Sequence[int], decode: Decode) -> list[str]:
    """The text of each token; a character that is spread over several belongs to the last of them."""
    pieces, waiting = [], []
    for token in tokens:
        waiting.append(token)
        text = decode(waiting)
        whole = not text.endswith("\ufffd") or len(waiting) == 4
        pieces.append(text if whole else "")
        waiting = [] if whole else waiting
    if waiting:
        pieces[-1] = decode(waiting)
    return pieces


def draw_text(generation: Generation, decode: Decode, *, dark: bool = False) -> Picture:
    """The text, in one colour per pass, with the pass's number where its first token begins (0: the prefill). What was
    drafted and accepted is underlined; the rest are the model's own choices, one per pass."""
    steps = [generation.prefill, *generation.steps]
    rate = generation.tokens_per_step
    pace = "" if math.isnan(rate) else f", {rate:.2f} tokens per step"
    title = f"{plural(len(generation.tokens), 'token')} in a prefill and {plural(len(generation.steps), 'step')}{pace}"
    lines, placed = [title], []  # placed: (column, row, text, pass, drafted, first of its pass)
    pieces = iter(_pieces(generation.tokens, decode))
    x, y, width = 0.0, 0, int((WIDTH - 0.6) / CHAR)
    for number, step in enumerate(steps):
        own = [next(pieces) for _ in step.tokens]
        told = " ".join(repr(piece) + "*" * (i < len(step.accepted)) for i, piece in enumerate(own))
        lines.append(f"{number or 'prefill'}: {told}")
        free = 0.0  # the first column behind the pass's number
        for i, piece in enumerate(own):
            text = label(piece, 40) if piece else "·"
            if x and x + len(text) > width:
                x, y, free = 0.0, y + 1, 0.0
            if i == 0:
                free = x + len(str(number)) + 0.6
            placed.append((x, y, text, number, i < len(step.accepted), i == 0))
            x += len(text)
            if piece.endswith("\n"):
                x, y, free = 0.0, y + 1, 0.0
        x = max(x, free)
    lines.append("* drafted and accepted")

    shown = [mark for mark in placed if mark[1] < ROWS]
    remarks = ["Numbers: the pass. Underlined: drafted and accepted. Not underlined: the model's own choice."]
    remarks += left_out(len(placed) - len(shown), "token")
    pitch, left = 0.52, Sheet.MARGIN + 0.02
    wide = CHAR * max((x + len(text) for x, _, text, *_ in shown), default=0) + 2 * left
    sheet = Sheet(wide, pitch * (1 + max((y for _, y, *_ in shown), default=0)), title, dark, remarks)
    for x, y, text, number, drafted, first in shown:
        at, top, inches = left + CHAR * x, sheet.top + pitch * y + 0.2, CHAR * len(text)
        sheet.cell(at, top, inches, 0.24, f"turn{number % 4}", "")
        sheet.text(at, top + 0.12, text, mono=True)
        if drafted:
            sheet.line([at, at + inches], [top + 0.27, top + 0.27], sheet.theme.ink, 2.0)
        if first:
            sheet.text(at, top - 0.09, str(number), size=9, colour=sheet.theme.quiet)
    return sheet.picture("\n".join(lines))


# --- pace -------------------------------------------------------------------------------------------------------------


def draw_pace(generations: Mapping[str, Generation], *, dark: bool = False) -> Picture:
    """Tokens over passes and over time, a line for each decode; tokens per step and per second in the legend. The
    prefill and its token are where a line begins."""
    theme = theme_of(dark)
    lines = [f"{'':{max(map(len, generations), default=0)}}  tokens  steps  tokens/step  seconds  tokens/s"]
    with settings(theme):
        figure = figure_of((11, 4.6))
        panels = figure.subplots(1, 2, sharey=True)
        labels: tuple[list[str], list[str]] = ([], [])
        for i, (name, generation) in enumerate(generations.items()):
            passes, seconds, tokens = [0], [sum(generation.prefill.seconds)], [len(generation.prefill.tokens)]
            for step in generation.steps:
                passes.append(passes[-1] + 1)
                seconds.append(seconds[-1] + sum(step.seconds))
                tokens.append(tokens[-1] + len(step.tokens))
            rate, speed = generation.tokens_per_step, tokens[-1] / seconds[-1] if seconds[-1] else math.nan
            style = {"color": theme.series[i % len(theme.series)], "linestyle": LINES[i % 4], "linewidth": 2,
                     "marker": MARKERS[i % 8], "markersize": 7, "markevery": max(1, len(passes) // 8)}  # fmt: skip
            told, fast = ("" if math.isnan(x) else f"{x:{form}}" for x, form in ((rate, ".2f"), (speed, ".0f")))
            short = cut(plain(name), 30)
            labels[0].append(f"{short}: {told or 'no'} tokens per step")
            labels[1].append(f"{short}: {fast or 'no'} tokens per second")
            panels[0].plot(passes, tokens, **style)
            panels[1].plot(seconds, tokens, **style)
            wide = len(lines[0]) - len("  tokens  steps  tokens/step  seconds  tokens/s")
            lines.append(f"{name:{wide}}  {tokens[-1]:6}  {len(passes) - 1:5}  {told or '-':>11}  {seconds[-1]:7.3f}"
                         f"  {speed:8.1f}")  # fmt: skip
        panels[0].set(xlabel="passes behind the prefill", ylabel="tokens emitted", title="Tokens over passes")
        panels[1].set(xlabel="seconds, prefill included", title="Tokens over time")
        for axes, told in zip(panels, labels):
            axes.set_ylim(bottom=0)
            axes.set_xlim(left=0)
            if generations:
                axes.legend(axes.lines, told)
        laid_out(figure)
    return Picture(figure, "\n".join(lines), theme)
