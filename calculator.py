"""A reward for the bundled models, which write their sums into notes:  She has 48 / 2 = <<48/2=24>>24 apples.

`calculator(text, finished)` is the share of a finished text's notes that are right, 0 without any. Of a text that goes
on it says 1 as long as all of it may still come right, and 0 from the first wrong character on. So a search sees a
mistake where it can first be seen, and need not pay for what comes after:

    ... = <<48/2=2           1    may become 24
    ... = <<48/2=25          0    will not
    ... = <<48/2=24>>2       1    may become 24
    ... = <<48/2=24>>25      0    the number behind a note must be the note's
    ... = <<48/2=24>         1    the last > is still to come; but in a finished text it is a broken note

Step by step: notebook 07, section 5.
"""

import ast
import math
import operator
import re
from fractions import Fraction

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
SUM = re.compile(r"[0-9+\-*/()., ]{1,80}")  # anything longer is nonsense
NUMBER = re.compile(r"-?[\d,]*\.?\d*")


def calculator(text: str, finished: bool, early: bool = True) -> float:
    """How right the notes of `text` are, 0 to 1 (see above).

    With `early` off a number is judged only when it is complete: at `>>`, and behind it when something follows.
    """
    notes = text.split("<<")[1:]
    verdicts = [judge(note, finished or i + 1 < len(notes), early) for i, note in enumerate(notes)]
    if not finished:
        return float(False not in verdicts)
    return sum(verdict is True for verdict in verdicts) / max(1, len(verdicts))


def judge(note: str, ended: bool, early: bool) -> bool | None:
    """Whether what stands behind a "<<" is right; None if it may come right. `ended`: nothing is added to it."""
    may = None if not ended else False
    sum_, equals, rest = note.partition("=")
    if not equals:
        return may if not sum_ or SUM.fullmatch(sum_) else False
    exact = compute(sum_)
    if exact is None:
        return False
    shown = NUMBER.match(rest)[0]
    rest = rest[len(shown) :]
    if not rest:
        return may if not early or may_become(shown, exact) else False
    if not is_right(shown, exact) and (early or rest.startswith(">>")):
        return False
    if not rest.startswith(">>"):
        return may if rest == ">" else False
    rest = rest[2:]
    said = NUMBER.match(rest)[0]
    if ended or len(said) < len(rest):
        return number(said) == number(shown)  # a full stop behind the number does no harm
    if early and not plain(shown).startswith(plain(said).removesuffix(".")) and number(said) != number(shown):
        return False
    return None


def compute(text: str) -> Fraction | None:
    """The exact value of a sum such as "2*(3+4.5)"; None for anything else and for a division by zero."""

    def value(node: ast.expr) -> Fraction:
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            return Fraction(ast.get_source_segment(text, node))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
            return value(node.operand) * (-1 if isinstance(node.op, ast.USub) else 1)
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        raise ValueError

    text = text.strip().replace(",", "")
    try:
        return value(ast.parse(text, mode="eval").body) if SUM.fullmatch(text) else None
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def plain(shown: str) -> str:
    """Without commas, and .5 as 0.5."""
    digits = shown.replace(",", "")
    return digits.replace(".", "0.", 1) if digits.removeprefix("-").startswith(".") else digits


def number(shown: str) -> Fraction | None:
    """The value of digits as they are written, "1,200.50" or "24."; None if there are none, and for 024 and -0."""
    digits = plain(shown).removesuffix(".")
    if not digits.strip("-.") or re.match(r"-?0\d|-[0.]*$", digits):
        return None
    return Fraction(digits)


def is_right(shown: str, exact: Fraction) -> bool:
    """Whole numbers must be exact; one with decimals may be rounded in its last place: 10/3 is 3.33, but not 3."""
    value, (_, _, decimals) = number(shown), shown.partition(".")
    if shown.startswith("-") != (exact < 0):
        return False
    return value is not None and abs(value - exact) <= (Fraction(1, 2 * 10 ** len(decimals)) if decimals else 0)


def may_become(shown: str, exact: Fraction) -> bool:
    """Whether more digits can make `shown` right. Decimals have the benefit of the doubt until they are complete."""
    digits = shown.replace(",", "")
    if digits.startswith("-") != (exact < 0) and digits:
        return False
    digits = digits.removeprefix("-")
    whole = math.floor(abs(exact))
    wholes = [whole] if exact.denominator == 1 else [whole, whole + 1]  # 6.996 may be written as 7.00
    before, dot, _ = digits.partition(".")
    if dot:
        return before in map(str, wholes) or (not before and whole == 0)
    return any(str(each).startswith(before) for each in wholes)
