"""Grades formulas by their meaning, not by how they are written."""

from __future__ import annotations

from dataclasses import dataclass

from superstep.grade.graders.check import Tools
from superstep.grade.graders.final_answer import final
from superstep.grade.verdict import Verdict, memory, ok, timeout, wrong

MOST_CHARS = 2000


@dataclass(frozen=True, slots=True)
class Maths:
    """The final answer means the same as this formula. ``expected``: LaTeX, without dollars."""

    answer: str
    expected: str

    def verdict(self, tools: Tools) -> Verdict:
        given = final(self.answer).strip("$ \n")
        if not given or len(given) > MOST_CHARS:
            return wrong(f"the final answer is empty or longer than {MOST_CHARS} characters")
        match tools.maths.compare(self.expected, given):
            case "same":
                return ok()
            case "other":
                return wrong(f"{given[-80:]!r} means something else")
            case "timeout":
                return timeout("its formula takes too long to read")
            case "memory":
                return memory("its formula takes too much memory to read")
