"""The reference: the same steps on one process in fp32, without the engine.

No program, no buffers, no wrapped layers: the plain decoder, or a graph of units, autograd, and torch's own
optimizer. With a document mask, plain attention of each document by itself. It must be more precise than the runs that
it judges, so it sums in fp64 what torch sums in fp32: losses and norms (``clip_grad_norm_`` is off by 3e-5 at 2^21
elements and by 6e-4 at 2^24).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from math import inf, sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from superstep.data.batch import FURTHER_TARGETS, Batch
from superstep.kernels.position_bias import Bias
from superstep.model.axes import units
from superstep.model.by_place.dropout import compute_by_place, run_with_noise
from superstep.model.custom.sample_groups import count_together
from superstep.model.decoder import Decoder, flash
from superstep.model.mixers.gated_delta import WholeScan
from superstep.model.mixers.short_convolution import AddTaps
from superstep.model.mixture.expert_dispatch import DispatchContext, LocalDispatch
from superstep.model.unit import (
    INPUT,
    Fields,
    Loss,
    ParamSpec,
    UnitGraph,
    UnitSpec,
    in_phase,
    initial,
    list_phases,
    parameters,
    step_of_statistic,
)
from superstep.numerics.loss import IGNORE
from superstep.numerics.noise import SamplePlace
from superstep.numerics.own_loss import load_loss
from superstep.plan.config import TrainConfig
from superstep.plan.model.attention_rule import PLAIN, AttentionRule
from superstep.plan.model.axes import NEXT_TOKENS
from superstep.plan.model.shape import ModelShape
from superstep.plan.optimizers import MOMENTS
from superstep.train.lr_schedule import rate
from superstep.train.proof.reference_optimizer import make_optimizer

Forward = Callable[[Fields, DispatchContext, Mapping[str, Any]], Tensor]
Parts = Sequence[tuple[ParamSpec, nn.Parameter]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceStep:
    """One step on one device, which the layout must reproduce. The loss is the cross entropy alone; the routers' losses
    are in the gradients.

    Attributes:
        grad_norm: before clipping.
        clip_norm: the norm that gradients were clipped to.
        gradients: before clipping.
        moments: of each kind. The first are sums of clipped gradients: unlike an update of Adam's they are not divided
            by the gradient's own size, so a clip by a wrong number shows.
    """

    loss: float
    grad_norm: float
    clip_norm: float
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    moments: dict[str, dict[str, Tensor]]


def reference_steps(
    shape: ModelShape, train: TrainConfig, batches: Sequence[Batch], *, clips: bool = False
) -> Iterator[ReferenceStep]:
    """Train on whole global batches, one after the other.

    Args:
        shape: the model.
        train: the train section.
        batches: one for each step, with all rows of the global batch. Valid tokens are counted again; a given divisor
            is used, and ``weights`` multiply the cross entropy.
        clips: lower ``clip_norm`` to a quarter of the first gradients' norm where it is larger, so that it has an
            effect.
    """
    if shape.mtp_weight is not None:
        forward, specs = _units(units(shape), train.seed)
        losses = TwoTokenLosses(shape.mtp_weight)
        extended = [*map(losses.extend, batches)]
        yield from _steps([_PhaseParts(forward, losses, specs, train)], (), train, extended, clips=clips)
        return
    forward, specs = _decoder(shape, train.seed)
    yield from _steps([_PhaseParts(forward, token_losses(train), specs, train)], (), train, batches, clips=clips)


def _decoder(shape: ModelShape, seed: int) -> tuple[Forward, Parts]:
    exchange, shape = LocalDispatch(), replace(shape, mtp_weight=None)
    model = Decoder(shape)
    current = compute_by_place(model)
    specs = list(parameters(model, units(shape)).values())
    with torch.no_grad():
        for spec, param in specs:
            param.copy_(initial(spec, param.shape, seed))

    def forward(fields: Fields, now: DispatchContext, sight: Mapping[str, Any]) -> Tensor:
        exchange.now = now
        # A module's path in the decoder is its unit's name and its path in that.
        return run_with_noise(model, current, [fields[INPUT]], {"exchange": exchange, **sight}, _place(now))

    return forward, specs


def unit_steps(
    specs: Sequence[UnitSpec],
    train: TrainConfig,
    batches: Sequence[Batch],
    *,
    phases: Mapping[str, TrainConfig] | None = None,
    clips: bool = False,
) -> Iterator[ReferenceStep]:
    """The same for a list of units, each after those whose outputs it takes. A loss of their own is divided by the
    batch's divisor. ``phases`` has the train section of phases with settings of their own.
    """
    forward, parts = _units(specs, train.seed)
    frozen = [part for part in parts if part[0].is_frozen]
    phase_of = {param.name: spec.phase for spec in specs for param in spec.params.values()}
    losses: Mapping[str, Loss | TokenLosses] = specs[-1].losses or {"": specs[-1].loss or token_losses(train)}
    parts_of_phases = [
        _PhaseParts(
            partial(forward, phase=name),
            loss,
            [part for part in parts if not part[0].is_frozen and phase_of[part[0].name] == name],
            (phases or {}).get(name, train),
        )
        for name, loss in losses.items()
    ]
    yield from _steps(parts_of_phases, frozen, train, batches, clips=clips, together=count_together(specs))


def _units(specs: Sequence[UnitSpec], seed: int) -> tuple[Callable[..., Tensor], Parts]:
    """The forward of units in a ``phase``, "" for a step of one, and their parameters."""
    model = UnitGraph(specs, seed)

    def forward(fields: Fields, now: DispatchContext, sight: Mapping[str, Any], phase: str = "") -> Tensor:
        out: Tensor = model(fields, place=_place(now), phase=phase, **sight)
        return out

    return forward, list(model.parts.values())


def _place(now: DispatchContext) -> SamplePlace:
    """The place of some rows' random numbers."""
    return SamplePlace(
        seed=now.seed,
        step=now.step or 0,
        sample=now.sequences[0],
        samples=now.batch_sequences,
        is_training=now.step is not None,
    )


