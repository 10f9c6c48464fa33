"""The status page: what a rank does now, in shared memory that its launcher reads.

    rank      begin ── waits 0 ─ works 0 ── waits 1 ─ works 1 ── ... ── rests     a store into the page each, no call
    ticker    tick ─ tick ─ tick ─ tick ...                                       a thread: whether Python runs at all
    launcher  looks at the pages a few times a second (``monitor.hang_detector``)

A beat is a dozen words copied into the page, without a system call: step, instruction, and whether the rank computes it
or waits for it. A rank that waits for another does not hang. Finished instructions are noted after the page
(``monitor.flight_recorder``). The memory has no file, and the launcher keeps it after the rank has ended.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

from superstep.monitor.activity import TEXT_BYTES, Activity
from superstep.monitor.flight_recorder import BESIDE, BYTES, NOWHERE, FlightRecorder
from superstep.monitor.gpu_progress import GpuProgress, Mark, StreamMarks, read_progress
from superstep.monitor.memory_history import ResidentMemory
from superstep.monitor.page_layout import BEAT, EXPECTED, PROCESS, TICK
from superstep.program.instructions import Instruction
from superstep.program.text import describe

NAME = "superstep-heart:"
"""The prefix of the memory's name in the system; the rank follows."""

TICK_S = 0.1
"""Seconds between ticks."""

TICKS_KEPT = 600
"""The longest pause is that of the last one to two times this many ticks."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The contents of a page.

    Attributes:
        beats: their number; 0 before the first program.
        doing: since the last beat.
        step: the current or last one.
        index: of the instruction in its list.
        longest_s: the longest run of this instruction in this process; 0.0 the first time.
        instruction: in words; outside a program, what the rank does there, if known.
        ticks: of its ticker.
        ticker: the thread's id; 0 without one.
        pause_s: the longest between two ticks of the last minute or two.
        expected_s: the predicted time of a step; 0.0 without a prediction.
        run: which run of a program, from 1.
        since_ns: when the beat was, by the host's monotonic clock.
        line: of the instruction in the flight recorder.
        process: the rank's process id; 0 before it has begun.
        stacks: the process's descriptor for stack dumps; 0 without one.
        gpu: its GPU's progress, if any: the rest is the host's, which is ahead.
    """

    beats: int
    doing: Activity
    step: int
    index: int
    longest_s: float
    instruction: str
    ticks: int
    ticker: int
    pause_s: float
    expected_s: float
    run: int = 0
    since_ns: int = 0
    line: int = NOWHERE
    process: int = 0
    stacks: int = 0
    gpu: GpuProgress | None = None

    @property
    def moves(self) -> tuple[int, int]:
        """Changes when the rank's host or GPU makes progress."""
        return self.beats, 0 if self.gpu is None else self.gpu.passed

    def on_gpu(self) -> Heartbeat:
        """The beat with its GPU's place instead of the host's; unchanged on a CPU."""
        gpu = self.gpu
        if gpu is None:
            return self
        beside = self.instruction if self.doing is Activity.OTHER else ""
        return replace(
            self, doing=gpu.doing, run=gpu.run, step=gpu.step, index=gpu.index, line=gpu.line, longest_s=gpu.longest_s,
            since_ns=gpu.since_ns, instruction=beside if gpu.doing is Activity.OTHER else gpu.instruction,
        )  # fmt: skip


@dataclass(slots=True)
class _Known:
    """A list of instructions that runs repeatedly: the texts, and the longest time of each."""

    instructions: Sequence[Instruction]
    texts: list[bytes]
    line: int = NOWHERE
    longest_ns: list[int] = field(default_factory=list)


class HeartbeatReceiver(Protocol):
    """Receives what a rank does."""

    def begin(self, instructions: Sequence[Instruction], *, step: int) -> None:
        """The list starts, in this step."""

    def waits(self, index: int | None = None) -> None:
        """The rank waits for the inputs of an instruction: this one, or the current one."""

    def works(self, index: int | None = None) -> None:
        """The rank runs an instruction: this one, or the current one."""

    def rests(self) -> None:
        """The list is over, whether or not to its end."""

    def expect(self, step_s: float) -> None:
        """The predicted time of a step."""

    def turns_to(self, what: str) -> str:
        """What the rank does outside its programs, empty for nothing in particular; returns what it did before."""


