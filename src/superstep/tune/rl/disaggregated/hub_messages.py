"""Messages between a sampler's ranks and the trainer's rank 0 over a ``hub_connection``, as MessagePack.

No pickle: a message can only be one of these types.
"""

from __future__ import annotations

import msgspec

from superstep.tune.rl.sampling import TaskGroup


class SamplerHello(msgspec.Struct, frozen=True, tag=True):
    """From a sampler's rank: its numbers."""

    sampler: int
    rank: int


class SampledGroup(msgspec.Struct, frozen=True, tag=True):
    """From a sampler's first rank: a group of answers."""

    group: TaskGroup


class Retired(msgspec.Struct, frozen=True, tag=True):
    """From a sampler's first rank: it does not need a version any more."""

    version: int


class SamplerEnd(msgspec.Struct, frozen=True, tag=True):
    """From a sampler's rank: it has reached the end of its lane."""


class Version(msgspec.Struct, frozen=True, tag=True):
    """From the trainer: an available snapshot, and its folder."""

    version: int
    path: str


class EndSampling(msgspec.Struct, frozen=True, tag=True):
    """From the trainer: no more samples are needed."""


FromSampler = SamplerHello | SampledGroup | Retired | SamplerEnd
FromTrainer = Version | EndSampling

encode = msgspec.msgpack.Encoder().encode
decode_from_sampler = msgspec.msgpack.Decoder(FromSampler).decode
decode_from_trainer = msgspec.msgpack.Decoder(FromTrainer).decode
