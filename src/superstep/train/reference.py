"""The reference: the same steps on one process in fp32, written without any of the engine.

No program, no buffers, no wrapped layers: the plain decoder, or a list of units in a row, autograd, and torch's own
optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from superstep.data.stream import Batch
from superstep.model.axes import units
from superstep.model.decoder import Decoder
from superstep.model.unit import Row, UnitSpec, global_tensors, initial
from superstep.numerics.loss import cross_entropy_sum
from superstep.plan.config import TrainConfig
from superstep.plan.shape import ModelShape
from superstep.train.schedule import rate


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceStep:
    """One step as one device computes it: what the layout must reproduce."""

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
    model = Decoder(shape)
    tensors = global_tensors(model, units(shape))
    specs = {p.name: p for unit in units(shape) for p in unit.params.values()}
    with torch.no_grad():
        for name, param in tensors.items():
            param.copy_(initial(specs[name], param.shape, train.seed))
    yield from _steps(model, tensors, cross_entropy_sum, train, batches)


def unit_steps(specs: Sequence[UnitSpec], train: TrainConfig, batches: Sequence[Batch]) -> Iterator[ReferenceStep]:
    """The same for units of anyone's: each row's input goes through them one after the other."""
    model = Row(specs, train.seed)
    yield from _steps(model, model.tensors, specs[-1].loss or cross_entropy_sum, train, batches)


def _steps(
    model: nn.Module,
    tensors: Mapping[str, nn.Parameter],
    loss_sum: Callable[[Tensor, Tensor], Tensor],
    train: TrainConfig,
    batches: Sequence[Batch],
) -> Iterator[ReferenceStep]:
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in tensors.values() if p.ndim > 1], "weight_decay": train.weight_decay},
            {"params": [p for p in tensors.values() if p.ndim < 2], "weight_decay": 0.0},
        ],
        betas=(train.beta1, train.beta2),
        eps=train.eps,
    )
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        loss = torch.zeros(())
        # Row by row: nothing of how a layout splits the batch is repeated here.
        for tokens, targets in zip(batch.tokens_BS, batch.targets_BS, strict=True):
            row = loss_sum(model(tokens[None]), targets[None]) / batch.valid_tokens
            row.backward()
            loss += row.detach()
        gradients = {name: p.grad.clone() for name, p in tensors.items() if p.grad is not None}
        norm = torch.nn.utils.clip_grad_norm_(list(tensors.values()), train.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = rate(train, step)
        optimizer.step()
        yield ReferenceStep(
            loss=float(loss),
            grad_norm=float(norm),
            gradients=gradients,
            weights={name: p.detach().clone() for name, p in tensors.items()},
        )
