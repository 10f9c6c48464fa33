"""Check: a grader's request as a value; the worker runs it with the tools that it has.

    def grade(task, rollout):
        return CodeTests(rollout.answer, tests=task.data["tests"])

So ``grade`` stays a pure function of its arguments, and time, memory and the sandbox are set in one place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from superstep.grade.config import GradeConfig
from superstep.grade.graders.maths_process import MathsProcess
from superstep.grade.sandbox.sandbox import Sandbox
from superstep.grade.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of a check: limits, a sandbox for programs, a process that reads formulas."""

    config: GradeConfig
    sandbox: Sandbox
    maths: MathsProcess


@runtime_checkable
class Check(Protocol):
    """A request that the worker can decide."""

    def verdict(self, tools: Tools) -> Verdict:
        """Decide. Any exception means that the check itself failed: a grader_error."""
        ...
