"""Messages between a sampler's ranks and the trainer's rank 0 over a ``hub_connection``.

A message with another name, a missing or unknown field or a value of another type is refused where it is decoded.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from superstep.comm.codec import Codec
from superstep.tune.rl.sampling import TaskGroup


class HubAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the hub listens, as the ranks of a launch find it. ``secret``: of the hub, unless the launch has one."""

    host: str
    port: int
    secret: bytes | None


class SamplerHello(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """From a sampler's rank: its numbers."""

    sampler: int
    rank: int


class SampledGroup(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """From a sampler's first rank: a group of answers."""

    group: TaskGroup


class Retired(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """From a sampler's first rank: it does not need a version any more."""

    version: int


class SamplerEnd(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """From a sampler's rank: it has reached the end of its lane."""


class RemainingProgram(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """From the trainer, first of all: what is left to do.

    Attributes:
        text: of the program.
        tasks: task numbers of places that have exchanged theirs.
    """

    text: str
    tasks: dict[int, int]


class Version(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """From the trainer: an available snapshot, and its folder."""

    version: int
    path: Path


class EndSampling(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """From the trainer: no more samples are needed; or the run has gone back, and goes on with another program."""

    goes_on: bool


FromSampler = SampledGroup | Retired | SamplerEnd
FromTrainer = RemainingProgram | Version | EndSampling

ADDRESS: Codec[HubAddress] = Codec(HubAddress)
SAMPLER_HELLO: Codec[SamplerHello] = Codec(SamplerHello)
FROM_SAMPLER: Codec[FromSampler] = Codec(FromSampler)
FROM_TRAINER: Codec[FromTrainer] = Codec(FromTrainer)
