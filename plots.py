"""Plots of what `bench.py` measured, from its rows. Each is a Picture (picture.py) whose text twin is a table of the
numbers that are drawn; each can be made dark and saved as SVG. `write` is what bench.py calls: all of a measurement.
"""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from picture import HATCHES, LINES, MARKERS, Picture, figure_of, laid_out, plain, settings, theme_of
from replay import Row

Rows = Sequence[Mapping[str, Any]]
MODES = ("best-first", "hierarchical", "parallel", "single")  # their order is their colour


def table(rows: Rows, keys: Sequence[str]) -> str:
    """Rows as aligned text."""

    def told(value: Any) -> str:
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    cells = [list(keys), *([told(row.get(key, "")) for key in keys] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = ([cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(c, widths))] for c in cells)
    return "\n".join("  ".join(line).rstrip() for line in lines)


def distinct(rows: Rows, key: str) -> list[Any]:
    return list(dict.fromkeys(row[key] for row in rows))


class Plot:
    """A figure of one panel or several, and what its lines and bars look like by their number: never colour alone."""

    def __init__(self, title: str, size: tuple[float, float], dark: bool, panels: int = 1, **more: Any) -> None:
        self.theme = theme_of(dark)
        self.figure = figure_of(size)
        self.panels: list[Axes] = list(self.figure.subplots(1, panels, squeeze=False, **more)[0])
        self.axes = self.panels[0]
        lines = textwrap.wrap(plain(title).rstrip(":"), int(size[0] / 0.101))
        self.figure.suptitle("\n".join(lines), x=0.01, ha="left", size=11, weight="bold")

    def line(self, number: int) -> dict[str, Any]:
        return {"color": self.theme.series[number % 6], "marker": MARKERS[number % 8], "markersize": 6,
                "linestyle": LINES[number % 4], "linewidth": 1.8}  # fmt: skip

    def bar(self, number: int) -> dict[str, Any]:
        return {"facecolor": self.theme.series[number % 6], "edgecolor": self.theme.paper,
                "hatch": HATCHES[number % 6], "linewidth": 0.8}  # fmt: skip

    def bars_of(
        self, axes: Axes, names: Sequence[str], values: Sequence[float], kinds: Sequence[int], fmt: str
    ) -> None:
        """Lying bars, the first on top."""
        for i, (value, kind) in enumerate(zip(values, kinds)):
            bar = axes.barh([-i], [value], 0.75, **self.bar(kind))
            axes.bar_label(bar, fmt=fmt, padding=3, fontsize=9)
        axes.set_yticks([-i for i in range(len(names))], [plain(str(name)) for name in names])
        axes.margins(x=0.15)
        axes.grid(axis="y", visible=False)

    def picture(self, text: str) -> Picture:
        return Picture(self.figure, text, self.theme)


@contextmanager
def plot(title: str, size: tuple[float, float], dark: bool, panels: int = 1, **more: Any) -> Iterator[Plot]:
    with settings(theme_of(dark)):  # all of a plot is made under the same settings
        made = Plot(title, size, dark, panels, **more)
        yield made
        laid_out(made.figure)


def log(axes: Axes, which: str) -> None:
    """A logarithmic axis with plain numbers."""
    for name in which:
        getattr(axes, f"set_{name}scale")("log")
        getattr(axes, f"{name}axis").set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.12g}"))
        getattr(axes, f"{name}axis").set_minor_formatter(FuncFormatter(lambda value, _: ""))


# --- replay -----------------------------------------------------------------------------------------------------------


def draw_replay_pace(rows: Sequence[Row], title: str = "", *, dark: bool = False) -> Picture:
    """Tokens per step against nodes drafted, a line for each mode."""
    modes = list(dict.fromkeys(row.mode for row in rows))
    with plot(f"Tokens per step against budget: {title}", (8, 5), dark) as p:
        for mode in modes:
            mine = sorted((row for row in rows if row.mode == mode), key=lambda row: row.nodes_per_step)
            x, y = [row.nodes_per_step for row in mine], [row.tokens_per_step for row in mine]
            style = p.line(MODES.index(mode))
            p.axes.plot(x, y, **style, label=mode)
            p.axes.annotate(f"{y[-1]:.2f}", (x[-1], y[-1]), textcoords="offset points", xytext=(8, -3))
        p.axes.axhline(1.0, color=p.theme.ink, linewidth=1, linestyle=":", label="plain decoding")
        p.axes.set(xlabel="nodes drafted per step (mean)", ylabel="tokens per step")
        p.axes.margins(x=0.1)
        p.axes.legend()
    keys = ("mode", "budget", "nodes_per_step", "tokens_per_step")
    return p.picture(table([{key: getattr(row, key) for key in keys} for row in rows], keys))


