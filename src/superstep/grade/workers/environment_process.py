"""EnvironmentProcess: runs an environment's functions in a separate process, each call with a deadline.

A call of the user's file that hangs would block every rank, and one that exits would end a rank. So the file runs in a
process that is killed when a call exceeds its deadline. A process that ends during a call (the kernel may kill it for
its memory) is started again and the call is repeated. Turns that end it every time are a violation, unless the task
alone ends it; ``grade.workers.pool`` treats answers the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from superstep.errors import ConfigError, Fault
from superstep.grade.task import Done, Message, Observation, Task
from superstep.grade.workers.pool import COMMAND, START_S, makes_task
from superstep.launch.line_process import LineProcess, explain_no_answer

RESTARTS = 2
"""How often the process is restarted for one call."""


class ProcessEndedError(Fault):
    """The process ended during a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutTask(Task):
    """A task as the rollout worker has it: messages only, with the numbers by which the environment makes it again."""

    index: int
    seed: int


class EnvironmentProcess:
    """Tasks and replies of an environment's file. Only one thread at a time may call it.

    Args:
        seconds: the deadline of each call.
        setting: the field that sets the deadline, for error messages.
    """

    def __init__(self, source: str | Path, seconds: float, setting: str = "rollout.reply_timeout_s") -> None:
        self.path = Path(source)
        self._seconds = seconds
        self._setting = setting
        self._process = LineProcess(COMMAND, is_heard=True)  # which begins to import beside what follows here
        self._has_replies: bool | None = None

    def open(self) -> None:
        """Start the process and load the file.

        Raises:
            ConfigError: the file cannot be loaded.
            Fault: the process does not start.
        """
        if self._has_replies is None:
            reply = self._request({"path": str(self.path), "config": None}, START_S, "it cannot be loaded")
            self._has_replies = reply["replies"]

    def task(self, index: int, seed: int) -> Task:
        """The task of these numbers.

        Raises:
            ConfigError: the file has no such task.
            Fault: the call exceeded its deadline, or the process ended at each attempt.
        """
        reply = self._call({"do": "task", "index": index, "seed": seed}, f"task({index}, {seed})")
        return RolloutTask(prompt=_messages(reply["prompt"]), index=index, seed=seed)

    def is_pure(self, index: int, seed: int) -> bool:
        """Whether the same numbers give the same task again; raises what ``task`` raises."""
        request = {"do": "compare", "index": index, "seed": seed}
        return self._call(request, f"task({index}, {seed})")["same"] is True

    def reply(self, task: Task, turns: Sequence[Message]) -> Observation | Done:
        """The environment's reply to the last turn of its task; raises what ``task`` raises."""
        assert isinstance(task, RolloutTask), "the task is one of this process"
        self.open()
        if not self._has_replies:
            return Done()
        nth = sum(turn.role == "assistant" for turn in turns)
        request = {
            "do": "reply",
            "index": task.index,
            "seed": task.seed,
            "turns": [[turn.role, turn.content] for turn in turns],
        }
        what = f"reply() to turn {nth} of task {task.index}"
        try:
            messages = self._call(request, what)["said"]
        except ProcessEndedError:
            self._restart()  # with no turns
            if not makes_task(self._process, task.index, task.seed, self._seconds):
                self._process.kill()  # it may be there still, and would answer the next question no more
                raise
            return Done(f"{what}: its process ended {RESTARTS + 1} times, and not without this answer")
        return Done() if messages is None else Observation(_messages(messages))

    def close(self) -> None:
        """End the process and all processes that it started."""
        self._process.end()

    def __enter__(self) -> EnvironmentProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, request: dict[str, Any], what: str) -> dict[str, Any]:
        self.open()
        for _ in range(RESTARTS):
            try:
                return self._request(request, self._seconds, what)
            except ProcessEndedError:
                self._restart()
        return self._request(request, self._seconds, f"{what}, asked {RESTARTS + 1} times")

    def _restart(self) -> None:
        self._process.end()
        self._process = LineProcess(COMMAND, is_heard=True)
        self._has_replies = None
        self.open()

    def _request(self, request: dict[str, Any], seconds: float, what: str) -> dict[str, Any]:
        reply = self._process.ask(request, seconds)
        if reply is None:
            why = explain_no_answer(self._process, seconds)
            mend = f"; make it faster, or set {self._setting} higher" if self._process.was_late else ""
            self._process.kill()
            raise (ProcessEndedError if self._process.has_ended else Fault)(f"{self.path}: {what}: {why}{mend}.")
        if "refused" in reply:
            raise ConfigError(reply["refused"])
        return reply


def _messages(raw: Sequence[Sequence[Any]]) -> tuple[Message, ...]:
    return tuple(Message(role, content) for role, content in raw)
