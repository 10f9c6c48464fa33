"""Check: what a grader asks for, as a value; the worker carries it out with the tools that it was given.

    def grade(task, rollout):
        return CodeTests(rollout.answer, tests=task.data["tests"])

So ``grade`` stays a plain function of its arguments, and time, memory and the sandbox are set in one place.
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
    """What checks are carried out with.

    Attributes:
        config: what they may take.
        sandbox: for candidates' programs.
        maths: a process that reads formulas.
    """

    config: GradeConfig
    sandbox: Sandbox
    maths: MathsProcess


@runtime_checkable
class Check(Protocol):
    """Something that can be decided."""

    def verdict(self, tools: Tools) -> Verdict:
        """The decision.

        Raises:
            Exception: the check itself failed, whatever it was: a grader_error.
        """
        ...
