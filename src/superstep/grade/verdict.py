"""Verdict: the grade of an answer, as one frozen value.

ok(score)       the answer earns a score above 0, at most 1
wrong           the answer was judged, and earns nothing
timeout         the candidate's program, or reading its answer, took too long
memory          the program took too much memory
violation       the program did what the sandbox forbids
grader_error    the grader failed, so the answer is graded again; never a reward
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Kind = Literal["ok", "wrong", "timeout", "memory", "violation", "grader_error"]

WHY_CHARS = 400
"""The longest reason of a verdict. Part of it may be the candidate's words."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The grade of an answer.

    Attributes:
        score: above 0 and at most 1 where the kind is ok, else 0.
        why: a line for people; programs do not read it.
        graded_s: start and end of the grade, in seconds since 1970; no part of the decision.
    """

    kind: Kind
    score: float = 0.0
    why: str = ""
    graded_s: tuple[float, float] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        assert self.kind in get_args(Kind), self.kind
        assert type(self.score) is float, self.score
        assert math.isfinite(self.score)
        assert 0.0 < self.score <= 1.0 if self.kind == "ok" else self.score == 0.0, (self.kind, self.score)

    @property
    def is_decided(self) -> bool:
        """Whether it judges the answer: false for a grader_error."""
        return self.kind != "grader_error"

    @property
    def reward(self) -> float:
        """The score, for training; a grader_error has none, so callers check ``is_decided`` first."""
        assert self.is_decided, f"a grader_error is no reward: {self.why}"
        return self.score

    def to_json(self) -> dict[str, Any]:
        """As JSON. The score of a grader_error is null, so that nobody takes it for a number."""
        return {"verdict": self.kind, "score": self.score if self.is_decided else None, "why": self.why}


def ok(score: float = 1.0, why: str = "") -> Verdict:
    return Verdict("ok", float(score), line(why))


def wrong(why: str = "") -> Verdict:
    return Verdict("wrong", 0.0, line(why))


def timeout(why: str = "") -> Verdict:
    return Verdict("timeout", 0.0, line(why))


def memory(why: str = "") -> Verdict:
    return Verdict("memory", 0.0, line(why))


def violation(why: str = "") -> Verdict:
    return Verdict("violation", 0.0, line(why))


def grader_error(why: str) -> Verdict:
    return Verdict("grader_error", 0.0, line(why))


def verdict_of(value: object) -> Verdict:
    """The verdict for a grader's plain value: a Verdict, True or False, or a number from 0 to 1.

    Any other value is a grader_error: a NaN compares false with every bound, and would be the best reward of all.
    """
    if type(value) is Verdict:
        return value
    if type(value) not in (bool, int, float):
        return grader_error(f"grade() gave {type(value).__name__}; give a Verdict, a Check, True, False or a number")
    assert isinstance(value, bool | int | float)
    if not 0 <= value <= 1:  # which is so of a NaN, too
        shown = repr(value) if isinstance(value, float) else "a whole number"
        return grader_error(f"grade() gave {shown}; a score is from 0 to 1")
    return ok(float(value)) if value > 0 else wrong()


def verdict_from_json(raw: dict[str, Any]) -> Verdict:
    """Read what ``to_json`` wrote."""
    return Verdict(raw["verdict"], float(raw["score"] or 0.0), str(raw["why"]))


def line(text: str) -> str:
    """A candidate's words, or an error's, as one short line without control characters."""
    shown = "".join(c if c.isprintable() else " " for c in text[: 4 * WHY_CHARS])
    shown = " ".join(shown.split())
    return shown if len(shown) <= WHY_CHARS else shown[:WHY_CHARS] + "..."
