"""What all pictures share: a drawing and its twin in text, two themes, tokens as readable labels, trees of boxes.

`viz.py` is the front door. A Picture is made by one call, shows itself in a notebook, prints as text in a terminal and
saves itself as SVG or PNG. Three decisions:

- No windows. A figure is made without pyplot, so no backend is chosen and no setting of the reader's is touched; their
  own settings do not change a picture either.
- Colours are Okabe and Ito's, which people with any of the common colour blindnesses can tell apart, and nothing is
  said by colour alone: a kind of box or cell also has its own border, hatching or sign.
- Drawings are laid out in inches on a sheet of fixed width, in letters of 9 points or more: on a projector all of it
  can be read. What does not fit is counted ("... and 12 more"), never shrunk.
"""

import functools
import io
import os
import shutil
import tempfile
import textwrap
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

Decode = Callable[[list[int]], str]  # token ids to text, `tokenizer.decode` say

WIDTH = 12.0  # inches; no sheet is wider
CHAR = 0.0836  # width of a letter in inches: DejaVu Sans Mono at 10 points
SUFFIXES = (".svg", ".png")
MARKERS, LINES, HATCHES = "osD^vPX*", ("-", "--", "-.", ":"), ("", "///", "...", "xxx", "\\\\\\", "++")


@dataclass(frozen=True)
class Theme:
    """Colours by what they mean. Text is `ink` on every fill."""

    paper: str
    ink: str
    quiet: str  # second thoughts: notes, lines of what was rejected
    faint: str  # grids, empty places
    past: str  # what is in the cache
    root: str
    kept: str  # accepted, alive, finished
    freed: str  # rejected, given back: the colour of hatching and borders
    turns: tuple[str, ...]  # fills that take turns
    series: tuple[str, ...]  # lines and bars


LIGHT = Theme(
    paper="#ffffff", ink="#16181d", quiet="#59616e", faint="#e6e9ee", past="#c4cad3", root="#74bdf0", kept="#4cc9a0",
    freed="#d55e00", turns=("#bfe2f8", "#ffdc9c", "#bdeedb", "#c9b8e8"),
    series=("#0072b2", "#d55e00", "#009e73", "#b0568c", "#b07a00", "#16181d"),
)  # fmt: skip
DARK = Theme(
    paper="#14171c", ink="#f4f5f7", quiet="#aab3c0", faint="#2b313a", past="#515a68", root="#1b6fae", kept="#007f5c",
    freed="#ff9d5c", turns=("#1d4f73", "#6b4a0e", "#11583f", "#602a4a"),
    series=("#56b4e9", "#ff9d5c", "#2fd0a0", "#e69ac8", "#f0c84b", "#f4f5f7"),
)  # fmt: skip


def theme_of(dark: bool) -> Theme:
    return DARK if dark else LIGHT


@contextmanager
def settings(theme: Theme) -> Iterator[None]:
    """matplotlib's own defaults and ours, whatever the reader has set; afterwards theirs again."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # leaves the backend alone
        matplotlib.rcParams.update({
            "text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": "lookahead", "font.size": 10,
            "text.color": theme.ink, "axes.labelcolor": theme.ink, "axes.edgecolor": theme.quiet,
            "xtick.color": theme.quiet, "ytick.color": theme.quiet, "xtick.labelcolor": theme.ink,
            "ytick.labelcolor": theme.ink, "axes.facecolor": theme.paper, "figure.facecolor": theme.paper,
            "legend.facecolor": theme.paper, "legend.edgecolor": theme.quiet, "legend.framealpha": 1.0,
            "axes.grid": True, "axes.axisbelow": True, "grid.color": theme.faint, "axes.spines.top": False,
            "axes.spines.right": False, "axes.titlesize": 12, "axes.titleweight": "bold", "axes.titlelocation": "left",
        })  # fmt: skip
        yield


def figure_of(size: tuple[float, float]) -> Figure:
    """An empty figure for plots, `size` in inches; it belongs to no window and no global list."""
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
    return figure


def laid_out(figure: Figure) -> Figure:
    """All parts put into their places, for good: matplotlib would move them a little each time it draws."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    return figure


