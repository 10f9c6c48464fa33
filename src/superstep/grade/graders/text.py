"""Grades texts and numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from superstep.grade.graders.check import Tools
from superstep.grade.graders.final_answer import final
from superstep.grade.verdict import Verdict, ok, wrong

NUMBER = re.compile(
    r"[$]?([+-]?)[$]?((?:\d{1,3}(?:,\d{3})+|\d{1,60})(?:\.\d{0,60})?|\.\d{1,60})"
    r"(?:[eE]([+-]?\d{1,2}))?(?:/(\d{1,60}))?[$]?\.?",
    re.ASCII,
)
"""One number and nothing else: 12, -3.5, 1,200, 6e-3, 3/4. Only ASCII digits count."""

NUMBER_CHARS = 200


@dataclass(frozen=True, slots=True)
class Exact:
    """The final answer is this text; white space around it is ignored.

    Attributes:
        whole: whether the answer must be only the text, without a mark or a box before it.
        casefold: whether case is ignored.
    """

    answer: str
    expected: str
    whole: bool = False
    casefold: bool = False

    def verdict(self, tools: Tools) -> Verdict:
        if not self.expected.strip():
            raise ValueError("Exact expects an empty text, which every model can say")
        given, expected = self.answer if self.whole else final(self.answer), self.expected
        if self.casefold:
            given, expected = given.casefold(), expected.casefold()
        return ok() if given.strip() == expected.strip() else wrong(f"{given!r} is not what is expected")


@dataclass(frozen=True, slots=True)
class Number:
    """The final answer is this number, and no other.

    Attributes:
        expected: a text is read without rounding.
        tolerance: the largest absolute difference.
    """

    answer: str
    expected: float | str
    tolerance: float = 0.0

    def verdict(self, tools: Tools) -> Verdict:
        expected = number(str(self.expected))
        if expected is None:
            raise ValueError(f"Number expects {self.expected!r}, which is not a number")
        given = number(final(self.answer))
        if given is None:
            return wrong("the final answer is not one number")
        return ok() if abs(given - expected) <= Fraction(self.tolerance) else wrong(f"{self.answer[-80:]!r} is another")


def number(text: str) -> Fraction | None:
    """The exact value of a number's text; None for any other text."""
    match = NUMBER.fullmatch(text.strip()) if len(text) <= NUMBER_CHARS else None
    if match is None:
        return None
    sign, digits, power, below = match.groups()
    value = Fraction(digits.replace(",", "").removesuffix(".")) * Fraction(10) ** int(power or 0)
    if below is not None:
        if int(below) == 0:
            return None
        value /= int(below)
    return -value if sign == "-" else value