@contextmanager
def beside(beats: HeartbeatReceiver, what: str) -> Iterator[None]:
    """Within the block the rank does this, where it runs no program."""
    before = beats.turns_to(what)
    try:
        yield
    finally:
        beats.turns_to(before)


class NoHeartbeats:
    """Beats of a rank that nobody watches."""

    def begin(self, instructions: Sequence[Instruction], *, step: int) -> None:
        """Do nothing."""

    def waits(self, index: int | None = None) -> None:
        """Do nothing."""

    def works(self, index: int | None = None) -> None:
        """Do nothing."""

    def rests(self) -> None:
        """Do nothing."""

    def expect(self, step_s: float) -> None:
        """Do nothing."""

    def turns_to(self, what: str) -> str:
        return ""


class HeartbeatWriter:
    """A rank's side of its page.

    Args:
        handle: a descriptor of the page; closed here.
        clock: nanoseconds.
        marks: on the GPU's compute stream, for a rank on a GPU.
    """

    def __init__(
        self, handle: int, clock: Callable[[], int] = time.monotonic_ns, marks: StreamMarks | None = None
    ) -> None:
        self._view = mmap.mmap(handle, BYTES)
        os.close(handle)
        self._clock = clock
        self._ring = FlightRecorder(self._view)
        self._known: dict[int, _Known] = {}
        self._beside: dict[str, int] = {"": NOWHERE}
        self._now = _Known((), [b""], longest_ns=[0])
        self._beats, self._run, self._step, self._at, self._began_ns = 0, 0, 0, 0, 0
        self._doing = Activity.OTHER
        self._marks = marks
        self._ticker: threading.Thread | None = None
        self._is_over = threading.Event()
        self._ready_ns = self._start_ns = self._within_ns = 0
        self._what, self._what_ns = "", 0
        self.listens(0)

    def listens(self, stacks: int) -> None:
        """Record this process's id, and the descriptor of its stack dumps."""
        PROCESS.write(self._view, os.getpid(), stacks)

    def begin(self, instructions: Sequence[Instruction], *, step: int) -> None:
        known = self._known.get(id(instructions))
        if known is None or known.instructions is not instructions:
            words = [describe(each) for each in instructions]
            texts = [each.encode()[:TEXT_BYTES] for each in words]
            known = self._known[id(instructions)] = _Known(instructions, texts, self._ring.lay(words), [0] * len(texts))
        self._now, self._step, self._at, self._run = known, step, 0, self._run + 1
        if self._marks is not None:
            self._start_ticker()

    def waits(self, index: int | None = None) -> None:
        self._beat(Activity.WAITS, index)
        self._mark(Activity.WAITS)

    def works(self, index: int | None = None) -> None:
        self._beat(Activity.WORKS, index)
        self._mark(Activity.WORKS)

    def rests(self) -> None:
        """The list is over, whether or not to its end. After the first list, Python's pauses count."""
        self._beat(Activity.OTHER, None)
        self._mark(Activity.OTHER)
        self._start_ticker()

    def _start_ticker(self) -> None:
        if self._ticker is None:
            self._ticker = threading.Thread(target=self._tick, name="superstep-ticker", daemon=True)
            self._ticker.start()

    def _mark(self, doing: Activity) -> None:
        if self._marks is not None:
            at, known = self._at, self._now
            text = known.texts[at] if doing else b""
            mark = Mark(doing=doing, run=self._run, step=self._step, index=at, line=self._line(), text=text)
            self._marks.put(mark)

    def _line(self) -> int:
        """The current instruction's line in the flight recorder."""
        return self._now.line + self._at if self._now.line else NOWHERE

    def stop(self) -> None:
        """Record nothing more."""
        self._is_over.set()
        if self._ticker is not None:
            self._ticker.join()

    def turns_to(self, what: str) -> str:
        before, now_ns = self._what, self._clock()
        line = self._beside.get(before, NOWHERE)
        self._ring.note(line, self._run, self._step, self._what_ns, self._what_ns, now_ns, 0)
        if what not in self._beside:
            self._beside[what] = self._ring.lay([BESIDE + what])
        self._what, self._what_ns = what, now_ns
        if self._run and self._doing is Activity.OTHER:
            self._beat(Activity.OTHER, None)
        return before

    def _beat(self, doing: Activity, index: int | None) -> None:
        now_ns, known = self._clock(), self._now
        before, took_ns = self._doing, now_ns - self._began_ns
        if before is Activity.WORKS and took_ns > known.longest_ns[self._at]:
            known.longest_ns[self._at] = took_ns
        if index is not None and doing is Activity.WAITS:
            if before is not Activity.OTHER:
                self._note(now_ns, is_done=True)
            self._at, self._ready_ns, self._start_ns, self._within_ns = index, now_ns, 0, 0
        elif doing is Activity.WORKS:
            if self._start_ns == 0:
                self._start_ns = now_ns
            else:
                self._within_ns += took_ns
        elif doing is Activity.OTHER and before is not Activity.OTHER:
            # A list that has come to its end waits for what has still to leave; else something was raised.
            is_done = before is Activity.WAITS and self._start_ns > 0
            self._note(self._began_ns if is_done else 0, is_done=is_done)
        at = self._at
        self._began_ns, self._doing = now_ns, doing
        self._beats += 1
        text = known.texts[at] if doing else self._what.encode()[:TEXT_BYTES]
        BEAT.write(
            self._view, self._beats, doing, self._step, at, known.longest_ns[at], self._run, now_ns, self._line(),
            self._beats, text,
        )  # fmt: skip

    def _note(self, end_ns: int, *, is_done: bool) -> None:
        line = self._now.line
        if line:
            start_ns, end_ns = self._start_ns, end_ns if is_done else 0
            self._ring.note(line + self._at, self._run, self._step, self._ready_ns, start_ns, end_ns, self._within_ns)

    def expect(self, step_s: float) -> None:
        EXPECTED.write(self._view, int(1e9 * step_s))

    def _tick(self) -> None:
        ticks, last_ns, me = 0, self._clock(), threading.get_native_id()
        resident = ResidentMemory(self._view)
        before_ns = longest_ns = 0
        while not self._is_over.is_set():
            now_ns = self._clock()
            longest_ns, last_ns, ticks = max(longest_ns, now_ns - last_ns), now_ns, ticks + 1
            if ticks % TICKS_KEPT == 0:
                before_ns, longest_ns = longest_ns, 0
            TICK.write(self._view, ticks, me, max(before_ns, longest_ns))
            resident.look(now_ns)
            if self._marks is not None:
                self._marks.query(self._view, now_ns)
            self._is_over.wait(TICK_S)


