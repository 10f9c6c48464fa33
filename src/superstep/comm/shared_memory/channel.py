"""OperationQueue: a group's lane of ``lanes.cpp``, in Python."""

from __future__ import annotations

import atexit
import ctypes
import weakref
from collections.abc import Sequence
from ctypes import POINTER, c_double, c_int, c_int64, c_void_p
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from superstep.kernels.compile_cpp import BuildResult, build, folder_of, path_of

SOURCES = tuple(
    Path(__file__).parent / name for name in ("lanes.cpp", "lane.h", "line.h", "messages.h", "steps.h", "sums.h")
)
FLAGS = ("-O3", "-march=native", "-std=c++20", "-fPIC", "-shared", "-pthread")

UNDER_WAY = 1


class OperationKind(IntEnum):
    """The operations, numbered as in ``lanes.cpp``."""

    ALL_REDUCE = 0
    REDUCE_SCATTER = 1
    ALL_GATHER = 2
    BROADCAST = 3
    ALL_TO_ALL = 4
    SEND = 5
    RECEIVE = 6


Rule = Literal["sum", "max", "min"]
RULES: dict[Rule, int] = {"sum": 0, "max": 1, "min": 2}

SUMMED = {
    torch.float32: 0,
    torch.float64: 1,
    torch.bfloat16: 2,
    torch.int32: 3,
    torch.int64: 4,
    torch.uint8: 5,
    torch.bool: 5,
    torch.float16: 6,
}
"""Dtypes that can be summed or compared, by their number in ``sums.h``; anything can be sent, as bytes."""

BYTES = SUMMED[torch.uint8]

CLOSED = -4
ENDS = {
    -1: "rank {rank} has not come to it within {patience_s:g} s",
    -2: "the process of rank {rank} has ended",
    -3: "rank {rank} has left",
    CLOSED: "the group was closed here",
    -5: "rank {rank} is at another operation, or has another size for it",
}


class LaneError(Exception):
    """An operation cannot finish; the text says why."""


def is_compiled() -> bool:
    """Whether the C++ library is already compiled."""
    return path_of(SOURCES, FLAGS, folder_of(SOURCES[0])).is_file()


def library() -> BuildResult:
    """The C++ library, compiled if necessary."""
    built = build(SOURCES, FLAGS, folder_of(SOURCES[0]))
    if built.library is not None:
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(built.library, name)
            function.restype, function.argtypes = result, arguments
    return built


_SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "lane_bytes": (c_int64, [c_int64]),
    "lane_open": (c_void_p, [c_int, c_int64, c_int64, c_int64, POINTER(c_int64), c_double, c_int64]),
    "lane_start": (
        c_void_p,
        [
            *(c_void_p, c_int64, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_int64),
            *(POINTER(c_int64), POINTER(c_int64), c_int64),
        ],
    ),
    "lane_wait": (None, [c_void_p, c_void_p]),
    "lane_pass": (None, [c_void_p]),
    "lane_look": (c_int, [c_void_p, POINTER(c_int64)]),
    "lane_drop": (None, [c_void_p]),
    "lane_close": (None, [c_void_p]),
    "lane_free": (None, [c_void_p]),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSlice:
    """A group's part of the shared file.

    Attributes:
        file: its descriptor.
        offset: the begin of the part, in bytes.
        me: this rank's place in the group.
        locks: for each rank of the group, the byte of the file that its process keeps locked: its global rank.
    """

    file: int
    offset: int
    me: int
    locks: Sequence[int]


