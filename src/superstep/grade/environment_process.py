"""An environment whose functions run in a process of their own, each call before a deadline.

Who samples answers asks the user's file for tasks and for replies to turns. A function that hangs there would keep
every rank waiting, and one that ends its process would end a rank. So the file runs apart, and is ended where it is
late. A call that takes its time and comes back is none of that. A process that ends, as the kernel may end it for its
memory, is started again and asked again. Turns that end it each time are a violation, if the task alone does not end
it, as answers are in ``grade.pool``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from superstep.errors import ConfigError, Fault
from superstep.grade.pool import COMMAND, START_S, makes_task
from superstep.grade.task import Done, Message, Observation, Task
from superstep.launch.line_process import LineProcess, unanswered

RESTARTS = 2
"""How often the process is started again for one question."""


class EndedError(Fault):
    """The process ended while it was asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedTask(Task):
    """A task as who samples has it: its messages, and the numbers by which its environment finds the rest."""

    index: int
    seed: int


class EnvironmentProcess:
    """The tasks and the replies of an environment's file. One thread at a time may ask.

    Args:
        source: the file.
        seconds: how long a call of its functions may take.
        setting: the field that says so.
    """

    def __init__(self, source: str | Path, seconds: float, setting: str = "rollout.reply_timeout_s") -> None:
        self.path = Path(source)
        self._seconds = seconds
        self._setting = setting
        self._process = LineProcess(COMMAND, is_heard=True)  # which begins to import beside what follows here
        self._has_replies: bool | None = None

    def open(self) -> None:
        """See that the file can be loaded.

        Raises:
            ConfigError: it cannot.
            Fault: the process does not start.
        """
        if self._has_replies is None:
            reply = self._request({"path": str(self.path), "config": None}, START_S, "it cannot be loaded")
            self._has_replies = reply["replies"]

    def task(self, index: int, seed: int) -> Task:
        """The task of these numbers.

        Raises:
            ConfigError: the file has none.
            Fault: it is late, or its process has ended each time that it was asked.
        """
        reply = self._call({"do": "task", "index": index, "seed": seed}, f"task({index}, {seed})")
        return AskedTask(prompt=_messages(reply["prompt"]), index=index, seed=seed)

    def is_pure(self, index: int, seed: int) -> bool:
        """Whether the same numbers give the same task again; raises as ``task`` does."""
        request = {"do": "compare", "index": index, "seed": seed}
        return self._call(request, f"task({index}, {seed})")["same"] is True

    def reply(self, task: Task, turns: Sequence[Message]) -> Observation | Done:
        """What the environment says to the last turn of a task that it gave; raises as ``task`` does."""
        assert isinstance(task, AskedTask), "the task is one of this process"
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
        except EndedError:
            self._restart()  # with no turns
            if not makes_task(self._process, task.index, task.seed, self._seconds):
                self._process.kill()  # it may be there still, and would answer the next question no more
                raise
            return Done(f"{what}: its process ended {RESTARTS + 1} times, and not without this answer")
        return Done() if messages is None else Observation(_messages(messages))

    def close(self) -> None:
        """Ends the process and what it started."""
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
            except EndedError:
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
            why = unanswered(self._process, seconds)
            mend = f"; make it faster, or set {self._setting} higher" if self._process.was_late else ""
            self._process.kill()
            raise (EndedError if self._process.has_ended else Fault)(f"{self.path}: {what}: {why}{mend}.")
        if "refused" in reply:
            raise ConfigError(reply["refused"])
        return reply


def _messages(raw: Sequence[Sequence[Any]]) -> tuple[Message, ...]:
    return tuple(Message(role, content) for role, content in raw)
