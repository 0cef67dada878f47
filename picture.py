"""What all pictures share: a figure with a twin in words, two themes, and a way to draw a tree.

No colour stands alone: whatever differs in colour differs in line, filling or mark as well. The colours are those of
Okabe and Ito (2008), chosen so that people with any kind of colour vision tell them apart; on dark paper the dark ones
are made lighter.
"""

import io
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.patches import FancyBboxPatch

Decode = Callable[[list[int]], str]
UNIT = 0.3  # inches: a unit of the canvas, about the height of a line
CHAR = 0.29  # units: the width of a character at 10 points


class Theme(NamedTuple):
    paper: str
    ink: str
    quiet: str  # what is not the point
    panel: str  # filling of what is neither kept nor freed
    kept: str
    tint: str  # filling of what is kept
    series: tuple[str, ...]  # lines and bars, in this order
    tints: tuple[str, ...]  # backgrounds of text


LIGHT = Theme("#ffffff", "#1f2328", "#59636e", "#f0f2f5", "#00664d", "#cdebe1",
              ("#0072b2", "#d55e00", "#009e73", "#a3568a", "#8a6d00", "#56b4e9"),
              ("#cfe3f1", "#fbe0cc", "#cdebe1", "#f0dae8"))  # fmt: skip
DARK = Theme("#0d1117", "#e6edf3", "#9198a1", "#21262d", "#56d4a8", "#12402f",
             ("#56b4e9", "#ff8a3d", "#2fc79a", "#e39ac8", "#f0e442", "#0f86c9"),
             ("#123a56", "#552b0c", "#12402f", "#4a2640"))  # fmt: skip
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
MARKS = "os^Dv*"


def theme_of(dark: bool) -> Theme:
    return DARK if dark else LIGHT


