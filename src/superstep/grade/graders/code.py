"""Grades programs: they run on inputs in the sandbox, and their outputs are judged outside.

The expected outputs never enter the sandbox. So a program that knows all inputs, changes its interpreter or writes
records of its own can only produce wrong outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from superstep.grade.graders.check import Tools
from superstep.grade.graders.final_answer import last_fence
from superstep.grade.graders.literals import decode, same
from superstep.grade.sandbox.sandbox import FunctionCall, ProgramResult
from superstep.grade.verdict import Kind, Verdict, ok, wrong


@dataclass(frozen=True, slots=True)
class Case:
    """A call of the candidate's function, and its expected result."""

    name: str
    args: tuple[Any, ...]
    expected: object


@dataclass(frozen=True, slots=True)
class Run:
    """A standard input for the candidate's program, and its expected output. White space at line ends is ignored."""

    given: str
    expected: str


@dataclass(frozen=True, slots=True)
class CodeTests:
    """The answer is a program that passes tests.

    Attributes:
        answer: its last fenced block is the program, or the whole text.
        tests: all of one kind.
        partial: whether each test earns a share of the score; otherwise all must pass.
        tolerance: for numbers; see ``literals.same``.
    """

    answer: str
    tests: Sequence[Case] | Sequence[Run]
    partial: bool = False
    tolerance: float = 0.0

    def verdict(self, tools: Tools) -> Verdict:
        if not self.tests:
            raise ValueError("CodeTests has no test, so that every program passes")
        source = last_fence(self.answer)
        calls = [FunctionCall(test.name, tuple(test.args)) for test in self.tests if isinstance(test, Case)]
        given = [test.given for test in self.tests if isinstance(test, Run)]
        if calls and given:
            raise ValueError("CodeTests has tests of two kinds; make them two checks")
        answers = tools.sandbox.calls(source, calls) if calls else tools.sandbox.programs(source, given)
        return self._judge(answers)

    def _judge(self, answers: ProgramResult) -> Verdict:
        if answers.how != "done":
            kind: Kind = answers.how
            return Verdict(kind, 0.0, answers.why)
        if len(answers.records) > len(self.tests):
            return Verdict("violation", 0.0, "it wrote records of its own")
        tests: list[Case | Run] = list(self.tests)
        passed = sum(self._passes(test, result) for test, result in zip(tests, answers.records, strict=False))
        why = f"{passed} of {len(self.tests)} tests pass" + (f"; {answers.why}" if answers.why else "")
        if passed == len(self.tests):
            return ok(1.0, why)
        return ok(passed / len(self.tests), why) if self.partial and passed else wrong(why)

    def _passes(self, test: Case | Run, result: dict[str, Any]) -> bool:
        if isinstance(test, Run):
            output = result.get("output")
            return result.get("status") == 0 and isinstance(output, str) and _lines(output) == _lines(test.expected)
        try:
            return "value" in result and same(test.expected, decode(result["value"]), self.tolerance)
        except (ValueError, RecursionError):
            return False


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip("\n").split("\n")]
