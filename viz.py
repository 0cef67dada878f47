"""Pictures. Anything may be drawn here; nothing depends on it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # files, no windows
from matplotlib import pyplot as plt

COLOURS = {"best-first": "#0b6e4f", "hierarchical": "#c8553d", "parallel": "#5b7db1", "single": "#9a8c98"}


def _save(figure: Any, path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


def draw_replay(rows: Sequence[Any], edges: Sequence[float], out: Path, title: str) -> list[Path]:
    """What `bench.py replay` measured (its Rows): tokens per step by budget, accepted lengths, and how honest the
    estimated probabilities are (if a mode has any). Returns the files written.
    """
    modes = list(dict.fromkeys(row.mode for row in rows))
    pictures = []

    figure, axes = plt.subplots(figsize=(7, 4.5))
    for mode in modes:
        mine = sorted((row for row in rows if row.mode == mode), key=lambda row: row.nodes_per_step)
        x, y = [row.nodes_per_step for row in mine], [row.tokens_per_step for row in mine]
        axes.plot(x, y, "o-", color=COLOURS[mode], label=mode)
        axes.annotate(f"{y[-1]:.2f}", (x[-1], y[-1]), textcoords="offset points", xytext=(6, -3), color=COLOURS[mode])
    axes.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
    axes.annotate("plain decoding", (axes.get_xlim()[1], 1.0), textcoords="offset points", xytext=(-80, 4), fontsize=8)
    axes.set_xlabel("nodes drafted per step (mean)")
    axes.set_ylabel("tokens per step")
    axes.set_title(f"Tokens per step against budget\n({title})", fontsize=10)
    axes.margins(x=0.1)
    axes.legend()
    pictures.append(_save(figure, out / "replay_tokens_per_step.png"))

    budget = max(row.budget for row in rows)
    figure, axes = plt.subplots(figsize=(7, 4.5))
    shown = [row for row in rows if row.budget == budget]
    for i, row in enumerate(shown):
        total = sum(row.lengths)
        width = 0.8 / len(shown)
        at = [n + (i - (len(shown) - 1) / 2) * width for n in range(len(row.lengths))]
        axes.bar(at, [n / total for n in row.lengths], width, color=COLOURS[row.mode], label=row.mode)
    axes.set_xlim(-0.6, 10.6)
    axes.set_xlabel("drafted tokens accepted in a step")
    axes.set_ylabel("share of steps")
    axes.set_title(f"Accepted lengths at a budget of {budget}\n({title})", fontsize=10)
    axes.legend()
    pictures.append(_save(figure, out / "replay_accepted_lengths.png"))

    honest = [row for row in rows if any(n >= 200 for n, _, _ in row.bins)]  # of fewer nodes a share says little
    if honest:
        figure, axes = plt.subplots(figsize=(5.5, 5))
        axes.plot([0.003, 1], [0.003, 1], color="black", linewidth=0.8, label="estimated = accepted")
        axes.fill_between([0.003, 1], [0.003 / 1.25, 1 / 1.25], [0.003 * 1.25, 1.25], color="black", alpha=0.08, lw=0)
        for row, marker in zip(honest, "osD^v*" * len(honest)):
            points = [(p / n, accepted / n) for n, p, accepted in row.bins if n >= 200]
            axes.plot(*zip(*points), marker, color=COLOURS[row.mode], alpha=0.7, label=f"budget {row.budget}")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlim(0.003, 1.1)
        axes.set_ylim(0.003, 1.1)
        axes.set_xlabel("estimated probability (mean of a bin)")
        axes.set_ylabel("share accepted")
        axes.set_title(f"Are the estimates honest? Grey: within a factor 1.25\n({title})", fontsize=10)
        axes.legend()
        pictures.append(_save(figure, out / "replay_reliability.png"))
    return pictures


def draw_cost(rows: Sequence[dict], out: Path, title: str) -> list[Path]:
    """T(n) against F.linear and the two bounds; with several prefixes also T by prefix."""
    figure, axes = plt.subplots(figsize=(7, 4.5))
    prefixes, widths = (list(dict.fromkeys(row[key] for row in rows)) for key in ("prefix", "rows"))
    first = [row for row in rows if row["prefix"] == prefixes[0]]
    axes.plot(widths, [row["f_linear_ms"] for row in first], "o-", color="#9a8c98", label="the same with F.linear")
    axes.plot(widths, [row["ms"] for row in first], "o-", color="#0b6e4f", label="this repository")
    bound = [max(row["read_bound_ms"], row["compute_bound_ms"]) for row in first]
    axes.plot(widths, bound, "--", color="black", linewidth=1, label="bound: reading weights, then arithmetic")
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"rows of the forward pass (1 + drafted nodes), behind {prefixes[0]} tokens")
    axes.set_ylabel("milliseconds")
    axes.set_title(title.replace(" (", "\n("), fontsize=8)
    axes.legend()
    pictures = [_save(figure, out / "cost.png")]
    if len(prefixes) > 1:
        figure, axes = plt.subplots(figsize=(7, 4.5))
        for n in widths:
            times = [row["ms"] for row in rows if row["rows"] == n]
            axes.plot(prefixes, times, "o-", label=f"{n} row{'s' * (n > 1)}")
        axes.set_ylim(bottom=0)
        axes.set_xlabel("tokens in the cache")
        axes.set_ylabel("milliseconds")
        axes.set_title(title.replace(" (", "\n("), fontsize=8)
        axes.legend(fontsize=8)
        pictures.append(_save(figure, out / "cost_by_prefix.png"))
    return pictures


def draw_growth(rows: Sequence[dict], out: Path, title: str) -> list[Path]:
    """Microseconds to insert a token and to make a draft, by tokens inserted."""
    figure, axes = plt.subplots(figsize=(7, 4.5))
    x = [row["tokens"] for row in rows]
    axes.plot(x, [row["retrieve_us"] for row in rows], "o-", color="#0b6e4f", label="to make a draft")
    axes.plot(x, [row["insert_us"] for row in rows], "o-", color="#c8553d", label="to insert a token")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("tokens inserted")
    axes.set_ylabel("microseconds")
    axes.set_title(title.replace(" (", "\n("), fontsize=8)
    axes.legend()
    return [_save(figure, out / "growth.png")]


def draw_speed(rows: Sequence[dict], out: Path, title: str) -> list[Path]:
    """Tokens per second of all decoders."""
    figure, axes = plt.subplots(figsize=(7, 0.4 * len(rows) + 1.4))
    names = [row["decoder"] for row in rows][::-1]
    speeds = [row["tokens_per_s"] for row in rows][::-1]
    colours = [
        "#0b6e4f" if name.startswith("lookahead") else "#5b7db1" if name == "plain" else "#9a8c98" for name in names
    ]
    bars = axes.barh(names, speeds, color=colours)
    axes.bar_label(bars, fmt="%.0f", padding=3, fontsize=8)
    axes.set_xlabel("tokens per second")
    axes.set_title(title.replace(" (", "\n("), fontsize=8)
    axes.margins(x=0.1)
    return [_save(figure, out / "speed.png")]


def draw_drafters(rows: Sequence[dict], out: Path, title: str) -> list[Path]:
    """Tokens per step and tokens per second of every source of drafts, side by side."""
    figure, panels = plt.subplots(1, 2, figsize=(9, 0.4 * len(rows) + 1.4), sharey=True)
    names = [row["drafter"] for row in rows][::-1]
    for axes, key, label in zip(panels, ("tokens_per_step", "tokens_per_s"), ("tokens per step", "tokens per second")):
        values = [row[key] for row in rows][::-1]
        bars = axes.barh(names, values, color=["#5b7db1" if name == "plain" else "#0b6e4f" for name in names])
        axes.bar_label(bars, fmt="%.2f" if key == "tokens_per_step" else "%.0f", padding=3, fontsize=8)
        axes.set_xlabel(label)
        axes.margins(x=0.15)
    figure.suptitle(title.replace(" (", "\n("), fontsize=8)
    return [_save(figure, out / "drafters.png")]


def draw_beam(rows: Sequence[dict], out: Path, title: str) -> list[Path]:
    """Steps per second and memory of all strategies, a bar for each number of beams."""
    beams, names = (list(dict.fromkeys(row[key] for row in rows)) for key in ("num_beams", "strategy"))
    figure, panels = plt.subplots(1, 2, figsize=(10, 0.5 * len(rows) + 1.6), sharey=True)
    for axes, key, label in zip(
        panels, ("steps_per_s", "used_mb"), ("steps per second", "MB of caches in use, at most")
    ):
        for i, num_beams in enumerate(beams):
            mine = {row["strategy"]: row[key] for row in rows if row["num_beams"] == num_beams}
            at = [-j - 0.8 * i / len(beams) for j in range(len(names))]
            colour = ("#0b6e4f", "#5b7db1", "#c8553d", "#9a8c98")[i % 4]
            bars = axes.barh(
                at, [mine[name] for name in names], 0.7 / len(beams), color=colour, label=f"{num_beams} beams"
            )
            axes.bar_label(bars, fmt="%.3g", padding=3, fontsize=8)
        axes.set_yticks([-j - 0.4 * (len(beams) - 1) / len(beams) for j in range(len(names))], names)
        axes.set_xlabel(label)
        axes.margins(x=0.15)
    panels[1].legend(fontsize=8)
    figure.suptitle(title.replace(" (", "\n("), fontsize=8)
    return [_save(figure, out / "beam.png")]
