"""Pictures of what `bench.py` measured: each is a call on its rows and gives a `Picture` (picture.py)."""

from collections.abc import Sequence
from typing import Any

from picture import DASHES, MARKS, Picture, Theme, legend, plot, theme_of


def titled(figure: Any, title: str, theme: Theme) -> None:
    """The heading of a benchmark, its machine on a line of its own."""
    figure.suptitle(title.replace(" (", "\n(", 1), fontsize=9, color=theme.ink, parse_math=False)


def table(rows: Sequence[dict], *columns: str) -> str:
    """Some columns of the rows, in words."""
    lines = [columns, *([_number(row.get(column, "")) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in lines)


def _number(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _lines(axes: Any, theme: Theme, series: dict[str, tuple[Sequence[float], Sequence[float]]]) -> None:
    """A line for each name, told apart by colour, dashes and marks."""
    for i, (name, (x, y)) in enumerate(series.items()):
        look = {
            "color": theme.series[i % len(theme.series)],
            "linestyle": DASHES[i % len(DASHES)],
            "marker": MARKS[i % 6],
        }
        axes.plot(x, y, label=name, markersize=5, **look)


def draw_cost(rows: Sequence[dict], title: str = "Forward passes", *, dark: bool = False) -> Picture:
    """The time of a forward against its width, with the same weights through F.linear and the two bounds where they
    were measured.

    rows  dictionaries with "rows" (width) and "ms"; perhaps "f_linear_ms", "read_bound_ms", "compute_bound_ms", and
          "prefix" (tokens in the cache; the first one's rows are drawn)
    """
    theme = theme_of(dark)
    first = [row for row in rows if row.get("prefix") == rows[0].get("prefix")]
    widths = [row["rows"] for row in first]
    figure, (axes,) = plot(7.5, 4.2, theme)
    series = {"this repository": (widths, [row["ms"] for row in first])}
    if "f_linear_ms" in first[0]:
        series["the same with F.linear"] = widths, [row["f_linear_ms"] for row in first]
    if "read_bound_ms" in first[0]:
        bound = [max(row["read_bound_ms"], row["compute_bound_ms"]) for row in first]
        series["bound: reading weights, then arithmetic"] = widths, bound
    _lines(axes, theme, series)
    axes.set_ylim(bottom=0)
    behind = f", behind {first[0]['prefix']} tokens" if "prefix" in first[0] else ""
    axes.set_xlabel(f"rows of the forward pass (1 + drafted nodes){behind}")
    axes.set_ylabel("milliseconds")
    legend(axes, theme)
    titled(figure, title, theme)
    shown = [key for key in ("rows", "ms", "f_linear_ms", "read_bound_ms", "compute_bound_ms") if key in first[0]]
    return Picture(figure, f"{title}\n{table(first, *shown)}")


def draw_cost_by_prefix(rows: Sequence[dict], title: str = "Forward passes", *, dark: bool = False) -> Picture:
    """The same by the number of tokens in the cache, a line for each width."""
    theme = theme_of(dark)
    figure, (axes,) = plot(7.5, 4.2, theme)
    widths = list(dict.fromkeys(row["rows"] for row in rows))
    series = {}
    for n in widths:
        mine = [row for row in rows if row["rows"] == n]
        series[f"{n} row{'s' * (n > 1)}"] = [row["prefix"] for row in mine], [row["ms"] for row in mine]
    _lines(axes, theme, series)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens in the cache")
    axes.set_ylabel("milliseconds")
    legend(axes, theme)
    titled(figure, title, theme)
    return Picture(figure, f"{title}\n{table(rows, 'prefix', 'rows', 'ms')}")


def draw_costs(rows: Sequence[dict], title: str) -> dict[str, Picture]:
    """Both by name, the second one if there are several prefixes."""
    more = {"cost_by_prefix": draw_cost_by_prefix(rows, title)} if len({row["prefix"] for row in rows}) > 1 else {}
    return {"cost": draw_cost(rows, title)} | more


def draw_growth(rows: Sequence[dict], title: str, *, dark: bool = False) -> Picture:
    """Microseconds to insert a token and to make a draft, by tokens inserted."""
    theme = theme_of(dark)
    figure, (axes,) = plot(7.5, 4.2, theme)
    x = [row["tokens"] for row in rows]
    series = {"to make a draft": "retrieve_us", "to insert a token": "insert_us"}
    _lines(axes, theme, {name: (x, [row[key] for row in rows]) for name, key in series.items()})
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("tokens inserted")
    axes.set_ylabel("microseconds")
    legend(axes, theme)
    titled(figure, title, theme)
    return Picture(figure, f"{title}\n{table(rows, 'tokens', 'insert_us', 'retrieve_us')}")


def _bars(axes: Any, theme: Theme, names: Sequence[str], values: Sequence[float], form: str) -> None:
    """A bar for each name, from top to bottom; lookahead's hatched and in the first colour."""
    chosen = [name.startswith("lookahead") or name.startswith("trie") for name in names]
    bars = axes.barh(range(len(names)), values, color=[theme.series[0] if yes else theme.quiet for yes in chosen])
    for bar, yes in zip(bars, chosen):
        bar.set(hatch="//" if yes else "", edgecolor=theme.paper)
    axes.bar_label(bars, fmt=form, padding=3, fontsize=9, color=theme.ink)
    axes.set_yticks(range(len(names)), names)
    axes.margins(x=0.15)


def draw_speed(rows: Sequence[dict], title: str, *, dark: bool = False) -> Picture:
    """Tokens per second of all decoders."""
    theme = theme_of(dark)
    figure, (axes,) = plot(7.5, 0.4 * len(rows) + 1.6, theme)
    _bars(axes, theme, [row["decoder"] for row in rows], [row["tokens_per_s"] for row in rows], "%.0f")
    axes.invert_yaxis()
    axes.set_xlabel("tokens per second")
    titled(figure, title, theme)
    return Picture(figure, f"{title}\n{table(rows, 'decoder', 'tokens_per_s')}")


def draw_drafters(rows: Sequence[dict], title: str, *, dark: bool = False) -> Picture:
    """Tokens per step and tokens per second of every source of drafts, side by side."""
    theme = theme_of(dark)
    figure, panels = plot(9, 0.4 * len(rows) + 1.6, theme, 2, sharey=True)
    for axes, key, form in zip(panels, ("tokens_per_step", "tokens_per_s"), ("%.2f", "%.0f")):
        _bars(axes, theme, [row["drafter"] for row in rows], [row[key] for row in rows], form)
    panels[0].set_xlabel("tokens per step")
    panels[1].set_xlabel("tokens per second")
    panels[0].invert_yaxis()
    titled(figure, title, theme)
    return Picture(figure, f"{title}\n{table(rows, 'drafter', 'tokens_per_step', 'tokens_per_s')}")


def draw_beam(rows: Sequence[dict], title: str, *, dark: bool = False) -> Picture:
    """Steps per second and memory of all strategies, a bar for each number of beams."""
    theme = theme_of(dark)
    beams, names = (list(dict.fromkeys(row[key] for row in rows)) for key in ("num_beams", "strategy"))
    figure, panels = plot(10, 0.5 * len(rows) + 1.8, theme, 2, sharey=True)
    kinds = {"steps_per_s": "steps per second", "used_mb": "MB of caches in use, at most"}
    for axes, (key, unit) in zip(panels, kinds.items()):
        for i, num_beams in enumerate(beams):
            mine = {row["strategy"]: row[key] for row in rows if row["num_beams"] == num_beams}
            at = [j + 0.8 * i / len(beams) for j in range(len(names))]
            look = {"color": theme.series[i % 6], "hatch": ("", "//", "..", "xx")[i % 4], "edgecolor": theme.paper}
            values = [mine[name] for name in names]
            bars = axes.barh(at, values, 0.7 / len(beams), label=f"{num_beams} beams", **look)
            axes.bar_label(bars, fmt="%.3g", padding=3, fontsize=9, color=theme.ink)
        axes.set_yticks([j + 0.4 * (len(beams) - 1) / len(beams) for j in range(len(names))], names)
        axes.set_xlabel(unit)
        axes.margins(x=0.15)
    panels[0].invert_yaxis()
    legend(panels[1], theme)
    titled(figure, title, theme)
    return Picture(figure, f"{title}\n{table(rows, 'num_beams', 'strategy', *kinds)}")


def draw_replay(rows: Sequence[Any], title: str, *, dark: bool = False) -> dict[str, Picture]:
    """What `bench.py replay` measured (its Rows): tokens per step by budget, accepted lengths, and how honest the
    estimated probabilities are (if a mode has any)."""
    theme = theme_of(dark)
    modes = list(dict.fromkeys(row.mode for row in rows))
    plain = [{"mode": row.mode, "budget": row.budget, "tokens_per_step": row.tokens_per_step} for row in rows]
    text = f"{title}\n{table(plain, 'mode', 'budget', 'tokens_per_step')}"
    pictures = {}

    figure, (axes,) = plot(7.5, 4.5, theme)
    series = {}
    for mode in modes:
        mine = sorted((row for row in rows if row.mode == mode), key=lambda row: row.nodes_per_step)
        series[mode] = [row.nodes_per_step for row in mine], [row.tokens_per_step for row in mine]
    _lines(axes, theme, series)
    for x, y in series.values():
        axes.annotate(f"{y[-1]:.2f}", (x[-1], y[-1]), (6, -3), textcoords="offset points", color=theme.ink, fontsize=9)
    axes.axhline(1.0, color=theme.quiet, linewidth=0.8, linestyle=":", label="plain decoding")
    axes.set_xlabel("nodes drafted per step (mean)")
    axes.set_ylabel("tokens per step")
    axes.margins(x=0.1)
    legend(axes, theme)
    titled(figure, f"Tokens per step against budget ({title})", theme)
    pictures["replay_tokens_per_step"] = Picture(figure, text)

    budget = max(row.budget for row in rows)
    figure, (axes,) = plot(7.5, 4.5, theme)
    shown = [row for row in rows if row.budget == budget]
    for i, row in enumerate(shown):
        width = 0.8 / len(shown)
        at = [n + (i - (len(shown) - 1) / 2) * width for n in range(len(row.lengths))]
        look = {"color": theme.series[i % 6], "hatch": ("", "//", "..", "xx")[i % 4], "edgecolor": theme.paper}
        axes.bar(at, [n / sum(row.lengths) for n in row.lengths], width, label=row.mode, **look)
    axes.set_xlim(-0.6, 10.6)
    axes.set_xlabel("drafted tokens accepted in a step")
    axes.set_ylabel("share of steps")
    legend(axes, theme)
    titled(figure, f"Accepted lengths at a budget of {budget} ({title})", theme)
    pictures["replay_accepted_lengths"] = Picture(figure, text)

    honest = [row for row in rows if any(n >= 200 for n, _, _ in row.bins)]  # of fewer nodes a share says little
    if honest:
        figure, (axes,) = plot(5.5, 5, theme)
        axes.plot([0.003, 1], [0.003, 1], color=theme.ink, linewidth=0.8, label="estimated = accepted")
        axes.fill_between([0.003, 1], [0.003 / 1.25, 1 / 1.25], [0.003 * 1.25, 1.25], color=theme.ink, alpha=0.1, lw=0)
        for i, row in enumerate(honest):
            points = [(p / n, accepted / n) for n, p, accepted in row.bins if n >= 200]
            look = {"marker": MARKS[i % 6], "linestyle": "", "color": theme.series[i % 6], "alpha": 0.8}
            axes.plot(*zip(*points), label=f"budget {row.budget}", **look)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlim(0.003, 1.1)
        axes.set_ylim(0.003, 1.1)
        axes.set_xlabel("estimated probability (mean of a bin)")
        axes.set_ylabel("share accepted")
        legend(axes, theme)
        titled(figure, f"Are the estimates honest? Grey: within a factor 1.25 ({title})", theme)
        pictures["replay_reliability"] = Picture(figure, text)
    return pictures