def draw_replay_lengths(rows: Sequence[Row], title: str = "", *, dark: bool = False) -> Picture:
    """How many drafted tokens a step accepts, at the largest budget: shares of steps."""
    budget = max(row.budget for row in rows)
    shown = [row for row in rows if row.budget == budget]
    with plot(f"Accepted lengths at a budget of {budget}: {title}", (8, 5), dark) as p:
        for i, row in enumerate(shown):
            width = 0.8 / len(shown)
            at = [n + (i - (len(shown) - 1) / 2) * width for n in range(len(row.lengths))]
            shares = [n / sum(row.lengths) for n in row.lengths]
            p.axes.bar(at, shares, width, **p.bar(MODES.index(row.mode)), label=row.mode)
        p.axes.set_xlim(-0.6, 10.6)
        p.axes.set_xticks(range(11))
        p.axes.set(xlabel="drafted tokens accepted in a step", ylabel="share of steps")
        p.axes.legend()
    heads = ("mode", *(f"{n}" for n in range(11)))
    return p.picture(table([{"mode": row.mode} | {f"{n}": count / sum(row.lengths)
                            for n, count in enumerate(row.lengths)} for row in shown], heads))  # fmt: skip


def draw_replay_honesty(rows: Sequence[Row], title: str = "", *, dark: bool = False) -> Picture | None:
    """Estimated probabilities against the share accepted; None if no mode estimates any."""
    honest = [row for row in rows if any(n >= 200 for n, _, _ in row.bins)]  # of fewer nodes a share says little
    if not honest:
        return None
    told = []
    with plot(f"Are the estimates honest? Band: within a factor 1.25. {title}", (6.5, 6), dark) as p:
        p.axes.plot([0.003, 1], [0.003, 1], color=p.theme.ink, linewidth=1, label="estimated = accepted")
        p.axes.fill_between([0.003, 1], [0.003 / 1.25, 1 / 1.25], [0.003 * 1.25, 1.25], color=p.theme.faint, lw=0)
        for i, row in enumerate(honest):
            points = [(total / n, accepted / n) for n, total, accepted in row.bins if n >= 200]
            told += [{"budget": row.budget, "estimated": x, "accepted": y} for x, y in points]
            p.axes.plot(*zip(*points), **p.line(i) | {"linestyle": ""}, label=f"budget {row.budget}")
        log(p.axes, "xy")
        p.axes.set_xlim(0.003, 1.1)
        p.axes.set_ylim(0.003, 1.1)
        p.axes.set(xlabel="estimated probability (mean of a bin)", ylabel="share accepted")
        p.axes.legend()
    return p.picture(table(told, ("budget", "estimated", "accepted")))


# --- cost and growth --------------------------------------------------------------------------------------------------


def draw_cost(rows: Rows, title: str = "Time of a forward pass by its width", *, dark: bool = False) -> Picture:
    """T(n): milliseconds ("ms") by "rows" of a forward, behind the first "prefix" if there are several. If the rows
    have them, too: the same with torch's F.linear ("f_linear_ms"), two bounds ("read_bound_ms", "compute_bound_ms").
    """
    first = [row for row in rows if row.get("prefix") == rows[0].get("prefix")] if rows else []
    widths = [row["rows"] for row in first]
    behind = f", behind {first[0]['prefix']} tokens" if first and "prefix" in first[0] else ""
    with plot(title, (8, 5), dark) as p:
        p.axes.plot(widths, [row["ms"] for row in first], **p.line(0), label="this repository")
        if first and "f_linear_ms" in first[0]:
            p.axes.plot(widths, [row["f_linear_ms"] for row in first], **p.line(1), label="the same with F.linear")
        if first and {"read_bound_ms", "compute_bound_ms"} <= set(first[0]):
            bound = [max(row["read_bound_ms"], row["compute_bound_ms"]) for row in first]
            told = "bound: reading weights, then arithmetic"
            p.axes.plot(widths, bound, color=p.theme.ink, linewidth=1.2, linestyle=":", label=told)
        p.axes.set_ylim(bottom=0)
        p.axes.set(xlabel=f"rows of the forward pass (1 + drafted nodes){behind}", ylabel="milliseconds")
        p.axes.legend()
    keys = ("rows", "prefix", "ms", "f_linear_ms", "read_bound_ms", "compute_bound_ms")
    return p.picture(table(first, [key for key in keys if first and key in first[0]]))


def draw_cost_by_prefix(rows: Rows, title: str = "", *, dark: bool = False) -> Picture | None:
    """T(n) by the number of tokens in the cache; None if there is one number only."""
    if len(prefixes := distinct(rows, "prefix")) < 2:
        return None
    with plot(title, (8, 5), dark) as p:
        for i, n in enumerate(distinct(rows, "rows")):
            times = [row["ms"] for row in rows if row["rows"] == n]
            p.axes.plot(prefixes, times, **p.line(i), label=f"{n} row{'s' * (n > 1)}")
        p.axes.set_ylim(bottom=0)
        p.axes.set(xlabel="tokens in the cache", ylabel="milliseconds")
        p.figure.legend(loc="outside right center")
    return p.picture(table(rows, ("prefix", "rows", "ms")))


