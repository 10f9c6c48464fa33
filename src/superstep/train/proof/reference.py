"""The reference: the same steps on one process in fp32, written without any of the engine.

No program, no buffers, no wrapped layers: the plain decoder, or a list of units in a row, autograd, and torch's own
optimizer. With a document mask, plain attention of each document by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from superstep.data.stream import Batch
from superstep.model.axes import units
from superstep.model.decoder import Decoder, flash
from superstep.model.exchange import Local, Now
from superstep.model.unit import ParamSpec, Row, UnitSpec, initial, parameters
from superstep.numerics.loss import cross_entropy_sum
from superstep.plan.config import TrainConfig
from superstep.plan.model.shape import ModelShape
from superstep.train.schedule import rate


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceStep:
    """One step as one device computes it: what the layout must reproduce. The loss is the cross entropy alone; the
    routers' losses are in the gradients.
    """

    loss: float
    grad_norm: float
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def reference_steps(shape: ModelShape, train: TrainConfig, batches: Sequence[Batch]) -> Iterator[ReferenceStep]:
    """Train on whole global batches, one after the other.

    Args:
        shape: the model.
        train: the optimisation.
        batches: one for each step, with all rows of the global batch.
    """
    exchange = Local()
    model = Decoder(shape)
    specs = list(parameters(model, units(shape)).values())
    with torch.no_grad():
        for spec, param in specs:
            param.copy_(initial(spec, param.shape, train.seed))

    def forward(tokens: Tensor, now: Now, sight: Mapping[str, Any]) -> Tensor:
        exchange.now = now
        logits: Tensor = model(tokens, exchange=exchange, **sight)
        return logits

    yield from _steps(forward, specs, cross_entropy_sum, train, batches)


def unit_steps(specs: Sequence[UnitSpec], train: TrainConfig, batches: Sequence[Batch]) -> Iterator[ReferenceStep]:
    """The same for units of anyone's: each row's input goes through them one after the other."""
    model = Row(specs, train.seed)
    loss_sum = specs[-1].loss or cross_entropy_sum
    yield from _steps(lambda x, _, sight: model(x, **sight), list(model.parts.values()), loss_sum, train, batches)


def _steps(
    forward: Callable[[Tensor, Now, Mapping[str, Any]], Tensor],
    specs: Sequence[tuple[ParamSpec, nn.Parameter]],
    loss_sum: Callable[[Tensor, Tensor], Tensor],
    train: TrainConfig,
    batches: Sequence[Batch],
) -> Iterator[ReferenceStep]:
    params = [param for _, param in specs]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in params if p.ndim > 1], "weight_decay": train.weight_decay},
            {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
        ],
        betas=(train.beta1, train.beta2),
        eps=train.eps,
    )
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        loss = torch.zeros(())
        # Row by row: nothing of how a layout splits the batch is repeated here.
        for number, (tokens, targets) in enumerate(zip(batch.tokens_BS, batch.targets_BS, strict=True)):
            now = Now(sequences=(number,), batch_sequences=len(batch.tokens_BS), seed=train.seed, step=step)
            sight = {} if batch.starts_BS is None else _documents(batch.starts_BS[number].tolist())
            row = loss_sum(forward(tokens[None], now, sight), targets[None]) / batch.valid_tokens
            row.backward()
            loss += row.detach()
        gradients = {n: x.clone() for spec, p in specs if p.grad is not None for n, x in spec.views(p.grad)}
        norm = torch.nn.utils.clip_grad_norm_(params, train.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = rate(train, step)
        optimizer.step()
        yield ReferenceStep(
            loss=float(loss),
            grad_norm=float(norm),
            gradients=gradients,
            weights={name: x.clone() for spec, p in specs for name, x in spec.views(p.detach())},
        )


def _documents(starts: Sequence[int]) -> dict[str, Any]:
    """What a row's tokens see whose documents start at ``starts``: attention of one document after the other, and
    positions that begin at 0 in each.
    """
    ends = [*sorted(set(starts)), len(starts)]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.cat([flash(q[:, a:b], k[:, a:b], v[:, a:b]) for a, b in pairwise(ends)], dim=1)

    return {"attend": attend, "positions": torch.cat([torch.arange(b - a) for a, b in pairwise(ends)])[None]}
