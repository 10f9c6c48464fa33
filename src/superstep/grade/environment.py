"""Environment: the tasks of a user's own Python file.

    task(index, seed) -> Task                     pure: the same numbers give the same task on every machine
    grade(task, rollout) -> Verdict | Check | number
    reply(task, turns) -> Observation | Done      optional; without it a rollout has one turn

The file is loaded as a module of its own, like the file of ``model.source``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from superstep.errors import ConfigError
from superstep.grade.task import Done, Message, Observation, Rollout, Task
from superstep.grade.verdict import line
from superstep.plan.user_file import load_functions

NEEDED = {"task": "task(index, seed)", "grade": "grade(task, rollout)"}


class Tasks(Protocol):
    """What a rollout worker needs of an environment: ``Environment`` itself, or a process that runs it."""

    @property
    def path(self) -> Path:
        """The environment's file."""

    def task(self, index: int, seed: int) -> Task:
        """The task of these numbers."""

    def reply(self, task: Task, turns: Sequence[Message]) -> Observation | Done:
        """The environment's reply to the last turn."""


@dataclass(frozen=True, slots=True)
class Environment:
    path: Path
    make: Callable[[int, int], object]
    judge: Callable[[Task, Rollout], object]
    answer: Callable[[Task, Sequence[Message]], object] | None

    def task(self, index: int, seed: int) -> Task:
        """The task of these numbers. Raises ConfigError where the file's function fails or returns another type."""
        call = f"{self.path}: task({index}, {seed})"
        try:
            task = self.make(index, seed)
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"{call} fails: {describe_error(error)}; it must give a Task for every index from 0."
            ) from error
        if not isinstance(task, Task):
            raise ConfigError(f"{call} gives {type(task).__name__}; return a superstep.grade.task.Task.")
        if not isinstance(task.prompt, str) and not all(isinstance(each, Message) for each in task.prompt):
            raise ConfigError(f"{call} has a prompt that is neither a text nor a tuple of Message; give one of them.")
        if not task.prompt:
            raise ConfigError(f"{call} has an empty prompt; give what the model is to be told.")
        return task

    def reply(self, task: Task, turns: Sequence[Message]) -> Observation | Done:
        """The environment's reply to the last turn. Raises ConfigError where the file's function fails or returns
        another type.
        """
        if self.answer is None:
            return Done()
        try:
            reply = self.answer(task, turns)
        except (Exception, SystemExit) as error:
            raise ConfigError(f"{self.path}: reply(task, turns) fails: {describe_error(error)}.") from error
        if not isinstance(reply, Observation | Done):
            raise ConfigError(
                f"{self.path}: reply(task, turns) gives {type(reply).__name__}; return an Observation or Done()."
            )
        return reply


def load_environment(source: str | Path) -> Environment:
    """Load an environment from a Python file. Raises ConfigError where the file cannot be read or run, or lacks a
    function.
    """
    path, names = Path(source), load_functions(source, NEEDED, kind="tasks")
    reply = names.get("reply")
    if reply is not None and not callable(reply):
        raise ConfigError(f"{path}: reply is no function; write reply(task, turns), or leave it out.")
    return Environment(path=path, make=names["task"], judge=names["grade"], answer=reply)


def describe_error(error: BaseException) -> str:
    return line(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}").rstrip(": .")
