"""Prefetcher: a background thread that reads batches ahead of the training step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from threading import Condition, Thread
from types import TracebackType
from typing import Self

from superstep.data.batch import Batch, BatchSource
from superstep.errors import ConfigError


class Prefetcher:
    """Iterates over ``(batch, data_wait_s)``: the next batches, and the seconds the caller waited for each.

    An error of the reading thread is raised by the iteration, after the batches that were read before it. The thread
    ends at ``close``, at the end of a ``with`` block, after ``steps`` batches, or with the process.
    """

    def __init__(
        self, stream: BatchSource, *, start_sample: int, rows: slice, depth: int, steps: int | None = None
    ) -> None:
        if depth < 1:
            raise ConfigError(f"data.prefetch_steps = {depth} reads nothing ahead; set it to 1 or more.")
        self._stream = stream
        self._rows = rows
        self._depth = depth
        self._ready: deque[Batch] = deque()
        self._error: BaseException | None = None
        self._is_closed = False
        self._is_finished = False
        self._changed = Condition()
        self._thread = Thread(target=self._read, args=(start_sample, steps), name="superstep-prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[tuple[Batch, float]]:
        return self

    def __next__(self) -> tuple[Batch, float]:
        began_s = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._is_finished)
            if self._ready:
                batch = self._ready.popleft()
                self._changed.notify_all()
                return batch, time.perf_counter() - began_s
            if self._error is not None:
                raise self._error
            raise StopIteration

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the thread and drop its batches; takes at most the time of the batch being read."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()
        self._ready.clear()

    def _read(self, sample: int, steps: int | None) -> None:
        """The thread: read a batch whenever fewer than ``depth`` are ready."""
        try:
            while steps is None or steps > 0:
                with self._changed:
                    self._changed.wait_for(lambda: self._is_closed or len(self._ready) < self._depth)
                    if self._is_closed:
                        return
                batch = self._stream.batch(sample, self._rows)
                with self._changed:
                    self._ready.append(batch)
                    self._changed.notify_all()
                sample += self._stream.batch_sequences
                steps = None if steps is None else steps - 1
        except BaseException as error:  # noqa: BLE001 - whatever it is, the caller shall see it
            self._error = error
        finally:
            with self._changed:
                self._is_finished = True
                self._changed.notify_all()
