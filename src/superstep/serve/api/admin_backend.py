"""Admin: the operator's view of an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from superstep.errors import SuperstepError
from superstep.serve.api.backend import BackendAway
from superstep.serve.files.reader import TIMEOUT_S
from superstep.serve.scheduling.engine_messages import Command, EngineStatus, Pause, Resume


class SteeredEngine(Protocol):
    """An engine that takes commands, seen from the event loop."""

    @property
    def standing(self) -> EngineStatus:
        """Its status."""
        ...

    async def do(self, command: Command) -> EngineStatus:
        """Do something; returns the status after it.

        Raises:
            ConfigError, StateError: it cannot be done; nothing has changed.
            Away: the engine is not there, or was lost on the way.
        """
        ...


class OneOfSeveral(SteeredEngine, Protocol):
    """An engine that can undo commands."""

    @property
    def is_there(self) -> bool:
        """Whether it takes commands now."""
        ...

    def back(self, command: Command) -> Sequence[Command]:
        """The commands that restore its present status after this one."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Admin:
    """What the paths under /admin need.

    Attributes:
        folders: that weights may be read from.
        timeout_s: how long resolving a path may take.
    """

    key: str
    folders: Sequence[Path]
    engine: SteeredEngine
    timeout_s: float = TIMEOUT_S


class EngineGroup:
    """Several engines of one model as one: a command is done by all of them or by none."""

    def __init__(self, engines: Sequence[OneOfSeveral]) -> None:
        self._engines = engines
        self._turn = asyncio.Lock()

    @property
    def standing(self) -> EngineStatus:
        """The status of the first that does not serve, else of the first; with the adapters that all have."""
        every = [engine.standing for engine in self._engines]
        shown = next((one for one in every if one.state != "serving"), every[0])
        shared = tuple(one for one in shown.adapters if all(one in other.adapters for other in every))
        return msgspec.structs.replace(shown, adapters=shared)

    async def do(self, command: Command) -> EngineStatus:
        """Do something on all engines; see ``SteeredEngine``. Where one cannot, the others undo it.

        Commands run one after the other. Only pauses may come at any time: a running command may wait for their end.
        """
        async with nullcontext() if isinstance(command, Pause | Resume) else self._turn:
            for number, engine in enumerate(self._engines):
                if not engine.is_there:
                    raise BackendAway(f"{self._name(number)} is not there, and nothing was changed; ask again.")
            ways_back = [engine.back(command) for engine in self._engines]
            results = await asyncio.gather(*(engine.do(command) for engine in self._engines), return_exceptions=True)
            failed = {number: one for number, one in enumerate(results) if isinstance(one, BaseException)}
            if not failed:
                return self.standing
            done = [number for number in range(len(results)) if number not in failed]
            answers = await asyncio.gather(*(self._go_back(number, ways_back[number]) for number in done))
            raise self._failure(failed, [one for one in answers if one])

    async def _go_back(self, number: int, commands: Sequence[Command]) -> str:
        """Undo one engine's command; returns why it could not."""
        try:
            for command in commands:
                await self._engines[number].do(command)
        except SuperstepError as error:
            return f"replica {number} could not go back: {error}"
        return ""

    def _failure(self, failed: dict[int, BaseException], stuck: Sequence[str]) -> BaseException:
        """The first failure, with its replica where others succeeded."""
        number, error = next(iter(failed.items()))
        if len(failed) == len(self._engines) or not isinstance(error, SuperstepError):
            return error
        others = "; ".join(stuck) or "the others stay as they were"
        return type(error)(f"{error} ({self._name(number)}; {others})")

    def _name(self, number: int) -> str:
        return f"replica {number} of {len(self._engines)}"
