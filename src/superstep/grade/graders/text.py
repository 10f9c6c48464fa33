"""Answers that are compared as texts and as numbers."""

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
"""One number and nothing else: 12, -3.5, 1,200, 6e-3, 3/4. Digits are ASCII: others are taken for a disguise."""

NUMBER_CHARS = 200


@dataclass(frozen=True, slots=True)
class Exact:
    """The final answer is this text, but for white space around it.

    Attributes:
        answer: the model's.
        expected: the text; it is not empty.
        whole: whether the answer is nothing but the text, without a mark or a box before it.
        casefold: whether upper and lower case are the same.
    """

    answer: str
    expected: str
    whole: bool = False
    casefold: bool = False

    def verdict(self, tools: Tools) -> Verdict:
        """See ``Check``."""
        if not self.expected.strip():
            raise ValueError("Exact expects an empty text, which every model can say")
        given, expected = self.answer if self.whole else final(self.answer), self.expected
        if self.casefold:
            given, expected = given.casefold(), expected.casefold()
        return ok() if given.strip() == expected.strip() else wrong(f"{given!r} is not what is expected")


@dataclass(frozen=True, slots=True)
class Number:
    """The final answer is this number, and one number alone.

    Attributes:
        answer: the model's.
        expected: the number, or one as a text, which is read without rounding.
        tolerance: how far the answer may be from it.
    """

    answer: str
    expected: float | str
    tolerance: float = 0.0

    def verdict(self, tools: Tools) -> Verdict:
        """See ``Check``."""
        expected = number(str(self.expected))
        if expected is None:
            raise ValueError(f"Number expects {self.expected!r}, which is no number")
        given = number(final(self.answer))
        if given is None:
            return wrong("the final answer is not one number")
        return ok() if abs(given - expected) <= Fraction(self.tolerance) else wrong(f"{self.answer[-80:]!r} is another")


def number(text: str) -> Fraction | None:
    """The number that a text is, exactly; None where it is none."""
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
