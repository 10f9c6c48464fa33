"""What a sampler's ranks and the trainer's rank 0 send each other over a ``hub_connection``, as MessagePack.

No pickle: a message of one can do nothing to the other but be one of these.
"""

from __future__ import annotations

import msgspec

from superstep.tune.rl.sampling import TaskGroup


class SamplerHello(msgspec.Struct, frozen=True, tag=True):
    """From a sampler's rank: whose line this is."""

    sampler: int
    rank: int


class SampledGroup(msgspec.Struct, frozen=True, tag=True):
    """From a sampler's first rank: a group of answers."""

    group: TaskGroup


class Retired(msgspec.Struct, frozen=True, tag=True):
    """From a sampler's first rank: it has drawn all that it shall with a version."""

    version: int


class SamplerEnd(msgspec.Struct, frozen=True, tag=True):
    """From a sampler's rank: it has come to the end of its lane."""


class Version(msgspec.Struct, frozen=True, tag=True):
    """From the trainer: a snapshot that may be taken, and its folder."""

    version: int
    path: str


class EndSampling(msgspec.Struct, frozen=True, tag=True):
    """From the trainer: no more is wanted."""


FromSampler = SamplerHello | SampledGroup | Retired | SamplerEnd
FromTrainer = Version | EndSampling

encode = msgspec.msgpack.Encoder().encode
decode_from_sampler = msgspec.msgpack.Decoder(FromSampler).decode
decode_from_trainer = msgspec.msgpack.Decoder(FromTrainer).decode
