"""Recorders: when each instruction of a step ran, on a CPU by its clock, on a GPU by events on its streams.

A CPU has finished a compute instruction when it goes on. On a GPU the host is far ahead, and only notes launches. So
there every instruction records two events, which are read after the step:

    compute stream     ──●─ Forward ─●──●─ Forward ─●──        a ● on the stream before and after the instruction
                         │ Fetch is started
    of its own           └──── waits for the collective ──●    its end: a stream that does nothing but wait for it

NCCL's streams are internal; but a stream that waits for a lane's collectives in order passes each end when it comes. A
collective begins when the compute stream has reached it and its lane has finished the one before.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from superstep.comm.collectives import PendingCollective
from superstep.comm.device import Device
from superstep.engine.flat.snapshots import UnitCopy
from superstep.program.instructions import Instruction, Recv, Send, lane

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class TimedInstruction:
    """Times of one instruction, in seconds of this host's monotonic clock."""

    index: int
    start_s: float
    end_s: float


class Recorder(Protocol):
    """Records each instruction as it is issued."""

    @property
    def issued(self) -> int:
        """Number of instructions that were issued without an error."""

    def begin(self) -> None:
        """The next instruction is about to be issued; its inputs are ready."""

    def end(self, instruction: Instruction, under_way: PendingCollective | None) -> None:
        """It has been issued, and has started ``under_way``, if anything."""

    def ran(self) -> list[TimedInstruction]:
        """Times of each. On a GPU this waits for all of them."""


class HostRecorder:
    """Records by the host's clock: the start of an instruction, and the return of its call."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self._ran: list[TimedInstruction] = []
        self._copies: dict[int, UnitCopy] = {}
        self._start_s = 0.0

    @property
    def issued(self) -> int:
        return len(self._ran)

    def begin(self) -> None:
        self._start_s = self._clock()

    def end(self, instruction: Instruction, under_way: PendingCollective | None) -> None:
        if isinstance(under_way, UnitCopy):
            self._copies[len(self._ran)] = under_way
        self._ran.append(TimedInstruction(len(self._ran), self._start_s, self._clock()))

    def ran(self) -> list[TimedInstruction]:
        for index, copying in self._copies.items():
            if (seconds := copying.ran_s()) is not None:
                self._ran[index] = TimedInstruction(index, *seconds)
        return list(self._ran)


class CudaRecorder:
    """Records events on the streams of one GPU, converted to the host's clock at the end.

    Args:
        device: the GPU.
        clock: the host's.
        cuda: torch's module, or a replacement.
    """

    def __init__(self, device: Device, clock: Clock = time.perf_counter, cuda: Any = torch.cuda) -> None:  # noqa: ANN401
        self._device = device
        self._clock = clock
        self._cuda = cuda
        self._waiting: dict[object, Any] = {}
        self._marks: list[tuple[Any, Any, object]] = []
        self._start: Any = None

    @property
    def issued(self) -> int:
        return len(self._marks)

    def begin(self) -> None:
        self._start = self._mark()

    def end(self, instruction: Instruction, under_way: PendingCollective | None) -> None:
        if under_way is None or isinstance(under_way, UnitCopy):  # a host thread waits for a copy, not a stream
            self._marks.append((self._start, self._mark(), None))
            return
        queue = _queue(instruction)
        if queue not in self._waiting:
            self._waiting[queue] = self._cuda.Stream(device=self._device.torch)
        stream = self._waiting[queue]
        stream.wait_event(self._start)
        with self._cuda.stream(stream):
            under_way.wait()  # on NCCL this stream waits; the compute stream waits later, in a call of its own
            self._marks.append((self._start, self._mark(), queue))

    def ran(self) -> list[TimedInstruction]:
        self._cuda.synchronize(self._device.torch)
        last = self._mark()
        last.synchronize()
        now_s = self._clock()

        def at_s(event: Any) -> float:  # noqa: ANN401
            return now_s - float(event.elapsed_time(last)) / 1000

        timed: list[TimedInstruction] = []
        free_s: dict[object, float] = {}
        for index, (start, end, queue) in enumerate(self._marks):
            start_s, end_s = at_s(start), at_s(end)
            if queue is not None:
                start_s = min(max(start_s, free_s.get(queue, start_s)), end_s)
                free_s[queue] = end_s
            timed.append(TimedInstruction(index, start_s, end_s))
        return timed

    def _mark(self) -> Any:  # noqa: ANN401
        event = self._cuda.Event(enable_timing=True)
        event.record()
        return event


def recorder_for(device: Device, *, is_kept: bool) -> Recorder:
    """The recorder of a step: events of a GPU are only recorded where their times are kept."""
    return CudaRecorder(device) if device.kind == "cuda" and is_kept else HostRecorder()


def _queue(instruction: Instruction) -> object:
    """Instructions that run in order: on a channel between two ranks, or of one kind of collective."""
    match instruction:
        case Send(wire, _, _, peer) | Recv(wire, _, _, peer):
            return type(instruction), wire, peer
        case _:
            return lane(instruction), type(instruction)
