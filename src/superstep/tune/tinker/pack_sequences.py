"""A request's sequences as microbatches: sequences of like lengths are padded to one, within a number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from superstep.comm.device import Device
from superstep.data.batch import TOKENS
from superstep.engine.values.microbatch import Microbatch
from superstep.numerics.loss import IGNORE
from superstep.tune.tinker.losses import TrainingSequence

ROUND_TOKENS = 16
"""Rows are padded to multiples of this number of tokens, so that few lengths occur."""


def pack_sequences(
    sequences: Sequence[TrainingSequence], batch_tokens: int, most_tokens: int, device: Device
) -> Iterator[tuple[list[int], Microbatch]]:
    """The microbatches, each with the places of its rows among the sequences.

    Args:
        sequences: of one request.
        batch_tokens: of a microbatch of several sequences, padded, at most.
        most_tokens: of a sequence.
        device: of the microbatches.
    """

    def padded(at: int) -> int:
        return min(-(-len(sequences[at].tokens) // ROUND_TOKENS) * ROUND_TOKENS, most_tokens)

    def microbatch(group: Sequence[int], first: int) -> Microbatch:
        return _microbatch([sequences[at] for at in group], padded(group[-1]), first, device)

    group: list[int] = []
    first = 0
    for at in sorted(range(len(sequences)), key=lambda at: len(sequences[at].tokens)):
        if group and (len(group) + 1) * padded(at) > batch_tokens:
            yield group, microbatch(group, first)
            first += len(group)
            group = []
        group.append(at)
    yield group, microbatch(group, first)


def _microbatch(sequences: Sequence[TrainingSequence], length: int, first: int, device: Device) -> Microbatch:
    def rows(get: Callable[[TrainingSequence], object], dtype: torch.dtype, rest: float) -> torch.Tensor:
        made = torch.full((len(sequences), length), rest, dtype=dtype)
        for row, one in enumerate(sequences):
            made[row, : len(one.tokens)] = torch.tensor(get(one), dtype=dtype)
        return made.to(device.torch)

    names = sequences[0].streams
    streams = {name: rows(lambda one, name=name: one.streams[name], torch.float32, 0.0) for name in names}  # type: ignore[misc]
    if "weights" not in streams:
        # A token without an advantage has no gradient and must not count in the metrics.
        streams["weights"] = (streams["advantages"] != 0).float()
    return Microbatch(
        fields={TOKENS: rows(lambda one: one.tokens, torch.long, 0)},
        targets=rows(lambda one: one.targets, torch.long, IGNORE),
        streams=streams,
        first=first,
    )