@dataclass(repr=False)
class Picture:
    """`figure` for the eyes, `text` for terminals and for readers who do not see; `theme` it was drawn in."""

    figure: Figure
    text: str
    theme: Theme = LIGHT

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__  # so the twin is what a terminal session shows, and what a notebook stores beside the image

    def _bytes(self, suffix: str) -> bytes:
        file = io.BytesIO()
        about = {"Date": None} if suffix == ".svg" else {}  # the same picture is the same file
        with settings(self.theme):
            self.figure.savefig(file, format=suffix[1:], dpi=150, metadata=about)
        return file.getvalue()

    def _repr_png_(self) -> bytes:  # what notebooks ask for. The paper is opaque, so a page of any colour will do
        return self._bytes(".png")

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write an .svg (its text stays text) or a .png; returns the path.

        It is written under a temporary name and renamed, so a reader sees the old file or the new one, whole. Raises
        ValueError for another suffix, OSError (FileNotFoundError, IsADirectoryError) where no file can be written.
        """
        path = Path(path)
        if path.suffix.lower() not in SUFFIXES:
            raise ValueError(f"a picture is saved as {' or '.join(SUFFIXES)}, not as {path.name!r}")
        if not path.parent.is_dir():
            raise FileNotFoundError(f"cannot write {path}: there is no such folder")
        if path.is_dir():
            raise IsADirectoryError(f"cannot write {path}: it is a folder")
        data = self._bytes(path.suffix.lower())
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=path.parent) as scratch:
            Path(scratch, "picture").write_bytes(data)
            if path.exists():  # who may read it stays as it was
                shutil.copymode(path, f"{scratch}/picture")
            os.replace(f"{scratch}/picture", path)
        return path


# --- tokens as labels -------------------------------------------------------------------------------------------------


@functools.cache
def _drawable() -> frozenset[int]:
    """The characters that the font has (it comes with matplotlib, so they are the same everywhere)."""
    return frozenset(font_manager.get_font(font_manager.findfont("DejaVu Sans Mono")).get_charmap())


def plain(text: str) -> str:
    """Text that can be drawn: line breaks and what the font lacks as escapes, as in Python's repr."""
    signs = []
    for sign in text:
        if sign == " " or (ord(sign) in _drawable() and unicodedata.category(sign)[0] not in "CMZ"):
            signs.append(sign)
        else:
            code = ord(sign)
            escape = f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"
            signs.append({"\n": "\\n", "\t": "\\t", "\r": "\\r"}.get(sign, escape))
    return "".join(signs)


def cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def label(text: str, limit: int = 12) -> str:
    """A token as it is drawn: spaces visible, one line, at most `limit` letters. " 12\\n" -> "␣12\\n"."""
    return cut(plain(text).replace(" ", "␣"), limit) or "(none)"


def quote(ids: Sequence[int], decode: Decode) -> str:
    """Tokens as they are printed, each as Python's repr: ' 12' '\\n'."""
    return " ".join(repr(decode([token])) for token in ids)


def plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + "s" * (number != 1)


def left_out(number: int, noun: str, where: str = "") -> list[str]:
    """The remark that so many were not drawn; none if all were. (3, "step") -> ["... and 3 more steps."]"""
    return [f"... and {plural(number, f'more {noun}')}{where}."] if number > 0 else []


# --- a sheet in inches ------------------------------------------------------------------------------------------------


