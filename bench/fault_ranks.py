"""Ranks of the fault benches: processes that save or copy a state in which every value says its step."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from superstep.errors import StateError
from superstep.state.all_or_none import Peers
from superstep.state.checkpoint import load, save
from superstep.state.checkpoint_dirs import checkpoint_at
from superstep.state.manifest import Position
from superstep.state.tensor_piece import Kind, TensorPiece, state_kinds
from superstep.state.verify import SingleProcess, drop_old

SHAPES: dict[str, tuple[int, ...]] = {"a.weight": (96, 128), "b.weight": (64, 64), "c.bias": (128,)}
RANKS = 3
STATE = state_kinds("adamw")


@dataclass(frozen=True)
class Linked:
    """A rank among processes, each with a pipe to the one between them."""

    rank: int
    size: int
    pipe: Connection

    def gather(self, value: Any, form: Any) -> list[Any]:
        """Every rank's value."""
        self.pipe.send(value)
        found: list[Any] = self.pipe.recv()
        return found


def pieces(step: int, rank: int = 0, size: int = 1) -> Iterator[TensorPiece]:
    """A rank's part of a state in which every value says its step."""
    for number, kind in enumerate(STATE):
        for name, shape in SHAPES.items():
            numel = int(torch.tensor(shape).prod())
            low, high = numel * rank // size, numel * (rank + 1) // size
            values = torch.full((high - low,), 1000.0 * step + number)
            index = tuple(slice(0, n) for n in shape)
            yield TensorPiece(kind=kind, name=name, shape=shape, index=index, low=low, values=values, is_owner=True)


def write(root: Path, step: int, peers: Peers, keep: int = 1) -> None:
    """Save a step and drop those before, as a session does."""
    place, of = checkpoint_at(root, step), tensors()
    mine = pieces(step, peers.rank, peers.size)
    save(place, mine, Position(step=step), peers, tensors=of, beside={"config.json": "{}"})
    drop_old(place, keep, peers)


def tensors() -> dict[Kind, dict[str, tuple[int, ...]]]:
    """The shapes of the state."""
    return dict.fromkeys(STATE, SHAPES)


def what_is(folder: Path) -> str:
    """``step K`` where every value of a checkpoint is of step K; else ``mixed``, or ``unloadable``."""
    target = list(pieces(0))
    try:
        step = load(folder, target, SingleProcess()).step
    except StateError:
        return "unloadable"
    right = all(torch.equal(a.values, b.values) for a, b in zip(target, pieces(step), strict=True))
    return f"step {step}" if right else "mixed"


def forked(work: Callable[[], None]) -> int:
    """The number of a process that does the work and ends."""
    process = os.fork()
    if process:
        return process
    status = 1
    with contextlib.suppress(BaseException):
        work()
        status = 0
    os._exit(status)


def between(pipes: Sequence[Connection]) -> None:
    """What stands for the launcher: hands values on until a rank has gone."""
    while True:
        values = [pipe.recv() for pipe in pipes]
        for pipe in pipes:
            pipe.send(values)
