"""How a rank of torchrun leaves after a failure: at once, without waiting for other ranks.

    the rank that fails     writes it into the store, aborts its groups, and ends all their collectives
    each of the others      reads it in the store, or receives a signal, and ends too, even inside a collective

A rank that waits in a collective runs no Python: neither exceptions nor signal handlers reach it. So a separate thread
watches, and ends the process after some patience.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import sys
import threading
import time
from types import TracebackType

import torch.distributed as dist
from torch.distributed.distributed_c10d import _abort_process_group

from superstep.errors import SuperstepError
from superstep.launch.stop_request import AGAIN_S, StopRequest

FAILED = "superstep/failed"
"""The key where failed ranks count themselves."""

POLL_S = 0.2
"""Seconds between reads of the store."""

PATIENCE_S = 3.0
"""Seconds for a rank to end by itself, and for its groups to be aborted."""

_DEADLY = (signal.SIGTERM, signal.SIGHUP)


class PeerWatch:
    """Ends this process where another rank has failed, or a signal arrives, and the rank does not end by itself.

    It wraps the rank's work on the main thread. Signal handlers still run where they can. While the rank waits for a
    ``stop`` request after its step, the first SIGTERM does not end it.
    """

    def __init__(self, store: dist.Store, stop: StopRequest) -> None:  # type: ignore[name-defined]
        self._stop = stop
        self._requested_s: float | None = None
        # A connection of its own: what the rank asks of the store may keep it waiting.
        self._store = store.clone()
        self._is_over = threading.Event()
        self._signals, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._before = -1

    def __enter__(self) -> None:
        # Python writes a signal's number there before anything of ours has to run.
        self._before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="superstep-peers", daemon=True).start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        signal.set_wakeup_fd(self._before)

    def _watch(self) -> None:
        status = None
        while status is None and not self._is_over.is_set():
            status = self._signal_status() or self._find_failed_rank()
        if status is not None and not self._is_over.wait(PATIENCE_S):
            end(status)

    def _signal_status(self) -> int | None:
        """The exit status of a signal, if one arrives within a moment."""
        if not select.select([self._signals], [], [], POLL_S)[0]:
            return None
        came = set(os.read(self._signals, 64))
        if signal.SIGTERM in came and self._stop.is_listening and not self._is_requested_again():
            came.remove(signal.SIGTERM)
        return next((128 + number for number in _DEADLY if number in came), None)

    def _is_requested_again(self) -> bool:
        now_s = time.monotonic()
        if self._requested_s is None:
            self._requested_s = now_s
        return now_s - self._requested_s >= AGAIN_S

    def _find_failed_rank(self) -> int | None:
        try:
            return 1 if self._store.check([FAILED]) else None
        except RuntimeError:  # the store's own process has ended, as it does after a run that went well
            return None


def end(status: int) -> None:
    """End the process now, after flushing its output."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def status_of(error: BaseException) -> int:
    match error:
        case SuperstepError():
            return error.exit_status
        case SystemExit(code=int(status)):
            return status
        case SystemExit(code=None):
            return 0
        case KeyboardInterrupt():
            return 130
        case _:
            return 1


def abandon(status: int) -> None:
    """Abort the groups once the store records this rank's failure, without waiting for other ranks. The process ends
    with ``status`` as soon as the error has been printed.
    """
    if dist.is_initialized() and "nccl" in dist.get_backend():
        # Kernels under way are ended, and with them what waits for them. On a thread, so that it has a bound as well.
        aborting = threading.Thread(target=_abort_process_group, daemon=True)
        aborting.start()
        aborting.join(PATIENCE_S)
    # The store may live in this process, and the others ask it now and then.
    time.sleep(2 * POLL_S)
    # Gloo has no abort: the interpreter, letting go of its groups, would wait for each work under way.
    atexit.register(end, status)
