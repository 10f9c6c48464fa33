"""The controller of an engine: commands between steps, on rank 0. New weights, pauses, sleep.

    Change ──► read beside, while steps run ──► switch ──► Done
    Pause  ──► hold: none, or those that came before, are computed ──► Resume
    Sleep  ──► pages and weights given back ──► Wake ──► read ──► serve ──► Done

Pauses begin and end at once. Commands that free or allocate memory run one after the other, in the order of arrival. A
command that fails changes nothing.

A command to change weights says what happens to running requests:

    recompute   they are preempted and start again with their tokens: every token that is reported under a version
                is computed by these weights from the tokens before it
    keep        they keep their keys, which costs nothing; the keys are of the old weights and leave the prefix cache
    wait        they are finished first; new requests wait
    abort       they are aborted
"""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import Literal

from superstep.errors import ConfigError, UserError
from superstep.serve.compute.runner.model_runner import ModelRunner
from superstep.serve.compute.runner.rank_commands import Tensors
from superstep.serve.engine import InferenceEngine
from superstep.serve.scheduling import engine_messages as messages
from superstep.serve.scheduling.engine_messages import Command, EngineStatus

ADAPTER_S = 0.02
"""How long a step waits for an adapter: most are read by then."""

REST_S = 0.05
"""Longest single wait for a file while there is nothing to compute."""


