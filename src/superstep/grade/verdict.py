"""Verdict: what is decided of an answer, as one frozen value.

ok(score)       the answer earns a score above 0, at most 1
wrong           it was judged, and earns nothing
timeout         the candidate's program, or what reads its answer, took too long
memory          it took too much memory
violation       it did what the sandbox forbids
grader_error    nobody knows: the grader failed, so the answer is graded again; never a reward
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Kind = Literal["ok", "wrong", "timeout", "memory", "violation", "grader_error"]

WHY_CHARS = 400
"""The most that is said of a verdict. Part of it may be the candidate's words."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is decided of an answer.

    Attributes:
        kind: the decision.
        score: above 0 and at most 1 where it is ok, else 0.
        why: a line for people. Programs do not read it.
        graded_s: when a grader took it up, and when it was done, in seconds since 1970. It is no part of the decision.
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
        """Whether it says something of the answer, and not only of the grader."""
        return self.kind != "grader_error"

    @property
    def reward(self) -> float:
        """The score, for training. Who has no decision has no reward either, and must look before."""
        assert self.is_decided, f"a grader_error is no reward: {self.why}"
        return self.score

    def told(self) -> dict[str, Any]:
        """As JSON has it. The score of a grader_error is null, so that nobody takes it for a number."""
        return {"verdict": self.kind, "score": self.score if self.is_decided else None, "why": self.why}


def ok(score: float = 1.0, why: str = "") -> Verdict:
    """The answer earns a score."""
    return Verdict("ok", float(score), line(why))


def wrong(why: str = "") -> Verdict:
    """The answer earns nothing."""
    return Verdict("wrong", 0.0, line(why))


def timeout(why: str = "") -> Verdict:
    """It took too long."""
    return Verdict("timeout", 0.0, line(why))


def memory(why: str = "") -> Verdict:
    """It took too much memory."""
    return Verdict("memory", 0.0, line(why))


def violation(why: str = "") -> Verdict:
    """It did what the sandbox forbids."""
    return Verdict("violation", 0.0, line(why))


def grader_error(why: str) -> Verdict:
    """The grader failed; nothing is known of the answer."""
    return Verdict("grader_error", 0.0, line(why))


def verdict_of(value: object) -> Verdict:
    """The verdict that a grader's plain value means: a Verdict, True or False, or a number from 0 to 1.

    Anything else is the grader's mistake: a NaN compares false with every bound, and would be the best reward of all.
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


def from_told(raw: dict[str, Any]) -> Verdict:
    """The verdict that ``raw`` wrote."""
    return Verdict(raw["verdict"], float(raw["score"] or 0.0), str(raw["why"]))


def line(text: str) -> str:
    """A candidate's words, or an error's, as one short line that harms no terminal."""
    shown = "".join(c if c.isprintable() else " " for c in text[: 4 * WHY_CHARS])
    shown = " ".join(shown.split())
    return shown if len(shown) <= WHY_CHARS else shown[:WHY_CHARS] + "..."
