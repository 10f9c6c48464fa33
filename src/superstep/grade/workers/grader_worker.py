"""The process of an environment: ``python -P -m superstep.grade.workers.grader_worker``; one JSON line in, one out.

    {"path", "config", "sandbox_fault"}   first: the file, the limits of a grade where grades are requested, and why
                                          programs cannot be run; empty if they can
    {"index", "seed", "turns", "finish"}  the verdict of a rollout
    {"do": "task", ...}                   the task's messages
    {"do": "reply", ...}                  the environment's reply to these turns
    {"do": "compare", ...}                whether the task is the same when it is made again

The functions of the user's file may hang or end their process. So they run here, and the parent kills this process when
a call exceeds its deadline.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from typing import IO, Any

from superstep.errors import ConfigError, SuperstepError
from superstep.grade.config import GradeConfig
from superstep.grade.environment import Environment, describe_error, load_environment
from superstep.grade.graders.check import Check, Tools
from superstep.grade.graders.maths_process import MathsProcess
from superstep.grade.sandbox.sandbox import MissingSandbox, SandboxMissingError, open_sandbox
from superstep.grade.task import Done, Message, Rollout, Task
from superstep.grade.verdict import Verdict, grader_error, verdict_of
from superstep.launch.line_process import NUMBER

PR_SET_PDEATHSIG = 1

TASKS = 1024
"""The number of tasks in the cache, so that a task is not made again for each of its turns."""


def decide(environment: Environment, task: Task, rollout: Rollout, tools: Tools) -> Verdict:
    """The verdict of the environment's grader. An exception of the grader is a grader_error.

    Raises:
        SandboxMissingError: the grader runs a program, and there is no sandbox.
    """
    try:
        verdict = environment.judge(task, rollout)
        if isinstance(verdict, Check) and not isinstance(verdict, Verdict):
            verdict = verdict.verdict(tools)
        return verdict_of(verdict)
    except SandboxMissingError:
        raise
    except SuperstepError as error:
        return grader_error(str(error))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's own code
        return grader_error(f"grade() fails: {describe_error(error)}")


def main() -> None:
    """Answer requests until the input ends."""
    _die_with_parent()
    given, out = sys.stdin, os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a grader prints is no answer
    start = json.loads(given.readline())
    try:
        desk = _Desk(load_environment(start["path"]), None if start["config"] is None else _tools(start))
    except ConfigError as error:
        _put(out, start, {"refused": str(error)})
        return
    _put(out, start, {"replies": desk.environment.answer is not None})
    for line in given:
        request = json.loads(line)
        try:
            reply = desk.answer(request)
        except ConfigError as error:
            reply = {"refused": str(error)}
        _put(out, request, reply)


def _tools(start: dict[str, Any]) -> Tools:
    config, fault = GradeConfig(**start["config"]), start["sandbox_fault"]
    sandbox = MissingSandbox(fault) if fault else open_sandbox(config, probe=False, adopts=True)
    return Tools(config, sandbox, MathsProcess(config.timeout_s))


class _Desk:
    def __init__(self, environment: Environment, tools: Tools | None) -> None:
        self.environment = environment
        self._tools = tools
        self._task = lru_cache(TASKS)(environment.task)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer one request. Raises ConfigError where the file has no such task, or its ``reply`` fails."""
        index, seed = request["index"], request["seed"]
        match request.get("do", "grade"):
            case "task":
                return {"prompt": _write_messages(self._task(index, seed).messages)}
            case "compare":
                return {"same": self.environment.task(index, seed) == self.environment.task(index, seed)}
            case "reply":
                messages = self.environment.reply(self._task(index, seed), _read_messages(request["turns"]))
                return {"said": None if isinstance(messages, Done) else _write_messages(messages.messages)}
            case _:
                assert self._tools is not None, "this process was begun to grade"
                rollout = Rollout(_read_messages(request["turns"]), request["finish"])
                # Made anew: a grader may change what is inside of a task.
                return decide(self.environment, self.environment.task(index, seed), rollout, self._tools).to_json()


def _write_messages(messages: Sequence[Message]) -> list[list[str]]:
    return [[message.role, message.content] for message in messages]


def _read_messages(raw: Sequence[Sequence[Any]]) -> tuple[Message, ...]:
    return tuple(Message(role, content) for role, content in raw)


def _put(out: IO[str], request: dict[str, Any], reply: dict[str, Any]) -> None:
    out.write(json.dumps(reply | {NUMBER: request[NUMBER]}) + "\n")
    out.flush()


def _die_with_parent() -> None:
    """Let the kernel end this process when its parent thread ends, even while it is busy."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


if __name__ == "__main__":
    with suppress(BrokenPipeError):  # the pool is gone, and nobody reads the answer
        main()