class OperationQueue:
    """Operations of one group, one after the other in the order of their start.

    Args:
        native: the result of ``library``.
        where: the group's memory, which all of its ranks open.
        patience_s: how long an operation may wait for another rank.
        spin_s: how long it polls before it sleeps: 0 where ranks share cores.
    """

    def __init__(self, native: ctypes.CDLL, where: GroupSlice, *, patience_s: float, spin_s: float) -> None:
        size = len(where.locks)
        self._native = native
        self._patience_s = patience_s
        self._ranks = tuple(where.locks)
        locks = (c_int64 * size)(*where.locks)
        spin_ns = int(spin_s * 1e9)
        self._lane = native.lane_open(where.file, where.offset, where.me, size, locks, patience_s, spin_ns)
        if not self._lane:
            raise LaneError(f"{native.lane_bytes(size):,} bytes of shared memory cannot be mapped")
        self._under_way: list[StartedOperation] = []
        weakref.finalize(self, native.lane_free, self._lane).atexit = False
        # While modules are taken down, tensors go that a thread may still read.
        self._at_exit = partial(_close, weakref.ref(self))
        atexit.register(self._at_exit)

    def start(  # noqa: PLR0913
        self,
        kind: OperationKind,
        given: Tensor,
        out: Tensor,
        count: int,
        *,
        rule: Rule = "sum",
        peer: int = -1,
        going: Sequence[int] | None = None,
        coming: Sequence[int] | None = None,
        is_waited: bool = False,
    ) -> StartedOperation:
        """Start an operation on contiguous tensors, which must not change before it is done.

        Args:
            given: this rank's input.
            out: its output.
            count: elements: of the sum; of one rank's part, where there are parts.
            rule: how numbers of several ranks are combined.
            peer: the other end of a message; the source of a broadcast.
            going: all-to-all: bytes for each rank, in order in ``given``.
            coming: bytes from each rank.
            is_waited: the caller waits for it next, so it needs no thread.
        """
        is_summed = kind <= OperationKind.REDUCE_SCATTER
        if given.dtype == torch.bool and rule == "sum":
            rule = "max"  # true and true are one truth
        number = SUMMED[given.dtype] if is_summed else BYTES
        count = count if is_summed else count * given.element_size()
        sizes = None if going is None else (c_int64 * len(going))(*going)
        others = None if coming is None else (c_int64 * len(coming))(*coming)
        handle = self._native.lane_start(
            self._lane,
            *(kind, number, RULES[rule], peer, given.data_ptr(), out.data_ptr(), count, sizes, others, is_waited),
        )
        started = StartedOperation(self, self._native, handle, (given, out), self._patience_s)
        if not is_waited:
            # Memory that is read or written by a thread stays, whoever forgets what he started.
            self._under_way = [each for each in self._under_way if each.is_under_way()]
            self._under_way.append(started)
        return started

    def wait(self, handle: int) -> None:
        """Return once the operation has ended, in success or failure."""
        self._native.lane_wait(self._lane, handle)

    def name_of(self, place: int) -> int:
        """The global rank of a place in the group."""
        return self._ranks[place] if place >= 0 else place

    def close(self) -> None:
        """Leave the group: others that wait for this rank learn it, and operations here end."""
        self._native.lane_close(self._lane)
        self._under_way.clear()
        atexit.unregister(self._at_exit)

    def pass_on(self) -> None:
        """Move the data that can be moved at once."""
        self._native.lane_pass(self._lane)


def _close(queue: weakref.ref[OperationQueue]) -> None:
    lane = queue()
    if lane is not None:
        lane.close()


class StartedOperation:
    """An operation in progress."""

    def __init__(
        self, lane: OperationQueue, native: ctypes.CDLL, handle: int, tensors: tuple[Tensor, Tensor], patience_s: float
    ) -> None:
        self._lane = lane
        self._native = native
        self._handle = handle
        self._tensors: tuple[Tensor, Tensor] | None = tensors
        self._patience_s = patience_s

    def __del__(self) -> None:
        self._native.lane_drop(self._handle)

    def is_done(self) -> bool:
        """Whether ``wait`` would return at once; moves data first."""
        if self.is_under_way():
            self._lane.pass_on()
        return not self.is_under_way()

    def is_under_way(self) -> bool:
        """Whether it has not ended yet."""
        return self._look()[0] == UNDER_WAY

    def wait(self) -> None:
        """Return once it is done; raises LaneError where it never will be."""
        self._lane.wait(self._handle)
        self._tensors = None
        status, rank = self._look()
        if status:
            raise LaneError(ENDS[status].format(rank=self._lane.name_of(rank), patience_s=self._patience_s))

    def _look(self) -> tuple[int, int]:
        rank = c_int64()
        return self._native.lane_look(self._handle, ctypes.byref(rank)), rank.value