@torch.no_grad()
def reference_validation(model: ModelShape | Sequence[UnitSpec], seed: int, batches: Sequence[Batch]) -> float:
    """Nats per counted target over some batches, with the initial weights."""
    if not isinstance(model, ModelShape):  # of several phases the loss of the first
        model = in_phase(model, list_phases(model)[0]) if list_phases(model) else model
    forward, _ = _decoder(model, seed) if isinstance(model, ModelShape) else _units(model, seed)
    own = None if isinstance(model, ModelShape) else model[-1].loss
    loss_sum = own or TokenLosses()
    nats, count = 0.0, 0
    for batch in batches:
        for number, targets in enumerate(batch.targets_BS):
            now = DispatchContext(sequences=(number,), batch_sequences=len(batch.targets_BS), seed=seed, step=None)
            nats += float(
                loss_sum(forward(_rows_of(batch, slice(number, number + 1)), now, _sight(batch, number)), targets[None])
            )
            count += int((targets != IGNORE).sum())
    return nats / count


class TokenLosses:
    """The loss of every counted target, fp32 each, times its weight, summed in fp64.

    Args:
        function: of their log-probabilities; None is the cross entropy.
    """

    def __init__(self, function: Callable[[Tensor], Tensor] | None = None) -> None:
        self._function = function

    def __call__(self, logits: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        counts = targets.flatten() != IGNORE
        each = F.cross_entropy(logits.flatten(0, -2).float()[counts], targets.flatten()[counts], reduction="none")
        if self._function is not None:
            each = self._function(-each)
        if weights is not None:
            each = each * weights.flatten()[counts]
        return each.double().sum()


class TwoTokenLosses(TokenLosses):
    """The loss of the next token, to which that of the token after it adds its weighted gradient."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self._weight = weight

    def extend(self, batch: Batch) -> Batch:
        """The batch with the token after each, and that after it as a target, unless in another document."""
        following, further = batch.targets_BS.clamp(min=0), torch.full_like(batch.targets_BS, IGNORE)
        for row, targets in enumerate(batch.targets_BS):
            starts = [0] * len(targets) if batch.starts_BS is None else batch.starts_BS[row].tolist()
            for place in range(len(targets) - 1):
                following[row, place] = batch.tokens_BS[row, place + 1]
                if starts[place] == starts[place + 1]:
                    further[row, place] = targets[place + 1]
        return replace(batch, fields={**batch.fields, NEXT_TOKENS: following, FURTHER_TARGETS: further})

    def of_rows(self, logits: Tensor, batch: Batch, some: slice) -> Tensor:
        """The loss of some rows, whose logits come twice."""
        first, second = logits.chunk(2)
        further = self._weight * self(second, batch.fields[FURTHER_TARGETS][some])
        return self(first, batch.targets_BS[some]) + further - further.detach()


def token_losses(train: TrainConfig) -> TokenLosses:
    """The loss of ``train.loss``, or the cross entropy."""
    return TokenLosses(None if train.loss is None else load_loss(train.loss))


def _divisor(batch: Batch, *, is_counted: bool) -> float:
    """The divisor of a batch's loss: its own, or its valid tokens, optionally counted again."""
    if batch.divisor is not None:
        return batch.divisor
    return int((batch.targets_BS != IGNORE).sum()) if is_counted else batch.valid_tokens


@dataclass(slots=True)
class _PhaseParts:
    """What one phase trains, and its forward, loss, settings and optimizer."""

    forward: Forward
    loss_sum: TokenLosses | Loss
    specs: Parts
    train: TrainConfig
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.optimizer = make_optimizer(self.train, [param for _, param in self.specs])


def _steps(
    phases: Sequence[_PhaseParts],
    frozen: Parts,
    train: TrainConfig,
    batches: Sequence[Batch],
    *,
    clips: bool,
    together: int = 1,
) -> Iterator[ReferenceStep]:
    every = [(part, phase.optimizer) for phase in phases for part in phase.specs]
    # Weights beside adapters are no part of their state.
    stored = [] if any(spec.factor is not None for (spec, _), _ in every) else frozen
    lowered = inf
    for step, batch in enumerate(batches):
        loss, squares, gradients = 0.0, 0.0, dict[str, Tensor]()
        for phase in phases:
            for (_, param), optimizer in every:
                param.requires_grad_(optimizer is phase.optimizer)
            phase.optimizer.zero_grad()
            loss += _add_gradients(phase, batch, train, step, together)
            # Parameters without influence on the loss have a gradient too.
            grads = [_gradient_of(param) for _, param in phase.specs]
            named = list(zip(phase.specs, grads, strict=True))
            gradients |= {n: x.clone() for (spec, _), grad in named for n, x in spec.views(grad)}
            norm = sqrt(sum(_square(grad) for (spec, _), grad in named if not spec.is_statistic))
            if clips and step == 0 and phase is phases[0] and norm > 0:
                lowered = float(f"{norm / 4:.1g}")
            above = norm / min(phase.train.clip_norm, lowered)
            _update(phase, named, above, rate(phase.train, step), train.clip_row_norm)
            squares += norm**2
        kinds = MOMENTS[train.optimizer]
        # Statistics have moments that stay zero.
        states = [(spec, o.state[p] or {kind: torch.zeros_like(p) for kind in kinds}) for (spec, p), o in every]
        yield ReferenceStep(
            loss=loss,
            grad_norm=sqrt(squares),
            clip_norm=min(train.clip_norm, lowered),
            gradients=gradients,
            weights={n: x.clone() for spec, p in (*(e for e, _ in every), *stored) for n, x in spec.views(p.detach())},
            moments={kind: {n: x.clone() for spec, s in states for n, x in spec.views(s[kind])} for kind in kinds},
        )


def _gradient_of(param: nn.Parameter) -> Tensor:
    if param.grad is None:
        return torch.zeros_like(param)
    return param.grad.to_dense() if param.grad.is_sparse else param.grad


def _add_gradients(phase: _PhaseParts, batch: Batch, train: TrainConfig, step: int, together: int) -> float:
    """Add the gradients of a batch; its loss. Row by row, or group by group: independent of a layout's split."""
    divisor, loss = _divisor(batch, is_counted=isinstance(phase.loss_sum, TokenLosses)), 0.0
    for number in range(0, len(batch.targets_BS), together):
        now = DispatchContext(
            sequences=tuple(range(number, number + together)),
            batch_sequences=len(batch.targets_BS),
            seed=train.seed,
            step=step,
        )
        part = _loss_of(phase.forward, phase.loss_sum, batch, now) / divisor
        part.backward()
        loss += float(part.detach())
    return loss


def _update(
    phase: _PhaseParts,
    named: Sequence[tuple[tuple[ParamSpec, nn.Parameter], Tensor]],
    above: float,
    lr: float,
    row_norm: float | None,
) -> None:
    """Update what a phase trains by gradients that are divided by ``above``, if that is more than 1; rows of sparse
    gradients are shortened to ``row_norm``.
    """
    for (spec, param), grad in named:
        param.grad = None if spec.is_statistic else grad.div_(max(above, 1.0))
        if spec.is_sparse and row_norm is not None:
            grad.mul_((row_norm / grad.norm(dim=1, keepdim=True).clamp_min(1e-30)).clamp_max(1.0))
        if spec.is_statistic:
            param.data += step_of_statistic(spec, grad)
    for group in phase.optimizer.param_groups:
        group["lr"] = lr
    phase.optimizer.step()


def _loss_of(forward: Forward, loss_sum: TokenLosses | Loss, batch: Batch, now: DispatchContext) -> Tensor:
    """The loss of some rows, summed."""
    some = slice(now.sequences[0], now.sequences[-1] + 1)
    out, weights = forward(_rows_of(batch, some), now, _sight(batch, some.start)), batch.streams.get("weights")
    if isinstance(loss_sum, TwoTokenLosses):
        return loss_sum.of_rows(out, batch, some)
    if weights is None:
        return loss_sum(out, batch.targets_BS[some])
    assert isinstance(loss_sum, TokenLosses), "a unit's own loss knows nothing of weights"
    return loss_sum(out, batch.targets_BS[some], weights[some])


def _rows_of(batch: Batch, some: slice) -> Fields:
    return {INPUT: batch.input[some], **{name: values[some] for name, values in batch.fields.items()}}


def _sight(batch: Batch, number: int) -> Mapping[str, Any]:
    """Attention and positions of a row."""
    return {} if batch.starts_BS is None else _documents(batch.starts_BS[number].tolist())


def _documents(starts: Sequence[int]) -> dict[str, Any]:
    """Attention and positions of a row with documents that begin at ``starts``: attention, also linear, of one document
    after the other, and positions that begin at 0 in each.
    """
    ends = [*sorted(set(starts)), len(starts)]

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rule: AttentionRule = PLAIN,
        bias: Bias | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        def alone(a: int, b: int) -> Tensor:
            return flash(q[:, a:b], k[:, a:b], v[:, a:b], rule, bias, None if sinks is None else sinks[:, a:b])

        return torch.cat([alone(a, b) for a, b in pairwise(ends)], dim=1)

    positions = torch.cat([torch.arange(b - a) for a, b in pairwise(ends)])[None]
    return {"attend": attend, "positions": positions, "scan": _OneByOne(tuple(pairwise(ends)))}


@dataclass(frozen=True, slots=True)
class _OneByOne:
    """Linear attention of one document after the other, as ``model.mixers.gated_delta.Scan``."""

    documents: tuple[tuple[int, int], ...]

    def convolve(self, x_BSC: Tensor, weight_C1W: Tensor, add: AddTaps | None = None) -> Tensor:
        return torch.cat([WholeScan().convolve(x_BSC[:, a:b], weight_C1W, add) for a, b in self.documents], dim=1)

    def attend(self, *inputs: Tensor) -> Tensor:
        return torch.cat([WholeScan().attend(*(x[:, a:b] for x in inputs)) for a, b in self.documents], dim=1)


def _square(values: Tensor) -> float:
    """The sum of squares in fp64, in parts, which needs no copy of the whole in fp64."""
    return sum(float(part.double().square_().sum()) for part in values.reshape(-1).split(2**20))
