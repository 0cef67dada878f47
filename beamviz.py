"""Pictures of a beam search: the beams as a tree, and what becomes of their caches. From the BeamSteps that
`beam.beam_steps` yields; `list(beam_steps(...))` will do, whatever the strategy was, for the beams are the same."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from beam import Beam, BeamStep
from picture import CHAR, WIDTH, Decode, Picture, Sheet, label, left_out, plural, quote

ROWS = 16  # beams, caches, steps: more are counted, not drawn


def _lengths(steps: Sequence[BeamStep]) -> list[int]:
    """How many tokens the beams have after each step: its number, in a part of a search, too."""
    lengths: list[int] = []
    for step in steps:
        if step.beams:
            lengths.append(len(step.beams[0].tokens))
        else:  # the last step, no beam went on
            lengths.append(lengths[-1] + 1 if lengths else max((len(h.tokens) for h in step.hypotheses), default=0))
    return lengths


def draw_beams(beam_steps: Sequence[BeamStep], decode: Decode, *, dark: bool = False) -> Picture:
    """The tree of the beams: a column for each step, the best beam on top, with the sum of its log probabilities.
    Filled: on the way to the best text; plain: has heirs in the last step, or ends in a hypothesis; dashed: a dead end.
    A finished text stands below the beams of its step, with its score."""
    steps = list(beam_steps)
    lengths = _lengths(steps)
    best = max((h for h in steps[-1].hypotheses), key=lambda h: h.score, default=None) if steps else None
    goal = tuple(best.tokens) if best else (steps[-1].beams[0].tokens if steps and steps[-1].beams else ())
    ends = [[h for h in step.hypotheses if len(h.tokens) == length > 0] for step, length in zip(steps, lengths)]
    alive = {beam.tokens for beam in steps[-1].beams} if steps else set()
    alive |= {tuple(h.tokens) for h in (steps[-1].hypotheses if steps else ())}
    alive = {text[:n] for text in alive for n in range(len(text) + 1)}

    def kind(beam: Beam) -> str:
        return "kept" if beam.tokens == goal[: len(beam.tokens)] else "plain" if beam.tokens in alive else "rejected"

    lines = []
    for step, length, finished in zip(steps, lengths, ends):
        lines.append(f"step {length}")
        for number, beam in enumerate(step.beams):
            fate = {"kept": "on the way to the best", "plain": "lives on", "rejected": "dead end"}[kind(beam)]
            lines.append(f"  {number} from {beam.parent}  {decode([beam.tokens[-1]])!r:12} {beam.total:7.2f}  {fate}")
        for h in finished:
            lines.append(
                f"  finished  {decode([h.tokens[-1]])!r:12} score {h.score:.2f}" + " (best)" * (h is best or h == best)
            )
    if best:
        lines.append(f"best: {quote(best.tokens, decode)}  score {best.score:.2f}")

    # Columns as wide as their longest label, as many as fit.
    rows = min(ROWS, max((len(step.beams) for step in steps), default=1))
    gap, left, across, columns = 0.4, [], 1.4, 0
    widths = []
    for step, finished in zip(steps, ends):
        texts = [
            label(decode([t[-1]]), 10) for t in [b.tokens for b in step.beams[:rows]] + [h.tokens for h in finished]
        ]
        wide = CHAR * max(max(map(len, texts), default=0) + 2, 10 if best in finished else 6) + 0.2
        if across + wide > WIDTH - 0.25 and columns:
            break
        left.append(across)
        widths.append(wide)
        across, columns = across + wide + gap, columns + 1
    remarks = ["Numbers: the sum of log probabilities; of finished texts the score."]
    most = max((len(step.beams) for step in steps), default=0)
    remarks += left_out(len(steps) - columns, "step") + left_out(most - rows, "beam")
    places = [min(len(step.beams), rows) + len(finished) for step, finished in zip(steps[:columns], ends)]
    tall = min(ROWS + 2, max(places, default=1))
    remarks += left_out(sum(max(0, place - tall) for place in places), "finished text")
    title = f"Beam search: {plural(most, 'beam')}, {plural(len(steps), 'step')}"
    legend = [
        ("kept", "on the way to the best text"),
        ("plain", "has heirs"),
        ("rejected", "dead end"),
        ("end", "finished"),
    ]
    pitch = 0.56
    sheet = Sheet(across, 0.35 + pitch * tall, title, dark, remarks, legend)
    y0 = sheet.top + 0.35

    def middle(row: int) -> float:
        return y0 + pitch * (row + 0.5)

    first = bool(steps) and lengths[0] == 1
    if first:
        sheet.box(0.25, middle(0), 0.75, 0.3, "root", "prompt")
    for column in range(columns):
        step, x, wide = steps[column], left[column], widths[column]
        sheet.text(x + wide / 2, sheet.top + 0.12, f"step {lengths[column]}", size=9, align="center")
        texts = [
            (beam.tokens, beam.parent, f"{beam.total:.2f}", kind(beam), row)
            for row, beam in enumerate(step.beams[:rows])
        ]
        for i, h in enumerate(ends[column][: tall - len(texts)]):
            before = steps[column - 1].beams if column else []
            parent = next((n for n, beam in enumerate(before) if list(beam.tokens) == h.tokens[:-1]), 0)
            note = f"best {h.score:.2f}" if h == best else f"{h.score:.2f}"
            texts.append((tuple(h.tokens), parent, note, "end", len(step.beams[:rows]) + i))
        for tokens, parent, note, sort, row in texts:
            on_the_way = tokens == goal[: len(tokens)]
            if (column or first) and parent < rows:
                start = left[column - 1] + widths[column - 1] if column else 1.0
                colour = sheet.theme.freed if sort == "rejected" else sheet.theme.ink
                path = ([start, x], [middle(parent if column else 0), middle(row)])
                sheet.line(*path, colour, 3.0 if on_the_way else 1.2, (0, (2, 1.5)) if sort == "rejected" else "-")
            sheet.box(x, middle(row), wide, pitch - 0.12, sort, label(decode([tokens[-1]]), 10), note)
    return sheet.picture("\n".join(lines))


# --- the caches -------------------------------------------------------------------------------------------------------


class Lane(NamedTuple):
    """A cache in one forward: its lane, the beam that it serves, and how the beam got it: "opened", "takes over" or
    "forks"; `source` is the lane it was forked from."""

    lane: int
    beam: int
    how: str
    source: int


def lanes(beam_steps: Sequence[BeamStep]) -> tuple[list[list[Lane]], list[list[int]]]:
    """Strategy "swap" followed by its rules (beam.Swap): for each round of forwards the caches in use, and the lanes
    freed before it. A lane is the memory of a cache; one that was freed is used again, so there are never more than
    num_beams."""
    steps = list(beam_steps)
    forwards: list[list[Lane]] = []
    freed: list[list[int]] = []
    for beams in _read(steps):
        if not forwards:
            forwards.append([Lane(i, i, "opened", i) for i in range(len(beams))])
            freed.append([])
            continue
        old = [cache.lane for cache in forwards[-1]]
        parents = [beam.parent for beam in beams]
        gone = [old[i] for i in range(len(old)) if i not in parents]
        busy, now, taken = set(old) - set(gone), [], set()
        for beam, parent in enumerate(parents):
            if parent not in taken:
                taken.add(parent)
                now.append(Lane(old[parent], beam, "takes over", old[parent]))
            else:
                lane = next(i for i in range(len(busy) + 1) if i not in busy)
                busy.add(lane)
                now.append(Lane(lane, beam, "forks", old[parent]))
        forwards.append(now)
        freed.append(gone)
    return forwards, freed


def shared_slots(beam_steps: Sequence[BeamStep]) -> list[list[tuple[tuple[int, ...], int]]]:
    """Strategy "tree" followed by its rules (beam.Tree): for each forward the slots behind the prompt in order, each
    the text that ends there, and how many beams go through it."""
    nodes: list[tuple[int, ...]] = []
    forwards = []
    for beams in _read(beam_steps):
        texts = [beam.tokens for beam in beams]
        through = Counter(text[:n] for n in range(1, len(texts[0]) + 1) for text in texts)  # in the order they came in
        nodes = [node for node in nodes if node in through]  # nobody's ancestors go, the gaps close
        known = set(nodes)
        nodes += [node for node in through if node not in known]
        forwards.append([(node, through[node]) for node in nodes])
    return forwards


def _read(beam_steps: Sequence[BeamStep]) -> list[list[Beam]]:
    """The beams that are read before each step: those of the step before, at first the bare prompt. (In a part of a
    search the beams before its first step are unknown, so that step is left out.)"""
    steps = list(beam_steps)
    lengths = _lengths(steps)
    before = [[Beam((), 0.0, 0)]] if lengths and lengths[0] == 1 else []
    return before + [step.beams for step in steps[:-1]]


def draw_beam_slots(
    beam_steps: Sequence[BeamStep], prompt_length: int, *, strategy: str = "swap", dark: bool = False
) -> Picture:
    """What becomes of the caches. "swap": a lane for each cache over the steps, who takes it over, where it is forked
    and freed. "tree": the one cache's slots behind the prompt, pass by pass, and by how many beams each is shared.

    Raises ValueError for another strategy."""
    if strategy not in ("swap", "tree"):
        raise ValueError(f'strategy must be "swap" or "tree", not {strategy!r}')
    steps = list(beam_steps)
    read = _read(steps)
    start = len(read[0][0].tokens) if read else 0  # tokens of the beams in the first pass
    draw = _draw_lanes if strategy == "swap" else _draw_shared
    return draw(steps, prompt_length, start, dark)


def _draw_lanes(steps: list[BeamStep], prompt_length: int, start: int, dark: bool) -> Picture:
    forwards, freed = lanes(steps)
    hows = Counter(cache.how for forward in forwards for cache in forward)
    lost = sum(map(len, freed))
    lines = []
    for number, (forward, gone) in enumerate(zip(forwards, freed)):
        told = [f"lane {lane} freed" for lane in gone]
        for lane, beam, how, source in forward:
            told.append(f"beam {beam} {how} lane {source}" + (f" into {lane}" if how == "forks" else ""))
        size = plural(prompt_length + start + number, "slot")
        lines.append(f"step {start + number + 1}: {plural(len(forward), 'cache')} of {size}: {', '.join(told)}")
    most = max(map(len, forwards), default=0)
    slots = max((len(forward) * (prompt_length + start + n) for n, forward in enumerate(forwards)), default=0)
    total = f"{hows['takes over']} taken over, {hows['forks']} forked, {lost} freed on the way"
    lines.append(f"{total}; at most {plural(most, 'cache')}, {slots} slots in use")

    rows, wide, tall, gap = min(most, ROWS), 0.5, 0.3, 0.44
    columns = min(len(forwards), int((WIDTH - 1.3) / (wide + gap)))
    remarks = ["b3: serves beam 3. X: its beam has no heir, freed."]
    remarks.append(f"Each cache holds the prompt's {prompt_length} slots and one more for each token of its beam.")
    remarks += left_out(len(forwards) - columns, "step") + left_out(most - rows, "cache")
    legend = [
        ("kept", "taken over (solid line)", "b"),
        ("end", "forked: a copy (dashed line)", "b"),
        ("past", "opened", "b"),
    ]
    pitch = 0.62
    sheet = Sheet(1.0 + (wide + gap) * columns + 0.25, 0.35 + pitch * max(rows, 1),
                  f"A cache per beam: {total}", dark, remarks, legend)  # fmt: skip
    x0, y0 = 1.0, sheet.top + 0.35

    def place(lane: int, column: int) -> tuple[float, float]:
        return x0 + (wide + gap) * column, y0 + pitch * lane + 0.16

    for lane in range(rows):
        sheet.text(x0 - 0.12, place(lane, 0)[1] + tall / 2, f"cache {lane}", align="right")
    for column in range(columns):
        sheet.text(
            place(0, column)[0] + wide / 2, sheet.top + 0.12, f"step {start + column + 1}", size=9, align="center"
        )
        for lane in freed[column]:
            if lane < rows:
                x, y = place(lane, column - 1)
                sheet.text(x + wide + 0.13, y + tall / 2, "X", align="center", colour=sheet.theme.freed, weight="bold")
        for lane, beam, how, source in forwards[column]:
            if lane >= rows:
                continue
            x, y = place(lane, column)
            if column and source < rows:
                before_x, before_y = place(source, column - 1)
                sheet.line([before_x + wide, x], [before_y + tall / 2, y + tall / 2], sheet.theme.ink,
                           1.6 if how == "forks" else 3.0, (0, (2, 1.2)) if how == "forks" else "-")  # fmt: skip
            sheet.cell(x, y, wide, tall, {"opened": "past", "forks": "end", "takes over": "kept"}[how], f"b{beam}")
    return sheet.picture("\n".join(lines))


def _draw_shared(steps: list[BeamStep], prompt_length: int, start: int, dark: bool) -> Picture:
    forwards = shared_slots(steps)
    lines, before = [], []
    for number, forward in enumerate(forwards):
        gone = len(set(before) - {node for node, _ in forward})
        before = [node for node, _ in forward]
        drawn = "".join(f"{min(many, 9)}" if many < 10 else "+" for _, many in forward)
        lines.append(f"step {start + number + 1}: {prompt_length} + {len(forward)} slots, {gone} given back [{drawn}]")
    most = max(map(len, forwards), default=0)
    beams = map(len, _read(steps))
    apart = max(
        (n * prompt_length + sum(many for _, many in forward) for n, forward in zip(beams, forwards)), default=0
    )
    total = f"at most {prompt_length} + {most} slots"
    lines.append(f"{total}; a cache for each beam would hold {apart} at most")
    rows = min(len(forwards), 20)
    most = max(map(len, forwards[:rows]), default=0)
    left, pitch = 1.85, 0.36
    cell = max(0.2, min(0.28, (WIDTH - left - 1.1) / max(1, most)))
    columns = max(1, min(most, int((WIDTH - left - 1.1) / cell)))
    remarks = [
        "Numbers: so many beams go through this slot. Slots of texts without heirs are given back, the rest close up."
    ]
    remarks.append(f"A cache for each beam would hold {apart} slots at most.")
    remarks += left_out(len(forwards) - rows, "step") + left_out(most - columns, "slot", " to the right")
    legend = [
        ("past", "prompt, read once"),
        ("turn0", "one beam's", "1"),
        ("kept", "shared by several", "2"),
        ("end", "new in this pass", "1"),
    ]
    sheet = Sheet(
        left + cell * columns + 1.1, 0.3 + pitch * rows, f"One cache for all beams: {total}", dark, remarks, legend
    )
    before: set = set()
    sheet.text(1.35, sheet.top + 0.1, "prompt", size=9, align="center")
    for column in range(0, columns, 5):
        sheet.text(left + cell * (column + 0.5), sheet.top + 0.1, str(prompt_length + column), size=9, align="center")
    for row in range(rows):
        y = sheet.top + 0.3 + pitch * row
        sheet.text(0.9, y + 0.14, f"step {start + row + 1}", align="right")
        sheet.cell(1.0, y, 0.7, 0.28, "past", f"{prompt_length}")
        for column, (node, many) in enumerate(forwards[row][:columns]):
            kind = "end" if node not in before else "kept" if many > 1 else "turn0"
            sheet.cell(left + cell * column, y, cell, 0.28, kind, str(many))
        before = {node for node, _ in forwards[row]}
        sheet.text(left + cell * columns + 0.12, y + 0.14, f"{prompt_length + len(before)} slots")
    return sheet.picture("\n".join(lines))
