"""Client of an engine on the HTTP server's event loop: the ranks are processes of their own.

    handlers ──stream──► Host ──MessagePack, a socket──► rank 0 ──► the other ranks
                          │ a rank is lost
                          └── every stream ends at once with ``BackendAway``; the ranks are started again

One thread keeps the ranks running, one reads their messages and one sends; none accesses data of the event loop.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection, Listener, Pipe
from pathlib import Path
from typing import Any

from superstep.errors import ConfigError, Fault, SuperstepError, UserError
from superstep.launch.ranks import RankWorld, launch_parties
from superstep.launch.temporary_folders import temporary_folder
from superstep.plan.config import DeviceKind
from superstep.serve.api.backend import BackendAway, Health
from superstep.serve.config import ServeConfig
from superstep.serve.processes.admin_commands import NOBODY, AdminCommands
from superstep.serve.processes.output_queue import OutputListener, OutputQueue, OutputSink
from superstep.serve.processes.worker import Forms, serve_rank
from superstep.serve.scheduling import engine_messages as messages
from superstep.serve.scheduling.engine_messages import ORDERS, REPORTS, Command, EngineStatus, Order, Report
from superstep.serve.scheduling.request import Counters, ModelInfo, Request, RequestUpdate, Sampling

AGAIN_S = (0.0, 1.0, 5.0, 30.0)
"""Pauses before a restart after one loss, two losses, ... within ``CALM_S``."""

CALM_S = 300.0

LEAVE_S = 5.0
"""Seconds for running ranks to leave by themselves; loading ones are ended at once."""

STALLED_S = 60.0
"""Seconds without a step after which an engine with requests is not ready."""


class EngineClient:
    """A ``Backend`` with its engine in processes of their own.

    Args:
        folder: of the model.
        serve: settings.
        device: of its ranks.
        name: for clients.
        forms: makes the matchers of answers; a function of a module.
        tell: receives a line when the ranks are lost, and when they are back.
        first: index of its first GPU, if other engines of this host use those before it.
    """

    def __init__(
        self,
        folder: Path,
        serve: ServeConfig,
        *,
        device: DeviceKind = "cpu",
        name: str = "",
        forms: Forms | None = None,
        tell: Callable[[str], None] = lambda line: None,
        first: int = 0,
    ) -> None:
        self._first_rank = first
        self._folder, self._serve, self._device, self._forms = folder, serve, device, forms
        self._name = name or folder.name
        self._tell = tell
        self._loop: asyncio.AbstractEventLoop | None = None
        self._info: ModelInfo | None = None
        self._state = "starting"
        self._counters = Counters()
        self._pipe: Connection | None = None
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._deeds = AdminCommands(self._send, folder, dict(serve.adapters), serve.read_timeout_s)
        self._mail: dict[int, OutputSink] = {}
        self._moved_s = time.monotonic()
        self._number = 0
        self._is_leaving = False
        self._cut, self._end_ranks = Pipe(duplex=False)
        self._first = threading.Event()
        self._failure: SuperstepError | None = None
        self._keeper = threading.Thread(target=self._keep, name="engine", daemon=True)
        self._writer = threading.Thread(target=self._write, name="orders", daemon=True)

    # From the thread that opens and closes it.

    def begin(self) -> None:
        """Start the ranks; ``open`` waits for them."""
        self._writer.start()
        self._keeper.start()

    def open(self) -> ModelInfo:
        """Wait until the ranks are ready; starts them if needed.

        Raises:
            ConfigError: the model cannot be served with these settings.
            Fault: a rank failed, or it was closed meanwhile.
        """
        if self._keeper.ident is None:
            self.begin()
        self._first.wait()
        if self._failure is not None:
            raise self._failure
        if self._info is None:
            raise Fault("the engine was closed before it could answer.", rank=0)
        return self._info

    @property
    def failure(self) -> SuperstepError | None:
        """Why the ranks cannot be restarted; None while they run or will."""
        return self._failure if self._state == "ended" else None

    def close(self) -> None:
        """End the ranks at once."""
        self._is_leaving = True
        if self.is_there:
            self._send(messages.EndEngine())
            self._keeper.join(LEAVE_S)
        self._end_ranks.send_bytes(b"")
        self._keeper.join()
        self._orders.put(None)
        self._writer.join()
        self._deeds.close()

    # From the event loop.

    @property
    def info(self) -> ModelInfo:
        assert self._info is not None, "the host is open"
        return replace(self._info, version=self._deeds.standing.version)

    @property
    def adapters(self) -> Sequence[str]:
        """Names of the available adapters."""
        return tuple(adapter.name for adapter in self._deeds.standing.adapters)

    async def stream(
        self, prompt: tuple[int, ...], sampling: Sampling, *, priority: int = 0, adapter: str = "", salt: str = ""
    ) -> AsyncGenerator[RequestUpdate, None]:
        """The updates of one request, up to the one with a ``finish``; see ``Backend``."""
        box = OutputQueue()
        with self._track(box, prompt, sampling, priority=priority, adapter=adapter, salt=salt):
            while not box.is_over:
                yield await box.get()

    async def hear(
        self,
        prompt: tuple[int, ...],
        sampling: Sampling,
        heard: Callable[[RequestUpdate], bool],
        *,
        priority: int = 0,
        adapter: str = "",
        salt: str = "",
    ) -> None:
        """The same with a callback; see ``Backend``."""
        ear = OutputListener(heard)
        with self._track(ear, prompt, sampling, priority=priority, adapter=adapter, salt=salt):
            await ear.end

    @contextmanager
    def _track(self, mail: OutputSink, prompt: tuple[int, ...], sampling: Sampling, **rest: Any) -> Iterator[None]:  # noqa: ANN401
        """A running request; it is aborted if the block ends before it."""
        self._loop = asyncio.get_running_loop()
        self._number += 1
        number = self._number
        if not self._mail:  # it was idle
            self._moved_s = time.monotonic()
        # Set before the state is read: ranks lost from now on are reported here.
        self._mail[number] = mail
        is_taken = False
        try:
            if self._state != "ready":
                raise BackendAway(f"the engine is {self._state}; ask again.", rank=0)
            if self._deeds.refusal:
                raise BackendAway(self._deeds.refusal, rank=0)
            self._send(messages.AddRequest(Request(id=number, prompt=tuple(prompt), sampling=sampling, **rest)))
            is_taken = True
            yield
        finally:
            del self._mail[number]
            if is_taken and not mail.is_over:
                self._send(messages.AbortRequests((number,)))

    def abort(self) -> int:
        """Abort all requests."""
        self._send(messages.AbortRequests(tuple(self._mail)))
        return len(self._mail)

    def health(self) -> Health:
        """Whether requests are answered now."""
        held = self._deeds.state if self.is_there else ""
        if self.is_there and not held and self._mail and time.monotonic() - self._moved_s > STALLED_S:
            held = "stalled"
        return Health(is_ready=self.is_there and not held, state=held or self._state)

    @property
    def standing(self) -> EngineStatus:
        """The engine's state; see ``api.admin_backend.SteeredEngine``."""
        return self._deeds.standing

    @property
    def is_there(self) -> bool:
        """Whether its ranks accept messages."""
        return self._state == "ready"

    def back(self, command: Command) -> Sequence[Command]:
        """Commands that undo a command; see ``api.admin_backend.SteeredEngine``."""
        return self._deeds.back(command)

    async def do(self, command: Command) -> EngineStatus:
        """Run a command on the engine; see ``api.admin_backend.SteeredEngine``."""
        return await self._deeds.do(command, lambda: self._state)

    def counters(self) -> Counters:
        """The engine's last reported counters."""
        return self._counters

    # From the threads.

    def _keep(self) -> None:
        """Start the ranks, and restart them after a loss."""
        lost_s: list[float] = []
        while not self._is_leaving:
            try:
                self._run()
            except Exception as error:  # noqa: BLE001 - raised where the ranks are waited for
                self._failure = error if isinstance(error, SuperstepError) else Fault(f"{error}", rank=0)
            if not self._first.is_set() or isinstance(self._failure, UserError):
                self._state = "ended"
                if self._first.is_set():
                    self._tell(f"{self._failure} The engine is not started again.")
                self._first.set()
                return
            if self._failure is not None:
                self._tell(f"fault: {self._failure}; the engine is started again.")
                self._failure = None
            self._state = "ended" if self._is_leaving else "restarting"
            now_s = time.monotonic()
            lost_s = [at for at in lost_s if now_s - at < CALM_S] + [now_s]
            if not self._is_leaving:
                self._cut.poll(AGAIN_S[min(len(lost_s), len(AGAIN_S)) - 1])

    def _run(self) -> None:
        """One launch of the ranks."""
        with temporary_folder("superstep-serve-") as folder:
            address = str(folder / "orders")
            with Listener(address, "AF_UNIX") as listener:
                reader = threading.Thread(target=self._read, args=(listener,), daemon=True)
                reader.start()
                try:
                    # Adapters are loaded once the ranks are ready again: a missing one delays nothing.
                    serve = replace(self._serve, adapters=()) if self._first.is_set() else self._serve
                    given = (self._folder, serve, address, self._forms, self._deeds.newest)
                    ranks = RankWorld(size=self._serve.tp, worker=serve_rank, args=given)
                    launch_parties(self._device, [ranks], self._first_rank, self._cut)
                finally:
                    self._fail_all()

    def _read(self, listener: Listener) -> None:
        with suppress(EOFError, OSError), listener.accept() as pipe:
            self._pipe = pipe
            while True:
                self._hear(REPORTS.decode(pipe.recv_bytes()))
        self._fail_all()

    def _hear(self, report: Report) -> None:
        match report:
            case messages.Ready(info, adapters):
                self._info = replace(info, name=self._name)
                self._deeds.began(info, adapters)
                self._state = "ready"
                if self._first.is_set():
                    self._tell(f"the engine answers again, weights {info.version}.")
                self._first.set()
            case messages.StepOutput(progress, counters):
                self._counters, self._moved_s = counters, time.monotonic()
                self._hand([(news.request, news) for news in progress])
            case messages.RequestRefused(request, why):
                self._hand([(request, ConfigError(why))])
            case messages.CommandDone():
                if report.why and report.number == NOBODY:
                    self._tell(f"not done again after the restart: {report.why}")
                self._deeds.hear(report)

    def _hand(self, news: Sequence[tuple[int, RequestUpdate | SuperstepError]]) -> None:
        """Wake the event loop, once for all results of a step."""
        loop = self._loop
        if news and loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._put, news)

    def _put(self, news: Sequence[tuple[int, RequestUpdate | SuperstepError]]) -> None:
        for request, one in news:
            mail = self._mail.get(request)
            if mail is not None:  # the caller may have gone
                mail.put(one)

    def _fail_all(self) -> None:
        """The ranks are gone: fail all requests."""
        self._pipe = None
        if self._state == "ready":
            self._state = "restarting"
            self._deeds.report_loss()
            lost = BackendAway("the engine was lost on the way and is starting again; ask again.", rank=0)
            self._hand([(number, lost) for number in list(self._mail)])

    def _send(self, order: Order) -> None:
        self._orders.put(order)

    def _write(self) -> None:
        """Send messages. A thread of its own: rank 0 reads between two steps only, and nothing must wait for that."""
        while (order := self._orders.get()) is not None:
            pipe = self._pipe
            if pipe is not None:
                with suppress(OSError):
                    pipe.send_bytes(ORDERS.encode(order))
