"""Checkpoints small enough to be flipped bit by bit, and ranks that save them as threads of one process."""

import itertools
import threading
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from superstep.comm.codec import Codec
from superstep.state.checkpoint import save
from superstep.state.checkpoint_dirs import checkpoint_at
from superstep.state.manifest import Position
from superstep.state.tensor_piece import TensorPiece, state_kinds

SHAPES = {"a.weight": (6, 4), "b.weight": (5,), "scale": ()}

STATE = state_kinds("adamw")


@dataclass(frozen=True)
class Alone:
    rank: int = 0
    size: int = 1

    def gather(self, value, form):
        return [value]


class Meeting:
    """Where ranks that are threads gather messages, as processes do; ``between`` is called by each rank once all have
    come.
    """

    def __init__(self, size, between=lambda rank: None):
        self.size = size
        self.between = between
        self._values = [None] * size
        self._barrier = threading.Barrier(size, timeout=30)

    def gather(self, rank, value, form):
        codec = Codec(form)
        self._values[rank] = codec.encode(value)
        self._barrier.wait()
        found = [codec.decode(each) for each in self._values]
        self.between(rank)
        self._barrier.wait()
        return found


@dataclass(frozen=True)
class Thread:
    meeting: Meeting
    rank: int

    @property
    def size(self):
        return self.meeting.size

    def gather(self, value, form):
        return self.meeting.gather(self.rank, value, form)


def on_threads(size, work, between=lambda rank: None):
    """What ``work(peers)`` returns or raises on each of so many ranks."""
    meeting = Meeting(size, between)
    found = [None] * size

    def run(rank):
        try:
            found[rank] = work(Thread(meeting, rank))
        except Exception as error:  # noqa: BLE001
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def truth(kind, name, shape):
    generator = torch.Generator().manual_seed(zlib.crc32(f"{kind} {name}".encode()))
    return torch.randn(shape, generator=generator)


def zeros(kind, name, shape):
    return torch.zeros(shape)


def pieces(fill, *, shapes=SHAPES, cuts=1, runs=2):
    """The state cut into ``cuts`` blocks of columns where they divide, each cut again in runs of elements."""
    found = []
    for kind in STATE:
        for name, shape in shapes.items():
            columns = cuts if len(shape) > 1 and shape[-1] % cuts == 0 else 1
            for block in range(columns):
                index = tuple(slice(0, n) for n in shape)
                if columns > 1:
                    width = shape[-1] // columns
                    index = (*index[:-1], slice(block * width, (block + 1) * width))
                size = int(np.prod([s.stop - s.start for s in index]))
                whole = fill(kind, name, shape)[index].reshape(-1)
                edges = [size * number // runs for number in range(runs + 1)]
                for low, high in itertools.pairwise(edges):
                    values = whole[low:high].clone()
                    found.append(
                        TensorPiece(
                            kind=kind, name=name, shape=shape, index=index, low=low, values=values, is_owner=True
                        )
                    )
    return found


def write(root, step=7, *, cuts=2, peers=None, beside=None):
    """A checkpoint of what ``truth`` says, with these texts beside its tensors."""
    place = checkpoint_at(Path(root), step)
    save(
        place,
        pieces(truth, cuts=cuts),
        Position(step=step, samples=28, tokens=99),
        peers or Alone(),
        tensors=dict.fromkeys(STATE, SHAPES),
        beside=beside or {"config.json": "{}"},
    )
    return place