class StatusPage:
    """The launcher's side: makes the page, passes its descriptor to a rank, and reads it. ``name``: the rank's name
    within its launch, by which tools outside find the page.
    """

    def __init__(self, name: str = "") -> None:
        self.handle = os.memfd_create(f"{NAME}{name}")
        try:
            os.ftruncate(self.handle, BYTES)
        except OSError:
            os.close(self.handle)
            raise
        self.view = mmap.mmap(self.handle, BYTES)

    def read(self) -> Heartbeat:
        return read_beat(self.view)

    def close(self) -> None:
        self.view.close()
        os.close(self.handle)


def page(name: str = "") -> StatusPage | None:
    """Make a rank's page; None where the system has no anonymous memory files, or not that much (``ulimit -f``)."""
    if not hasattr(os, "memfd_create"):
        return None
    try:
        return StatusPage(name)
    except OSError:
        return None


def read_beat(view: mmap.mmap) -> Heartbeat:
    """Read a page; read again while a beat is being written."""
    beats, doing, step, index, longest_ns, run, since_ns, line, _, text = BEAT.read_whole(view)
    ticks, ticker, pause_ns = TICK.read(view)
    (expected_ns,) = EXPECTED.read(view)
    process, stacks = PROCESS.read(view)
    return Heartbeat(
        beats=beats,
        doing=Activity(doing),
        step=step,
        index=index,
        longest_s=longest_ns / 1e9,
        instruction=text.rstrip(b"\0").decode(errors="replace"),
        ticks=ticks,
        ticker=ticker,
        pause_s=pause_ns / 1e9,
        expected_s=expected_ns / 1e9,
        run=run,
        since_ns=since_ns,
        line=line,
        process=process,
        stacks=stacks,
        gpu=read_progress(view),
    )