class Sheet:
    """A figure to draw on in inches, y downwards, with a title on top and a legend and remarks at the bottom.

    Create it with the size of the drawing itself; `top` is where that begins. Width is at least what the title needs.
    """

    MARGIN = 0.25

    def __init__(self, width: float, height: float, title: str, dark: bool, remarks: Sequence[str] = (),
                 legend: Sequence[tuple[str, ...]] = ()) -> None:  # fmt: skip
        self.theme = theme_of(dark)
        self.width = min(WIDTH, max(width, 6.5, min(9.5, 2 * self.MARGIN + 0.113 * len(title))))
        letters = int((self.width - 2 * self.MARGIN) / 0.112)  # of 12 points, bold
        titles = textwrap.wrap(plain(title), letters)
        notes = [line for remark in remarks for line in textwrap.wrap(plain(remark), int(letters * 1.4))]
        self.top = self.MARGIN + 0.26 * len(titles) + 0.12
        keys, across = [], self.MARGIN  # (x, line, kind, text)
        line = 0
        for kind, text, *sign in legend:
            needs = 0.38 + 0.075 * len(text) + 0.3
            if across + needs > self.width and across > self.MARGIN:
                across, line = self.MARGIN, line + 1
            keys.append((across, line, kind, text, *sign))
            across += needs
        below = self.top + height + 0.2
        self.height = below + 0.3 * (line + 1) * bool(keys) + 0.24 * len(notes) + 0.12
        self.todo: list[Callable[[], Any]] = []
        with settings(self.theme):
            self.figure = Figure(figsize=(self.width, self.height))
            FigureCanvasAgg(self.figure)
            self.axes: Axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set_xlim(0, self.width)
        self.axes.set_ylim(self.height, 0)
        self.axes.axis("off")
        for i, text in enumerate(titles):
            self.text(self.MARGIN, self.MARGIN + 0.13 + 0.26 * i, text, size=12, weight="bold")
        for x, line, kind, text, *sign in keys:
            self.cell(x, below + 0.05 + 0.3 * line, 0.28, 0.2, kind, *sign)
            self.text(x + 0.38, below + 0.15 + 0.3 * line, text)
        start = below + 0.3 * (keys[-1][1] + 1 if keys else 0)
        for i, text in enumerate(notes):
            self.text(self.MARGIN, start + 0.12 + 0.24 * i, text, colour=self.theme.quiet)

    def text(
        self, x: float, y: float, text: str, *, size: float = 10, colour: str | None = None, mono: bool = False,
        align: str = "left", weight: str = "normal", rotation: float = 0, valign: str = "center_baseline",
    ) -> None:  # fmt: skip
        how = {"size": size, "color": colour or self.theme.ink, "ha": align, "va": valign, "weight": weight,
               "family": "monospace" if mono else "sans-serif", "rotation": rotation}  # fmt: skip
        self.todo.append(lambda: self.axes.text(x, y, text, **how, rotation_mode="anchor", parse_math=False))

    def style(self, kind: str) -> tuple[str, str, float, str, str, str]:
        """What a kind looks like: fill, border, its width and line style, hatching, a sign for where colours fail."""
        theme = self.theme
        if kind.startswith("turn"):
            return theme.turns[int(kind[4:])], theme.quiet, 0.6, "-", "", ""
        return {
            "plain": (theme.paper, theme.ink, 1.0, "-", "", ""),
            "past": (theme.past, theme.quiet, 0.6, "-", "", ""),
            "root": (theme.root, theme.ink, 1.0, "-", "", "R"),
            "kept": (theme.kept, theme.ink, 2.0, "-", "", "✓"),
            "freed": (theme.paper, theme.freed, 1.0, "-", "////", ""),
            "rejected": (theme.paper, theme.freed, 1.2, "--", "", ""),
            "empty": (theme.paper, theme.faint, 0.6, "-", "", ""),
            "end": (theme.turns[1], theme.ink, 2.0, "-", "", "■"),
        }[kind]

    def cell(self, x: float, y: float, width: float, height: float, kind: str, text: str | None = None) -> None:
        """A rectangle of a kind, with its sign or a text of one or two letters in it."""
        fill, border, line, dashes, hatch, sign = self.style(kind)

        def draw() -> None:
            patch = Rectangle((x, y), width, height, facecolor=fill, edgecolor=border, linewidth=min(line, 1.2),
                              linestyle=dashes, hatch=hatch or None, gid=kind)  # fmt: skip
            patch.set_hatch_linewidth(0.8)
            self.axes.add_patch(patch)

        self.todo.append(draw)
        if text or (text is None and sign):
            self.text(x + width / 2, y + height / 2, text or sign, size=9, align="center", mono=True)

    def box(self, x: float, y: float, width: float, height: float, kind: str, text: str, note: str = "") -> None:
        """A rounded box for a token, x its left and y its middle; the note stands in it, below the text."""
        fill, border, line, dashes, _, sign = self.style(kind)
        how = {"facecolor": fill, "edgecolor": border, "linewidth": line, "linestyle": dashes, "gid": kind}
        shape = "round,pad=0,rounding_size=0.07"
        corner = (x, y - height / 2)
        self.todo.append(lambda: self.axes.add_patch(FancyBboxPatch(corner, width, height, boxstyle=shape, **how)))
        half = 0.085 if note else 0.0
        sign = f"{sign} " if sign and sign in "✓■" else ""
        self.text(x + width / 2, y - half, sign + text, mono=True, align="center")
        if note:
            self.text(x + width / 2, y + half + 0.01, note, size=9, align="center")

    def line(self, x: Sequence[float], y: Sequence[float], colour: str, width: float = 1.2, dashes: Any = "-") -> None:
        """A line behind everything else."""
        how = {"color": colour, "linewidth": width, "linestyle": dashes, "solid_capstyle": "butt", "zorder": 0.5}
        self.todo.append(lambda: self.axes.plot(x, y, **how))

    def picture(self, text: str) -> Picture:
        with settings(self.theme):  # once for all: it takes longer than to draw
            for draw in self.todo:
                draw()
        return Picture(self.figure, text, self.theme)


