"""Pictures of a beam search: the tree of beams, and what becomes of their caches. Found in viz.py with the others."""

from collections.abc import Sequence
from typing import NamedTuple

from beam import BeamStep
from picture import CHAR, Decode, Picture, box, canvas, label, legend, plot, theme_of, write

MOST_STEPS = 10


def draw_beams(
    beam_steps: Sequence[BeamStep], decode: Decode, *, most: int = MOST_STEPS, dark: bool = False
) -> Picture:
    """The first `most` steps of a search, a column each; a beam's line is its rank, so lines that cross are beams that
    overtake each other. Filled: on the way to the best text that is known at the end; dotted: no beam of the last
    column continues it. Below a box the sum of log probabilities. Raises ValueError where no beams are left to draw.
    """
    theme = theme_of(dark)
    steps = [step for step in beam_steps if step.beams][:most]
    if not steps:
        raise ValueError("there are no beams to draw: the search ended in its first step")
    best = beam_steps[-1].hypotheses[0].tokens if beam_steps[-1].hypotheses else list(beam_steps[-1].beams[0].tokens)
    living = [set() for _ in steps]  # beams with a descendant in the last column
    living[-1] = set(range(len(steps[-1].beams)))
    for column in range(len(steps) - 2, -1, -1):
        living[column] = {steps[column + 1].beams[number].parent for number in living[column + 1]}
    names = [[label(beam.tokens[-1], decode, 10) for beam in step.beams] for step in steps]
    wide = CHAR * max(len(name) for column in names for name in column) + 0.6
    pitch, high = wide + 1.4, max(len(step.beams) for step in steps)
    cut = f", the first {len(steps)} of {len(beam_steps)} steps" if len(steps) < len(beam_steps) else ""
    title = f"{high} beams{cut}; filled: the best text"
    figure, axes = canvas(max(3 + pitch * len(steps), CHAR * len(title) + 1), 3.6 + 2 * high, theme)
    write(axes, 0.5, 0.8, title, theme.ink)
    write(axes, 0.5, 3.2, "prompt", theme.ink)
    lines = []
    for column, step in enumerate(steps):
        x = 2.8 + pitch * column
        write(axes, x + wide / 2, 2.0, f"step {column + 1}", theme.quiet, 9, ha="center")
        for number, beam in enumerate(step.beams):
            y = 3.2 + 2 * number
            on_best = list(beam.tokens) == best[: column + 1]
            style = "kept" if on_best else "plain" if number in living[column] else "freed"
            start = (2.5, 3.2) if column == 0 else (x - pitch + wide, 3.2 + 2 * beam.parent)
            colour, width = (theme.kept, 2.5) if on_best else (theme.quiet, 1.2)
            axes.plot(
                [start[0], x], [start[1], y], ":" if style == "freed" else "-", color=colour, linewidth=width, zorder=1
            )
            box(axes, x, y - 0.45, wide, 0.9, style, theme)
            write(axes, x + wide / 2, y, names[column][number], theme.ink, ha="center")
            write(axes, x + wide / 2, y + 0.8, f"{beam.total:.2f}", theme.quiet, 9, ha="center")
        words = {"kept": "*", "plain": "", "freed": "x"}
        told = []
        for number, beam in enumerate(step.beams):
            mark = (
                "*"
                if list(beam.tokens) == best[: column + 1]
                else words["plain" if number in living[column] else "freed"]
            )
            told.append(f"{number}<-{beam.parent} {names[column][number]} {beam.total:.2f}{mark}")
        lines.append(f"step {column + 1}: " + "  ".join(told))
    return Picture(figure, "\n".join([title + " (*), x: dies out", *lines]))


class Lane(NamedTuple):  # a cache during one forward round, strategy "swap"
    beam: int  # that reads it
    came: str  # "opened", "taken over" or "forked"
    source: int  # the lane that it was copied from, if forked, else its own


def swap_lanes(beam_steps: Sequence[BeamStep]) -> list[dict[int, Lane]]:
    """Which cache serves which beam in each round of forwards, as `Swap` in beam.py does it: the first child of a beam
    takes its cache over, every other gets a copy, in the first lane that is free; without a child the cache is freed.

    Round 0 reads the prompt. The beams that the last step leaves are not read any more, so they have no round.
    """
    rounds = [{0: Lane(0, "opened", 0)}]
    lane_of = {0: 0}  # beam -> lane
    for step in beam_steps[:-1]:
        parents = [beam.parent for beam in step.beams]
        busy = {lane_of[parent] for parent in parents}
        old, lane_of, lanes, heirs = lane_of, {}, {}, set()
        for number, parent in enumerate(parents):
            lane = old[parent]
            if parent in heirs:
                lane = next(i for i in range(len(parents) + len(busy)) if i not in busy)
                busy.add(lane)
                lanes[lane] = Lane(number, "forked", old[parent])
            else:
                heirs.add(parent)
                lanes[lane] = Lane(number, "taken over", lane)
            lane_of[number] = lane
        rounds.append(lanes)
    return rounds


def tree_slots(beam_steps: Sequence[BeamStep], prompt_length: int) -> list[list[int]]:
    """Slots that each round needs where every token is stored once (strategy "tree"): entry i of a round counts those
    that i + 1 beams see. The prompt's are seen by all."""
    rounds = [[prompt_length]]
    for step in beam_steps[:-1]:
        sharing: dict[tuple[int, ...], int] = {}
        for beam in step.beams:
            for length in range(1, len(beam.tokens) + 1):
                sharing[beam.tokens[:length]] = sharing.get(beam.tokens[:length], 0) + 1
        counts = [0] * len(step.beams)
        for number in sharing.values():
            counts[number - 1] += 1
        counts[-1] += prompt_length
        rounds.append(counts)
    return rounds


