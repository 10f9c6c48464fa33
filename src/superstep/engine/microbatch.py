"""Microbatches: the parts of a global batch that one rank computes, one at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from superstep.comm.mesh import Mesh
from superstep.data.token_stream import Batch
from superstep.numerics.sending import send
from superstep.plan.resolution.resolve import Plan
from superstep.plan.sharding.sequence import positions


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """One microbatch on this rank: tokens and targets [microbatch, S], or any input [microbatch, ...] and class numbers
    [microbatch].

    Attributes:
        starts: with a document mask: the start of each token's document within its row, of the whole sequences and on
            the host, whichever tokens this rank holds: int64 [microbatch, cp · S].
        streams: inputs of the loss for each target, by name: fp32, of the targets' shape.
    """

    tokens: Tensor
    targets: Tensor
    starts: Tensor | None = None
    streams: Mapping[str, Tensor] = field(default_factory=dict)


def rows(plan: Plan, mesh: Mesh) -> slice:
    """The rows of the global batch of this rank's data-parallel place."""
    return rows_at(plan, mesh.at.dp)


def rows_at(plan: Plan, place: int) -> slice:
    """The rows of the global batch of a data-parallel place."""
    count = plan.microbatches * plan.microbatch
    return slice(place * count, (place + 1) * count)


def microbatches(
    tokens_BS: Tensor,
    targets_BS: Tensor,
    plan: Plan,
    mesh: Mesh,
    starts_BS: Tensor | None = None,
    streams: Mapping[str, Tensor] | None = None,
) -> list[Microbatch]:
    """This rank's tokens of its rows, cut into microbatches on its device, and its streams likewise.

    Each has the whole ``starts_BS`` of its rows on the host, whichever tokens the rank holds.
    """
    device = mesh.device.torch
    names = tuple(streams or {})
    of_tokens = [tokens_BS, targets_BS, *(streams or {}).values()]
    if mesh.shape.cp > 1:
        held = list(positions(tokens_BS.shape[1], cp=mesh.shape.cp, rank=mesh.at.cp))
        of_tokens = [x[:, held] for x in of_tokens]
    count = len(tokens_BS) // plan.microbatch
    starts = [None] * count if starts_BS is None else starts_BS.split(plan.microbatch)
    parts = zip(starts, *(x.split(plan.microbatch) for x in of_tokens), strict=True)
    return [
        Microbatch(
            tokens=send(x, device),
            targets=send(y, device),
            starts=at,
            streams={name: send(stream, device) for name, stream in zip(names, rest, strict=True)},
        )
        for at, x, y, *rest in parts
    ]


def microbatches_of(batch: Batch, plan: Plan, mesh: Mesh) -> list[Microbatch]:
    """The same for a batch with the rows of this rank's data-parallel place."""
    return microbatches(batch.tokens_BS, batch.targets_BS, plan, mesh, batch.starts_BS, batch.streams)
