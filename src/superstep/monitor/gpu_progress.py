"""How far a rank's GPU has come in the work that its host has issued.

A host is ahead of its GPU: it issues an instruction and goes on, a collective blocks a stream and not the host, and
while autograd's thread launches kernels the main thread sleeps. So the host's place does not show whether the rank
makes progress. Instead the host records an event on the compute stream whenever it begins to wait for an instruction's
inputs, or to run it, and a thread of the rank queries these events:

    host     waits 4 ● works 4 ● waits 5 ● works 5 ● waits 6 ●      5 issued
    stream   waits 4 ✓ works 4 ✓ waits 5 ✓                          3 passed: a collective that 5 needs is not complete

An event after a wait passes when the collectives are complete; one after an instruction when its kernels and
collectives are. A query neither waits nor synchronizes.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from superstep.monitor.activity import Activity
from superstep.monitor.page_layout import GPU


class GpuEvent(Protocol):
    """An event of a stream, such as ``torch.cuda.Event``."""

    def record(self) -> None:
        """Record it on the current stream."""

    def query(self) -> bool:
        """Whether the stream has passed it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A place in a program where an event is recorded.

    Attributes:
        doing: what begins there.
        run: which run of a program since the process began, from 1.
        index: of the instruction in its list.
        line: of the instruction in the flight recorder.
        text: of the instruction.
    """

    doing: Activity
    run: int
    step: int
    index: int
    line: int
    text: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProgress:
    """A GPU's progress.

    Attributes:
        issued: marks on the compute stream since the process began.
        passed: those that the stream has passed.
        doing: what the last passed mark begins.
        run, step, index, line, instruction: of that mark.
        longest_s: the longest that the GPU took for this instruction, as far as queries tell; 0.0 the first time.
        since_ns: when the mark was seen to be passed, by the host's monotonic clock.
    """

    issued: int
    passed: int
    doing: Activity
    run: int
    step: int
    index: int
    line: int
    instruction: str
    longest_s: float
    since_ns: int


class StreamMarks:
    """Marks on one GPU's compute stream: the executor's thread records them, another thread queries them.

    Args:
        new_event: makes an event.
        enter_thread: the querying thread calls it once to select the GPU: otherwise it would allocate on GPU 0.
    """

    def __init__(self, new_event: Callable[[], GpuEvent], enter_thread: Callable[[], None]) -> None:
        self._new_event, self._enter_thread = new_event, enter_thread
        self._ahead: deque[tuple[GpuEvent, Mark]] = deque()
        self._spare: list[GpuEvent] = []
        self._issued = self._passed = 0
        self._last: Mark | None = None
        self._since_ns = 0
        self._longest_ns: dict[tuple[int, int], int] = {}
        self._has_entered = self._has_failed = False

    def put(self, mark: Mark) -> None:
        """Record an event on the current stream."""
        event = self._spare.pop() if self._spare else self._new_event()
        try:
            event.record()
        except RuntimeError:  # as in ``_is_passed``; what is raised meanwhile is not to be hidden
            self._has_failed = True
            return
        self._issued += 1
        self._ahead.append((event, mark))

    def query(self, view: mmap.mmap, now_ns: int) -> None:
        """Advance past the events that the stream has passed, and write the progress into a rank's page."""
        if not self._has_entered:
            self._enter_thread()
            self._has_entered = True
        issued = self._issued
        while self._ahead and self._is_passed(self._ahead[0][0]):
            event, mark = self._ahead.popleft()
            self._spare.append(event)
            self._note_longest(now_ns)
            self._last, self._since_ns, self._passed = mark, now_ns, self._passed + 1
        if (last := self._last) is not None:
            longest_ns = self._longest_ns.get((last.line, last.index), 0)
            GPU.write(
                view, self._passed, max(issued, self._passed), last.doing, last.run, last.step, last.index,
                last.line, longest_ns, self._since_ns, self._passed, last.text,
            )  # fmt: skip

    def _is_passed(self, event: GpuEvent) -> bool:
        if self._has_failed:
            return False
        try:
            return event.query()
        except RuntimeError:  # the GPU has failed: the thread that computes meets the same error, and says it
            self._has_failed = True
            return False

    def _note_longest(self, now_ns: int) -> None:
        if self._last is not None and self._last.doing is Activity.WORKS:
            at = self._last.line, self._last.index
            self._longest_ns[at] = max(1, now_ns - self._since_ns, self._longest_ns.get(at, 0))


def read_progress(view: mmap.mmap) -> GpuProgress | None:
    """A GPU's progress from a rank's page; None without a GPU, or before its first program."""
    passed, issued, doing, run, step, index, line, longest_ns, since_ns, _, text = GPU.read_whole(view)
    if not passed:
        return None
    return GpuProgress(
        issued=issued,
        passed=passed,
        doing=Activity(doing),
        run=run,
        step=step,
        index=index,
        line=line,
        instruction=text.rstrip(b"\0").decode(errors="replace"),
        longest_s=longest_ns / 1e9,
        since_ns=since_ns,
    )