def draw_beam_slots(
    beam_steps: Sequence[BeamStep],
    prompt_length: int,
    *,
    strategy: str = "swap",
    most: int = MOST_STEPS,
    dark: bool = False,
) -> Picture:
    """The beams' caches over time, from the steps of any strategy (they all have the same beams).

    "swap"  a lane for each cache: who reads it, how many slots it holds, copies as arrows, a cross where it is freed
    "tree"  slots in use when every token is stored once, by how many beams share them, against a cache for each beam

    Raises ValueError for another strategy and for no steps.
    """
    if strategy not in ("swap", "tree"):
        raise ValueError(f'strategy must be "swap" or "tree", not {strategy!r}')
    if not beam_steps:
        raise ValueError("there are no steps to draw")
    draw = _draw_lanes if strategy == "swap" else _draw_shared
    return draw(beam_steps, prompt_length, most, dark)


def _draw_lanes(beam_steps: Sequence[BeamStep], prompt_length: int, most: int, dark: bool) -> Picture:
    theme, everything = theme_of(dark), swap_lanes(beam_steps)
    rounds = everything[:most]
    high = max(max(lanes) for lanes in rounds) + 1
    slots = [prompt_length + number for number in range(len(rounds))]
    wide, pitch = 3.4, 5.0
    cut = f", the first {len(rounds)} of {len(everything)} rounds" if len(rounds) < len(everything) else ""
    forks = sum(lane.came == "forked" for lanes in rounds for lane in lanes.values())
    title = f"a cache per beam: {forks} copies made{cut}"
    figure, axes = canvas(max(3.4 + pitch * len(rounds), CHAR * len(title) + 1), 3.6 + 1.8 * high, theme)
    write(axes, 0.5, 0.8, title, theme.ink)
    lines = []
    for lane in range(high):
        write(axes, 0.5, 3.2 + 1.8 * lane, f"cache {lane}", theme.ink)
    for number, lanes in enumerate(rounds):
        x = 3.2 + pitch * number
        write(axes, x + wide / 2, 2.0, f"{slots[number]} slots", theme.quiet, 9, ha="center")
        for lane, (beam, came, source) in lanes.items():
            y = 3.2 + 1.8 * lane
            if number:
                arrow = {"arrowstyle": "->", "color": theme.series[1] if came == "forked" else theme.quiet,
                         "linestyle": "--" if came == "forked" else "-", "linewidth": 1.6}  # fmt: skip
                axes.annotate("", (x, y), (x - pitch + wide, 3.2 + 1.8 * source), arrowprops=arrow)
            box(axes, x, y - 0.5, wide, 1.0, "kept" if came == "forked" else "plain", theme)
            write(axes, x + wide / 2, y, f"beam {beam}{' copy' if came == 'forked' else ''}", theme.ink, 9, ha="center")
        freed = (
            sorted(set(rounds[number - 1]) - {lane.source for lane in lanes.values() if lane.came == "taken over"})
            if number
            else []
        )
        for lane in freed:
            write(axes, x - pitch + wide + 0.3, 3.2 + 1.8 * lane, "x", theme.series[1], 12, ha="center")
        told = [f"beam {beam} in cache {lane} ({came}{f' from {source}' if came == 'forked' else ''})"
                for lane, (beam, came, source) in sorted(lanes.items(), key=lambda entry: entry[1].beam)]  # fmt: skip
        gone = f"; freed: {', '.join(map(str, freed))}" if freed else ""
        lines.append(f"round {number}, {slots[number]} slots each: {', '.join(told)}{gone}")
    return Picture(figure, "\n".join([title, *lines]))


def _draw_shared(beam_steps: Sequence[BeamStep], prompt_length: int, most: int, dark: bool) -> Picture:
    theme, rounds = theme_of(dark), tree_slots(beam_steps, prompt_length)
    beams = [len(counts) for counts in rounds]
    apart = [number * (prompt_length + i) for i, number in enumerate(beams)]
    figure, (axes,) = plot(8, 3.8, theme)
    bottom = [0] * len(rounds)
    hatches = ("", "//", "..", "xx", "\\\\", "++")
    for share in range(max(beams), 0, -1):
        part = [counts[share - 1] if share <= len(counts) else 0 for counts in rounds]
        if any(part):
            name = f"seen by {share} beam{'s' * (share > 1)}"
            look = {"color": theme.series[(share - 1) % 6], "edgecolor": theme.paper, "hatch": hatches[(share - 1) % 6]}
            axes.bar(range(len(rounds)), part, 0.9, bottom=bottom, label=name, linewidth=0, **look)
            bottom = [a + b for a, b in zip(bottom, part)]
    axes.plot(range(len(rounds)), apart, "--", color=theme.ink, label="a cache for each beam")
    axes.set_xlabel("round")
    axes.set_ylabel("slots in use")
    legend(axes, theme, ncols=2)
    lines = [
        f"round {i}: {sum(counts)} slots, {alone} with a cache for each beam; {counts[-1]} seen by all"
        for i, (counts, alone) in enumerate(zip(rounds, apart))
    ]
    shown = lines[:most] + ([f"... and {len(lines) - most} more rounds"] if len(lines) > most else [])
    return Picture(figure, "\n".join(shown))
