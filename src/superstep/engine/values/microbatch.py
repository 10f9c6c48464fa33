"""Microbatches: the parts of a global batch that one rank computes, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from superstep.comm.mesh import Mesh
from superstep.data.batch import TOKENS, Batch, add_further_tokens
from superstep.model.unit import INPUT
from superstep.numerics.sending import send
from superstep.plan.resolution.resolve import Plan
from superstep.plan.sharding.sequence import positions


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """One microbatch on this rank.

    Attributes:
        fields: by name, [microbatch, ...]: ``tokens`` of token files are ids [microbatch, S].
        targets: [microbatch, S], or class numbers [microbatch].
        starts: with a document mask: the start of each token's document within its row, of the whole sequences and on
            the host, whichever tokens this rank holds: int64 [microbatch, cp · S].
        streams: inputs of the loss for each target, by name: fp32, of the targets' shape.
        reads: the field that the first unit reads.
        first: the number of its first row in the global batch.
        numbers: where context-parallel ranks share the tokens that encoders' rows belong to: how many of the same token
            come before each in its row, int64 [microbatch, S].
    """

    fields: Mapping[str, Tensor]
    targets: Tensor
    starts: Tensor | None = None
    streams: Mapping[str, Tensor] = field(default_factory=dict)
    reads: str = TOKENS
    first: int
    numbers: Tensor | None = None

    @property
    def input(self) -> Tensor:
        """The input of the first unit."""
        return self.fields[self.reads]


def example_of(batch: Batch) -> dict[str, Tensor]:
    """One row of each field, and of the first unit's input."""
    return {INPUT: batch.input[:1], **{name: values[:1] for name, values in batch.fields.items()}}


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
    """``microbatches_of`` for the rows of a batch with one field, which the first unit reads."""
    batch = Batch({TOKENS: tokens_BS}, targets_BS, len(targets_BS), starts_BS, streams or {})
    return microbatches_of(batch, plan, mesh)


def microbatches_of(batch: Batch, plan: Plan, mesh: Mesh, place: int | None = None) -> list[Microbatch]:
    """The rows of this rank's data-parallel place, or of another, cut into microbatches on its device; of each the
    tokens that a context-parallel rank has.

    Each has the whole ``starts_BS`` of its rows on the host, whichever tokens the rank holds.
    """
    if plan.mtp_weight is not None:
        batch = add_further_tokens(batch)
    device = mesh.device.torch
    count = len(batch.targets_BS) // plan.microbatch
    starts = [None] * count if batch.starts_BS is None else batch.starts_BS.split(plan.microbatch)
    held: list[int] | None = None
    numbers: list[Tensor | None] = [None] * count
    if mesh.shape.cp > 1:
        held = list(positions(batch.targets_BS.shape[1], cp=mesh.shape.cp, rank=mesh.at.cp))

    def parts(whole: Tensor, *, is_shared: bool = True) -> Iterator[Tensor]:
        own = whole if held is None or not is_shared else whole[:, held]
        return (send(part, device) for part in own.split(plan.microbatch))

    def parts_of(by_name: Mapping[str, Tensor], shares: Callable[[str], bool]) -> list[dict[str, Tensor]]:
        split = [parts(whole, is_shared=shares(name)) for name, whole in by_name.items()]
        return [dict(zip(by_name, (next(each) for each in split), strict=True)) for _ in range(count)]

    if held is not None and plan.shared_fields is not None:
        numbers = list(parts(number_equal(batch.tokens_BS)))
    fields, streams = parts_of(batch.fields, plan.shares), parts_of(batch.streams, lambda _: True)
    every = zip(fields, parts(batch.targets_BS), starts, streams, numbers, strict=True)
    return [
        Microbatch(
            fields=fields,
            targets=targets,
            starts=at,
            streams=streams,
            reads=batch.reads,
            first=((mesh.at.dp if place is None else place) * count + m) * plan.microbatch,
            numbers=number,
        )
        for m, (fields, targets, at, streams, number) in enumerate(every)
    ]


def number_equal(tokens_BS: Tensor) -> Tensor:
    """How many of the same token come before each in its row: int64 [B, S]."""
    sorted_BS, order_BS = tokens_BS.sort(dim=1, stable=True)
    places_BS = torch.arange(tokens_BS.shape[1]).expand_as(tokens_BS).contiguous()
    firsts_BS = places_BS.clone()
    firsts_BS[:, 1:] *= sorted_BS[:, 1:] != sorted_BS[:, :-1]
    return torch.empty_like(tokens_BS).scatter_(1, order_BS, places_BS - firsts_BS.cummax(1).values)
