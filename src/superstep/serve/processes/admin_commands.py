"""What whoever runs the server asks of the engine, seen from the event loop; and what of it outlives the ranks.

Ranks that were lost are started with the newest weights that were accepted and with the adapters that were there, and
paused or put to sleep where they were.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from superstep.errors import ConfigError, StateError, SuperstepError
from superstep.serve.api.backend import BackendAway
from superstep.serve.files.reader import TIMEOUT_S, BackgroundReader
from superstep.serve.files.weights import Lock, hold
from superstep.serve.scheduling import engine_messages as messages
from superstep.serve.scheduling.engine_messages import Command, EngineStatus, Order
from superstep.serve.scheduling.request import AdapterInfo, ModelInfo

NOBODY = 0
"""The number of a deed whose end nobody waits for."""


class AdminCommands:
    """Deeds under way.

    Args:
        send: hands an order on to the ranks.
        path: of the model's own weights.
        adapters: the folders of those that are there from the start, by name.
        read_timeout_s: how long a folder of weights may take to be locked.

    Attributes:
        standing: how the engine stood when it last said so.
        newest: where the weights are that were accepted last; None where they are the model's own.
        adapters: the folders of the adapters that are there, by name.
    """

    def __init__(
        self,
        send: Callable[[Order], None],
        path: Path,
        adapters: Mapping[str, Path],
        read_timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.standing = EngineStatus()
        self.adapters = dict(adapters)
        self.newest: Path | None = None
        self._send = send
        self._path = path
        self._read_timeout_s = read_timeout_s
        self._lock = self._hold(path)
        self._lock.result()
        self._asked: dict[int, tuple[Command, asyncio.Future[EngineStatus]]] = {}
        self._paused: messages.Pause | None = None
        self._asleep: messages.Sleep | None = None
        self._number = NOBODY
        self._has_begun = False

    @property
    def refusal(self) -> str:
        """Why a request that comes now is not taken; empty where it is."""
        state = self.standing.state
        return f"the engine is {_spelt(state)}; ask again." if state in ("closed", "asleep") else ""

    @property
    def state(self) -> str:
        """In a word, for those who watch; empty where requests are answered."""
        return "" if self.standing.state == "serving" else _spelt(self.standing.state)

    # From the event loop.

    async def do(self, command: Command, state_of: Callable[[], str]) -> EngineStatus:
        """Ask for something, and wait for its end; see ``api.admin_backend.SteeredEngine``.

        Args:
            command: what to do.
            state_of: says ``ready`` where the ranks are there.
        """
        self._number += 1
        number = self._number
        answer: asyncio.Future[EngineStatus] = asyncio.get_running_loop().create_future()
        # There before the state is looked at: who is lost from now on is told by ``lost``.
        self._asked[number] = (command, answer)
        state = state_of()
        if state != "ready":
            self._asked.pop(number, None)
            raise BackendAway(f"the engine is {state}; ask again.", rank=0)
        self._send(messages.RunCommand(number, command))
        return await answer

    def back(self, command: Command) -> list[Command]:
        """What brings the engine back to how it stands now, once a deed is done."""
        now = str(self.newest or self._path)
        match command:
            case messages.ChangeWeights(_, requests):
                # Who was taken back cannot be taken back again; who has come since is not to suffer for it.
                return [messages.ChangeWeights(now, "recompute" if requests == "abort" else requests)]
            case messages.Pause() | messages.Resume():
                return [messages.Resume() if self._paused is None else self._paused]
            case messages.Sleep():
                return [messages.Wake()]
            case messages.Wake(path):
                own: list[Command] = [] if path is None else [messages.ChangeWeights(now)]
                return [*own, self._asleep or messages.Sleep()]
            case messages.LoadAdapter(name) | messages.UnloadAdapter(name):
                before = self.adapters.get(name)
                return [messages.UnloadAdapter(name) if before is None else messages.LoadAdapter(name, str(before))]

    # From the thread that reads what the ranks say.

    def hear(self, done: messages.CommandDone) -> None:
        """A deed has ended."""
        self.standing = done.standing
        waiting = self._asked.pop(done.number, None)
        if waiting is None:
            return
        command, answer = waiting
        if not done.why:
            self._note(command)
        why: SuperstepError | None = None
        if done.why:
            # What is wrong with files is said of their path; all else of what was asked for.
            of_files = isinstance(command, messages.ChangeWeights | messages.Wake | messages.LoadAdapter)
            why = StateError(done.why) if of_files else ConfigError(done.why)
        _settle(answer, done.standing if why is None else why)

    def began(self, info: ModelInfo, adapters: Sequence[AdapterInfo]) -> None:
        """The ranks answer: as they did before they were lost, where they were."""
        self.standing = msgspec.structs.replace(
            self.standing, version=info.version, path=str(self.newest or self._path)
        )
        if self._has_begun:
            # What cannot be read any more is left out: the ranks say how they stand after each.
            for name, folder in self.adapters.items():
                self._send(messages.RunCommand(NOBODY, messages.LoadAdapter(name, str(folder))))
        else:
            self.standing = msgspec.structs.replace(self.standing, adapters=tuple(adapters))
        self._has_begun = True
        if self._paused is not None:
            self._send(messages.RunCommand(NOBODY, self._paused))
        if self._asleep is not None:
            self._send(messages.RunCommand(NOBODY, self._asleep))

    def lost(self) -> None:
        """The ranks are gone."""
        away = BackendAway(
            "the engine was lost on the way; its weights are the last that were accepted. Ask again.", rank=0
        )
        for number in list(self._asked):
            _, answer = self._asked.pop(number)
            _settle(answer, away)

    def close(self) -> None:
        """Let go of the weights."""
        self._lock.give_up()

    def _note(self, command: Command) -> None:
        match command:
            case messages.Pause():
                self._paused = command
            case messages.Resume():
                self._paused = None
            case messages.Sleep():
                self._asleep = command
            case messages.ChangeWeights(path):
                self._keep_newest(Path(path))
            case messages.LoadAdapter(name, path):
                self.adapters[name] = Path(path)
            case messages.UnloadAdapter(name):
                self.adapters.pop(name, None)
            case messages.Wake(path):
                self._asleep = None
                if path is not None:
                    self._keep_newest(Path(path))

    def _keep_newest(self, path: Path) -> None:
        """Hold on to the newest weights: ranks that are started again read them.

        Nobody waits for the lock: what the ranks say goes on, and they have a lock of their own.
        """
        before, self._lock = self._lock, self._hold(path)
        self.newest = path
        before.give_up()

    def _hold(self, path: Path) -> BackgroundReader[Lock | None]:
        return BackgroundReader(path, lambda progress: hold(path), timeout_s=self._read_timeout_s, drop=_let_go)


def _let_go(lock: Lock | None) -> None:
    if lock is not None:
        lock.close()


def _spelt(state: str) -> str:
    return "paused" if state == "closed" else state


def _settle(answer: asyncio.Future[EngineStatus], outcome: EngineStatus | SuperstepError) -> None:
    def settle() -> None:
        if answer.done():  # who asked may have gone
            return
        if isinstance(outcome, SuperstepError):
            answer.set_exception(outcome)
        else:
            answer.set_result(outcome)

    with suppress(RuntimeError):  # the event loop has ended
        answer.get_loop().call_soon_threadsafe(settle)