def draw_growth(rows: Rows, title: str = "", *, dark: bool = False) -> Picture:
    """Microseconds to insert a token and to make a draft, by tokens inserted."""
    with plot(title, (8, 5), dark) as p:
        x = [row["tokens"] for row in rows]
        p.axes.plot(x, [row["retrieve_us"] for row in rows], **p.line(0), label="to make a draft")
        p.axes.plot(x, [row["insert_us"] for row in rows], **p.line(1), label="to insert a token")
        log(p.axes, "xy")
        p.axes.set(xlabel="tokens inserted", ylabel="microseconds")
        p.axes.legend()
    return p.picture(table(rows, ("tokens", "retrieve_us", "insert_us")))


# --- decoders ---------------------------------------------------------------------------------------------------------


def draw_speed(rows: Rows, title: str = "", *, dark: bool = False) -> Picture:
    """Tokens per second of all decoders."""
    names = [row["decoder"] for row in rows]
    kinds = [2 if name.startswith("lookahead") else 0 if name == "plain" else 1 for name in names]
    with plot(title, (8, 0.4 * len(rows) + 1.6), dark) as p:
        p.bars_of(p.axes, names, [row["tokens_per_s"] for row in rows], kinds, "%.0f")
        p.axes.set_xlabel("tokens per second")
    return p.picture(table(rows, ("decoder", "tokens_per_s")))


def draw_drafters(rows: Rows, title: str = "", *, dark: bool = False) -> Picture:
    """Tokens per step and tokens per second of every source of drafts, side by side."""
    names = [row["drafter"] for row in rows]
    kinds = [0 if name == "plain" else 2 for name in names]
    with plot(title, (10, 0.4 * len(rows) + 1.6), dark, 2, sharey=True) as p:
        columns = (("tokens_per_step", "tokens per step", "%.2f"), ("tokens_per_s", "tokens per second", "%.0f"))
        for axes, (key, told, fmt) in zip(p.panels, columns):
            p.bars_of(axes, names, [row[key] for row in rows], kinds, fmt)
            axes.set_xlabel(told)
    return p.picture(table(rows, ("drafter", "tokens_per_step", "tokens_per_s")))


def draw_beam(rows: Rows, title: str = "", *, dark: bool = False) -> Picture:
    """Steps per second and memory of all strategies, a bar for each number of beams."""
    beams, names = distinct(rows, "num_beams"), distinct(rows, "strategy")
    with plot(title, (11, 0.42 * len(rows) + 1.9), dark, 2, sharey=True) as p:
        columns = (("steps_per_s", "steps per second"), ("used_mb", "MB of caches in use, at most"))
        for axes, (key, told) in zip(p.panels, columns):
            for i, num_beams in enumerate(beams):
                mine = {row["strategy"]: row[key] for row in rows if row["num_beams"] == num_beams}
                at = [-names.index(name) - 0.8 * i / len(beams) for name in mine]
                bars = axes.barh(at, [*mine.values()], 0.7 / len(beams), **p.bar(i), label=f"{num_beams} beams")
                axes.bar_label(bars, fmt="%.3g", padding=3, fontsize=9)
            axes.set_yticks([-j - 0.4 * (len(beams) - 1) / len(beams) for j in range(len(names))], names)
            axes.set_xlabel(told)
            axes.margins(x=0.15)
            axes.grid(axis="y", visible=False)
        p.figure.legend(*p.axes.get_legend_handles_labels(), loc="outside lower center", ncols=6)
    return p.picture(table(rows, ("strategy", "num_beams", "steps_per_s", "used_mb")))


# --- files ------------------------------------------------------------------------------------------------------------

FILES = {  # of each measurement: the plots and their names
    "replay": {"replay_tokens_per_step": draw_replay_pace, "replay_accepted_lengths": draw_replay_lengths,
               "replay_reliability": draw_replay_honesty},
    "cost": {"cost": draw_cost, "cost_by_prefix": draw_cost_by_prefix},
    "growth": {"growth": draw_growth}, "speed": {"speed": draw_speed}, "drafters": {"drafters": draw_drafters},
    "beam": {"beam": draw_beam},
}  # fmt: skip


def write(
    name: str, rows: Sequence[Any], out: Path, title: str, *, dark: bool = False, suffix: str = ".png"
) -> list[Path]:
    """Draw what there is to draw of the measurement `name` and write it into the folder `out`; returns the files."""
    pictures = {stem: draw(rows, title, dark=dark) for stem, draw in FILES.get(name, {}).items()}
    return [picture.save(out / f"{stem}{suffix}") for stem, picture in pictures.items() if picture is not None]