# --- trees of boxes ---------------------------------------------------------------------------------------------------


@dataclass
class Box:
    """A node as it is drawn. `line`: width of the line to its parent in points; `dashed`: that line's style;
    `kind` "more" is a row of text without a box."""

    text: str
    note: str = ""
    kind: str = "plain"
    line: float = 1.2
    dashed: bool = False
    children: list["Box"] = field(default_factory=list)
    depth: int = 0
    row: int = 0

    def walk(self) -> Iterator["Box"]:
        """Itself and all below, each before its children; sets depth and row. A first child stands in its parent's
        row, so that the most probable text reads as a line."""
        rows, stack = 0, [(self, 0, True)]
        while stack:
            box, depth, first = stack.pop()
            rows += not first
            box.depth, box.row = depth, rows
            yield box
            stack += [(child, depth + 1, i == 0) for i, child in enumerate(box.children)][::-1]

    @property
    def needs(self) -> float:
        """Inches that it is wide."""
        sign = 2 * (self.kind in ("kept", "end"))
        return CHAR * max(len(self.text) + sign, 0.95 * len(self.note)) + 0.2


class Boxes:
    """A tree laid out: from the root on the left, a column for each depth, a row for each leaf."""

    def __init__(self, root: Box, gap: float = 0.34) -> None:
        self.boxes, self.gap = list(root.walk()), gap
        self.pitch = 0.54 if any(box.note for box in self.boxes) else 0.38
        widths: dict[int, float] = {}
        for box in self.boxes:
            widths[box.depth] = max(widths.get(box.depth, 0.0), 0.0 if box.kind == "more" else box.needs)
        self.left = {0: 0.0}
        for depth in range(len(widths)):
            self.left[depth + 1] = self.left[depth] + max(widths[depth], 0.3) + gap
        self.width = max(self.left[box.depth] + box.needs for box in self.boxes)
        self.height = self.pitch * (1 + max(box.row for box in self.boxes))

    def draw(self, sheet: Sheet, x: float, y: float) -> None:
        """With the upper left corner at (x, y). From a parent one thin line goes down past all its children, and from
        there one to each; the accepted path is drawn over it."""
        quiet, ink = sheet.theme.quiet, sheet.theme.ink
        for parent in self.boxes:
            start, above = x + self.left[parent.depth] + parent.needs, self.middle(y, parent)
            joint = x + self.left[parent.depth + 1] - 0.6 * self.gap if parent.children else 0.0
            for child in sorted(parent.children, key=lambda child: child.kind == "kept"):
                end, middle = x + self.left[child.depth], self.middle(y, child)
                dashes = (0, (2, 1.2)) if child.dashed else "-"
                if child.kind == "kept":
                    sheet.line([start, joint, joint, end], [above, above, middle, middle], ink, child.line)
                else:
                    sheet.line([joint, end], [middle, middle], quiet, child.line, dashes)
                    if child.row == parent.row:
                        sheet.line([start, joint], [above, above], quiet, child.line, dashes)
            if len(parent.children) > 1:
                sheet.line([joint, joint], [above, self.middle(y, parent.children[-1])], quiet, 0.8)
        for box in self.boxes:
            at, middle = x + self.left[box.depth], self.middle(y, box)
            if box.kind == "more":
                sheet.text(at + 0.05, middle, box.text, colour=quiet)
            else:
                sheet.box(at, middle, box.needs, self.pitch - 0.1, box.kind, box.text, box.note)

    def middle(self, y: float, box: Box) -> float:
        return y + self.pitch * (box.row + 0.5)
