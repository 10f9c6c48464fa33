"""An administrator's commands to the engine, on the event loop; and the state that outlives the ranks.

Lost ranks are restarted with the newest accepted weights and their adapters, and paused or put to sleep if they were.
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
"""The number of a command without a waiting caller."""


class AdminCommands:
    """Running commands.

    Args:
        send: sends a message to the ranks.
        path: of the model's own weights.
        adapters: the folders of those from the start, by name.
        read_timeout_s: for locking a folder of weights.

    Attributes:
        standing: the engine's last reported state.
        newest: the newest accepted weights; None for the model's own.
        adapters: the folders of the current adapters, by name.
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
        self._pending: dict[int, tuple[Command, asyncio.Future[EngineStatus]]] = {}
        self._paused: messages.Pause | None = None
        self._asleep: messages.Sleep | None = None
        self._number = NOBODY
        self._has_begun = False

    @property
    def refusal(self) -> str:
        """Why a new request is refused; empty if it is accepted."""
        state = self.standing.state
        return f"the engine is {_spelt(state)}; ask again." if state in ("closed", "asleep") else ""

    @property
    def state(self) -> str:
        """The state in a word, for monitoring; empty while requests are answered."""
        return "" if self.standing.state == "serving" else _spelt(self.standing.state)

    # From the event loop.

    async def do(self, command: Command, state_of: Callable[[], str]) -> EngineStatus:
        """Send a command, and wait for its end; see ``api.admin_backend.SteeredEngine``.

        Args:
            command: the command.
            state_of: returns ``ready`` while the ranks are running.
        """
        self._number += 1
        number = self._number
        answer: asyncio.Future[EngineStatus] = asyncio.get_running_loop().create_future()
        # Set before the state is read: ranks lost from now on are reported by ``report_loss``.
        self._pending[number] = (command, answer)
        state = state_of()
        if state != "ready":
            self._pending.pop(number, None)
            raise BackendAway(f"the engine is {state}; ask again.", rank=0)
        self._send(messages.RunCommand(number, command))
        return await answer

    def back(self, command: Command) -> list[Command]:
        """Commands that restore the engine's current state after this command."""
        now = str(self.newest or self._path)
        match command:
            case messages.ChangeWeights(_, requests):
                # Aborted requests cannot be aborted again; new ones must not be affected.
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

    # From the thread that reads the ranks' messages.

    def hear(self, done: messages.CommandDone) -> None:
        """A command has ended."""
        self.standing = done.standing
        waiting = self._pending.pop(done.number, None)
        if waiting is None:
            return
        command, answer = waiting
        if not done.why:
            self._note(command)
        why: SuperstepError | None = None
        if done.why:
            # Errors of files name their path; all others name the command.
            of_files = isinstance(command, messages.ChangeWeights | messages.Wake | messages.LoadAdapter)
            why = StateError(done.why) if of_files else ConfigError(done.why)
        _settle(answer, done.standing if why is None else why)

    def began(self, info: ModelInfo, adapters: Sequence[AdapterInfo]) -> None:
        """The ranks are ready: restore their state from before the loss."""
        self.standing = msgspec.structs.replace(
            self.standing, version=info.version, path=str(self.newest or self._path)
        )
        if self._has_begun:
            # Unreadable adapters are left out: the ranks report their state after each command.
            for name, folder in self.adapters.items():
                self._send(messages.RunCommand(NOBODY, messages.LoadAdapter(name, str(folder))))
        else:
            self.standing = msgspec.structs.replace(self.standing, adapters=tuple(adapters))
        self._has_begun = True
        if self._paused is not None:
            self._send(messages.RunCommand(NOBODY, self._paused))
        if self._asleep is not None:
            self._send(messages.RunCommand(NOBODY, self._asleep))

    def report_loss(self) -> None:
        """The ranks are lost."""
        away = BackendAway(
            "the engine was lost on the way; its weights are the last that were accepted. Ask again.", rank=0
        )
        for number in list(self._pending):
            _, answer = self._pending.pop(number)
            _settle(answer, away)

    def close(self) -> None:
        """Release the weights."""
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
        """Lock the newest weights: restarted ranks read them.

        Nothing waits for the lock: messages of the ranks continue, and they have a lock of their own.
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
        if answer.done():  # the caller may have gone
            return
        if isinstance(outcome, SuperstepError):
            answer.set_exception(outcome)
        else:
            answer.set_result(outcome)

    with suppress(RuntimeError):  # the event loop has ended
        answer.get_loop().call_soon_threadsafe(settle)
