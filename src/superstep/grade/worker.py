"""A grader's process: run as ``python -P -m superstep.grade.worker``, one JSON line in, one out.

The functions of an environment's file are the user's, and may hang or end whatever they run in. So they run here, and
the pool kills this process when it is late. The first line is ``{"path", "config"}``, each later one a rollout.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from contextlib import suppress
from typing import IO, Any

from superstep.errors import ConfigError, SuperstepError
from superstep.grade.config import GradeConfig
from superstep.grade.environment import Environment, load_environment, told
from superstep.grade.graders.check import Check, Tools
from superstep.grade.graders.maths_process import MathsProcess
from superstep.grade.lines import NUMBER
from superstep.grade.sandbox.room import open_sandbox
from superstep.grade.task import Message, Rollout, Task
from superstep.grade.verdict import Verdict, grader_error, scored

PR_SET_PDEATHSIG = 1


def decide(environment: Environment, task: Task, rollout: Rollout, tools: Tools) -> Verdict:
    """What the environment's grader says of a rollout. What it raises is a grader_error."""
    try:
        found = environment.judge(task, rollout)
        if isinstance(found, Check) and not isinstance(found, Verdict):
            found = found.verdict(tools)
        return scored(found)
    except SuperstepError as error:
        return grader_error(str(error))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's own code
        return grader_error(f"grade() fails: {told(error)}")


def main() -> None:
    """Grades until its input ends."""
    _die_with_parent()
    given, out = sys.stdin, os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a grader prints is no answer
    start = json.loads(given.readline())
    try:
        config = GradeConfig(**start["config"])
        environment = load_environment(start["path"])
        tools = Tools(config, open_sandbox(config, probe=False), MathsProcess(config.timeout_s))
    except ConfigError as error:
        _put(out, start, {"refused": str(error)})
        return
    _put(out, start, {})
    for line in given:
        asked = json.loads(line)
        _put(out, asked, _answer(environment, asked, tools))


def _answer(environment: Environment, asked: dict[str, Any], tools: Tools) -> dict[str, Any]:
    try:
        task = environment.task(asked["index"], asked["seed"])
    except ConfigError as error:
        return {"refused": str(error)}
    rollout = Rollout(tuple(Message(role, content) for role, content in asked["turns"]), asked["finish"])
    return decide(environment, task, rollout, tools).told()


def _put(out: IO[str], asked: dict[str, Any], told: dict[str, Any]) -> None:
    out.write(json.dumps(told | {NUMBER: asked[NUMBER]}) + "\n")
    out.flush()


def _die_with_parent() -> None:
    """The kernel ends this process with the thread that started it, whatever it is busy with."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


if __name__ == "__main__":
    with suppress(BrokenPipeError):  # the pool is gone, and nobody reads the answer
        main()