@dataclass
class Picture:
    """A figure and its twin in words. A notebook shows the figure, `print` the words.

    save(path)  writes .svg or .png, by the name's end, under a temporary name first; ValueError for another end,
                FileNotFoundError for a folder that does not exist
    """

    figure: Figure = field(repr=False)
    text: str

    def __str__(self) -> str:
        return self.text

    def _repr_png_(self) -> bytes:
        return self.png(100)

    def png(self, dpi: int = 150) -> bytes:
        written = io.BytesIO()
        self.figure.savefig(written, format="png", dpi=dpi)
        return written.getvalue()

    def save(self, path: str | os.PathLike[str]) -> Path:
        path = Path(path)
        if path.suffix not in (".svg", ".png"):
            raise ValueError(f"a picture is saved as .svg or .png, not as {path.name!r}")
        if not path.parent.is_dir():
            raise FileNotFoundError(f"cannot write {path}: there is no such folder")
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=path.parent) as scratch:
            partial = Path(scratch, path.name)
            # text stays text, and the same picture is the same file: no date, no random names
            with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "lookahead"}):
                self.figure.savefig(partial, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
            partial.replace(path)
        return path


def canvas(width: float, height: float, theme: Theme) -> tuple[Figure, Any]:
    """A figure of so many units, and its axes: (0, 0) is the upper left corner, nothing is drawn yet."""
    figure = Figure(figsize=(width * UNIT, height * UNIT), facecolor=theme.paper)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.axis("off")
    return figure, axes


def plot(width: float, height: float, theme: Theme, columns: int = 1, **more: Any) -> tuple[Figure, list[Any]]:
    """A figure of so many inches with `columns` axes side by side, in the theme's colours."""
    figure = Figure(figsize=(width, height), facecolor=theme.paper, layout="constrained")
    panels = figure.subplots(1, columns, squeeze=False, **more)[0]
    for axes in panels:
        axes.set_facecolor(theme.paper)
        axes.tick_params(colors=theme.ink, labelsize=9)
        for name, spine in axes.spines.items():
            spine.set_color(theme.quiet)
            spine.set_visible(name in ("left", "bottom"))
        for label in (axes.xaxis.label, axes.yaxis.label, axes.title):
            label.set_color(theme.ink)
    return figure, list(panels)


def legend(axes: Any, theme: Theme, **more: Any) -> None:
    axes.legend(facecolor=theme.paper, edgecolor=theme.quiet, labelcolor=theme.ink, fontsize=9, **more)


def write(axes: Any, x: float, y: float, text: str, colour: str, size: float = 10, **more: Any) -> None:
    """A line of text at (x, y), the middle of its height. (A "$" is a dollar, not the start of a formula.)"""
    settings = {"va": "center", "family": "DejaVu Sans Mono", "parse_math": False} | more
    axes.text(x, y, text, color=colour, fontsize=size, **settings)


@cache
def _can_draw(character: str) -> bool:
    return bool(get_font(findfont(FontProperties(family="DejaVu Sans Mono"))).get_char_index(ord(character)))


def label(token: int, decode: Decode, longest: int = 14) -> str:
    """A token's text for a picture: spaces and line breaks visible, what the font lacks as its number, not too long."""
    text = decode([token]).replace("\n", "\\n").replace("\t", "\\t").replace(" ", "\u2423") or "(nothing)"
    text = "".join(c if c.isprintable() and _can_draw(c) else f"<{ord(c):X}>" for c in text)
    return text if len(text) <= longest else text[: longest - 1] + "\u2026"


class Item(NamedTuple):  # a node of a tree that is drawn
    text: str
    parent: int  # the number of an earlier item, or -1 for the root
    note: str = ""  # small, above
    style: str = "plain"  # or "kept" or "freed"
    width: float = 1.0  # of the line that leads to it, in points


def tree_rows(parents: Sequence[int]) -> list[int]:
    """The line on which each node is drawn, the root (last entry, so that it has index -1) on line 0: a node's first
    child stands on its own line, the others below all that is below the first."""
    children: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    for node, parent in enumerate(parents):
        children[parent].append(node)
    rows, used, stack = [0] * (len(parents) + 1), 0, [(-1, True)]
    while stack:
        node, first = stack.pop()
        used += not first
        rows[node] = used
        stack += [(child, i == 0) for i, child in reversed(list(enumerate(children[node])))]
    return rows


def draw_tree(axes: Any, left: float, top: float, root: str, items: Sequence[Item], theme: Theme) -> None:
    """The tree from left to right, a column for each depth; `tree_size` tells how much room it takes."""
    rows, columns = tree_rows([item.parent for item in items]), _columns(root, items)
    depths = _depths(items)
    middle = [(left + columns[depth][0], top + 1 + 1.6 * row) for depth, row in zip(depths, rows)]
    for node, item in enumerate(items):
        (x0, y0), (x1, y1) = middle[item.parent], middle[node]
        x0 += columns[depths[item.parent]][1]
        bend = x0 + 0.35
        colour = theme.kept if item.style == "kept" else theme.quiet
        line = ":" if item.style == "freed" else "-"
        axes.plot([x0, bend, bend, x1], [y0, y0, y1, y1], line, color=colour, linewidth=item.width, zorder=1)
    for (x, y), item, depth in zip([middle[-1], *middle], [Item(root, -1, style="kept"), *items], [0, *depths]):
        box(axes, x, y - 0.45, columns[depth][1], 0.9, item.style, theme)
        write(axes, x + columns[depth][1] / 2, y, item.text, theme.ink, ha="center")
        write(axes, x + columns[depth][1] / 2, y - 0.75, item.note, theme.quiet, 9, ha="center")


def box(axes: Any, x: float, y: float, width: float, height: float, style: str, theme: Theme) -> None:
    """A rounded box: kept is filled and has a thick line, freed a dotted one."""
    look = {
        "kept": {"facecolor": theme.tint, "edgecolor": theme.kept, "linewidth": 2.0},
        "freed": {"facecolor": theme.paper, "edgecolor": theme.quiet, "linestyle": ":", "linewidth": 1.2},
        "plain": {"facecolor": theme.panel, "edgecolor": theme.quiet, "linewidth": 1.0},
    }[style]
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=0.2", zorder=2, **look))


def tree_size(root: str, items: Sequence[Item]) -> tuple[float, float]:
    """Width and height in units."""
    columns = _columns(root, items)
    return sum(columns[-1]) + 0.3, 1.6 * (max(tree_rows([item.parent for item in items])) + 1) + 0.3


def _depths(items: Sequence[Item]) -> list[int]:
    """Of each node, the root's at the end."""
    depths = [0] * (len(items) + 1)
    for node, item in enumerate(items):
        depths[node] = depths[item.parent] + 1
    return depths


def _columns(root: str, items: Sequence[Item]) -> list[tuple[float, float]]:
    """For each depth where its boxes begin and how wide they are."""
    depths = _depths(items)
    widths = [len(root)] + [0] * max(depths)
    for item, depth in zip(items, depths):
        widths[depth] = max(widths[depth], len(item.text), len(item.note))
    columns, x = [], 0.0
    for width in widths:
        columns.append((x, CHAR * width + 0.5))
        x += CHAR * width + 0.5 + 0.7
    return columns