class EngineController:
    """Runs commands between steps; the engine's thread calls it.

    Args:
        engine: under control.
        model: of the engine.
    """

    def __init__(self, engine: InferenceEngine, model: ModelRunner) -> None:
        self._engine = engine
        self.model = model
        self._line: deque[tuple[int, messages.ChangeWeights | messages.Sleep | messages.Wake]] = deque()
        self._adapter_line: deque[tuple[int, messages.LoadAdapter | messages.UnloadAdapter]] = deque()
        self._done: list[messages.CommandDone] = []
        self._paused: messages.Pause | None = None
        self._barriers: dict[Literal["pause", "change"], int] = {}
        self._draining: int | None = None
        self._is_asleep = False
        self._path = str(model.party.path)
        self._changes = 0

    @property
    def standing(self) -> EngineStatus:
        """The engine's state."""
        state: Literal["serving", "paused", "closed", "asleep"] = "serving"
        if self._is_asleep:
            state = "asleep"
        elif self._paused is not None:
            state = "closed" if self._paused.mode == "abort" else "paused"
        return EngineStatus(
            state=state,
            version=self._engine.info.version,
            path=self._path,
            changes=self._changes,
            adapters=self._engine.adapters.all,
        )

    @property
    def is_busy(self) -> bool:
        """Whether ``tick`` has something to do, or to wait for."""
        return bool(self._line or self._adapter_line or self._done or self._draining is not None)

    def ask(self, number: int, command: Command) -> None:
        """Accept a command; ``tick`` reports its end."""
        match command:
            case messages.Pause():
                self._pause(number, command)
            case messages.Resume():
                self._resume(number)
            case messages.LoadAdapter() | messages.UnloadAdapter():
                self._adapter_line.append((number, command))
            case _:
                self._line.append((number, command))

    def tick(self) -> list[messages.CommandDone]:
        """Run what is possible before the next step; the commands that have ended since the last call."""
        if self._draining is not None and not self._engine.has_before(self._barriers["pause"]):
            self._say(self._draining)
            self._draining = None
        while self._adapter_line and self._try_adapter(*self._adapter_line[0]):
            self._adapter_line.popleft()
        while self._line and self._try(*self._line[0]):
            self._line.popleft()
        done, self._done = self._done, []
        return done

    def rest(self) -> None:
        """Wait a moment for a file. Call it while nothing can be computed."""
        reading = self.model.party.reading
        if reading is not None and not reading.is_over:
            reading.reader.wait(REST_S)
        elif self.is_busy:
            time.sleep(REST_S)

    # For direct callers.

    def swap(self, source: Path | Tensors, *, requests: Literal["recompute", "keep", "abort"] = "recompute") -> str:
        """Change the weights at once: the next step computes with them. Returns their version.

        Args:
            source: a snapshot's folder, another folder of weights, or whole tensors by global name.
            requests: treatment of running requests.

        Raises:
            StateError: they cannot be served; those in place stay.
            ConfigError: the engine sleeps without weights, or tensors are given for several ranks.
        """
        self._require_weights()
        self.model.read(source)
        while not self.model.is_read():
            self.rest()
        self._switch(source, requests)
        return self._engine.info.version

    def sleep(self, *, keeps_weights: bool = False) -> None:
        """Free the memory of the KV cache, and of the weights unless ``keeps_weights``. Running requests start again
        after ``wake``.

        Raises:
            ConfigError: it sleeps already.
        """
        if self._is_asleep:
            raise ConfigError("sleep: the engine is asleep already; wake it first.")
        self._engine.begin_again()
        self._engine.pages.forget_all()
        self.model.sleep(keeps_weights=keeps_weights)
        self._is_asleep = True
        self._hold()

    def wake(self, source: Path | Tensors | None = None, *, version: str = "") -> str:
        """Allocate memory again, with other weights if given. Returns their version.

        Args:
            source: as in ``swap``; None uses the earlier ones.
            version: of the weights, if known; otherwise all of them are read to compute it.

        Raises:
            StateError: they cannot be served; it stays asleep.
            ConfigError: it does not sleep.
        """
        self._read_to_wake(source, is_named=not version)
        while not self._may_wake():
            self.rest()
        self._wake(source, version)
        return self._engine.info.version

    # One command at a time.

    def _try(self, number: int, command: messages.ChangeWeights | messages.Sleep | messages.Wake) -> bool:
        """Whether a command has ended."""
        try:
            match command:
                case messages.ChangeWeights(path, requests):
                    if not self._may_switch(command):
                        return False
                    self._switch(Path(path), requests)
                case messages.Sleep(keeps_weights):
                    self.sleep(keeps_weights=keeps_weights)
                case messages.Wake(path):
                    source = None if path is None else Path(path)
                    if self.model.party.reading is None:
                        self._read_to_wake(source)
                    if not self._may_wake():
                        return False
                    self._wake(source)
        except UserError as error:
            self._say(number, str(error))
        else:
            self._say(number)
        return True

    def _may_switch(self, command: messages.ChangeWeights) -> bool:
        """Whether the weights are read, and no request has to be waited for."""
        reading = self.model.party.reading
        if reading is None:
            self._require_weights()
            if command.requests == "wait" and self._paused is not None and self._paused.mode == "keep":
                raise ConfigError(
                    "requests = 'wait' while the engine is paused: those under way are not computed; resume first, or "
                    "use one of recompute, keep, abort."
                )
            self.model.read(Path(command.path))
            return False
        if not self.model.is_read():
            return False
        if command.requests == "wait" and not reading.why:
            before = self._barriers.setdefault("change", self._engine.arrivals)
            self._hold()
            return not self._engine.has_before(before)
        return True

    def _switch(self, source: Path | Tensors, requests: Literal["recompute", "keep", "wait", "abort"]) -> None:
        reading = self.model.party.reading
        assert reading is not None, "something was read"
        try:
            if reading.version == self._engine.info.version and not reading.why:
                self.model.forget()
                return
            self.model.switch()
        finally:
            self._barriers.pop("change", None)
            self._hold()
        if requests == "abort":
            self._engine.abort_all()
        self._changes += 1
        self._engine.renew(reading.version, keeps_keys=requests == "keep")
        self._came_from(source)

    def _read_to_wake(self, source: Path | Tensors | None, *, is_named: bool = True) -> None:
        """Start to read, if the engine lacks weights or gets others."""
        if not self._is_asleep:
            raise ConfigError("wake: the engine is not asleep.")
        if source is None and self.model.party.memory.has_weights:
            return
        self.model.sleep(keeps_weights=False)  # there is no room for two sets
        self.model.read(source, is_named=is_named)

    def _may_wake(self) -> bool:
        """Whether there is nothing to read, or all is read."""
        return self.model.party.reading is None or self.model.is_read()

    def _wake(self, source: Path | Tensors | None, version: str = "") -> None:
        version = self.model.wake() or version
        if version and version != self._engine.info.version:
            self._changes += 1
            self._engine.renew(version, keeps_keys=False)
        self._came_from(source)
        self._is_asleep = False
        self._hold()

    def _pause(self, number: int, command: messages.Pause) -> None:
        self._answer_drain()
        self._paused = command
        if command.mode == "abort":
            self._engine.abort_all()
        self._barriers["pause"] = self._engine.arrivals if command.mode == "wait" else 0
        self._hold()
        if command.mode == "wait":
            self._draining = number
        else:
            self._say(number)

    def _resume(self, number: int) -> None:
        if self._is_asleep:
            self._say(number, "resume: the engine is asleep; wake it first.")
            return
        self._paused = None
        self._barriers.pop("pause", None)
        self._hold()
        self._answer_drain()
        self._say(number)

    def _try_adapter(self, number: int, command: messages.LoadAdapter | messages.UnloadAdapter) -> bool:
        """Whether a command about an adapter has ended."""
        adapters = self._engine.adapters
        try:
            match command:
                case messages.LoadAdapter(name, path):
                    if not adapters.is_reading:
                        adapters.read(name, Path(path))
                    if not adapters.is_read(ADAPTER_S):
                        return False
                    adapters.hold()
                case messages.UnloadAdapter(name):
                    adapters.unload(name)
        except UserError as error:
            self._say(number, str(error))
        else:
            self._say(number)
        return True

    def _answer_drain(self) -> None:
        """Answer the waiting command of an ended pause with the engine's state."""
        if self._draining is not None:
            self._say(self._draining)
            self._draining = None

    def _hold(self) -> None:
        before = [*self._barriers.values(), *([0] if self._is_asleep else [])]
        self._engine.hold(min(before) if before else None)

    def _require_weights(self) -> None:
        if not self.model.party.memory.has_weights:
            raise ConfigError("the engine sleeps without weights; wake it with the new ones.")

    def _came_from(self, source: Path | Tensors | None) -> None:
        if source is not None:
            self._path = str(source) if isinstance(source, Path) else ""

    def _say(self, number: int, why: str = "") -> None:
        self._done.append(messages.CommandDone(number, self.standing, why))
