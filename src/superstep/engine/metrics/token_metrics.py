"""Metrics of tokens during a program: their log-probabilities, and the measures of an objective."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from superstep.comm.collectives import gather_sequence, sum_over
from superstep.comm.mesh import Mesh
from superstep.engine.metrics.further_loss import FurtherLoss
from superstep.engine.values.microbatch import Microbatch
from superstep.errors import ConfigError, DataError
from superstep.model.unit import UnitSpec
from superstep.numerics.fixed_point import exact_loss_sum, require_exact_loss
from superstep.numerics.loss import IGNORE, SmoothedCrossEntropy
from superstep.numerics.objective import CrossEntropy, LossTarget, Objective, TrainedTokens
from superstep.plan.resolution.resolve import Resolved
from superstep.plan.sharding.parameters import has_cut_output
from superstep.plan.sharding.sequence import positions

WEIGHTS_MEND = "Or weights and advantages are too large for the divisor of the step, which is to be of their size."
TOKENS = "tokens"
SIZE = "size"


def require_divisor(divisor: float) -> float:
    """Check the divisor of a step.

    Raises:
        DataError: it is not above zero.
    """
    if not 0 < divisor < math.inf:
        raise DataError(
            f"divisor = {divisor:g} must be above 0 and finite: it is what the loss of the step is divided by. Leave "
            "out a step in which no token counts."
        )
    return divisor


def sees_part(run: Resolved) -> bool:
    """Whether each tp rank computes the loss of its own part of the sequence."""
    return run.plan.sequence_parallel and not has_cut_output(run.outline, run.plan.rules)


def _require_streams(objective: Objective, microbatches: Sequence[Microbatch]) -> None:
    for microbatch in microbatches:
        shape, has = tuple(microbatch.targets.shape), ", ".join(microbatch.streams) or "none"
        for name in objective.reads:
            if name not in microbatch.streams:
                raise DataError(f"{objective} reads the stream '{name}', and the batch has {has}: add it.")
        for name, stream in microbatch.streams.items():
            if tuple(stream.shape) != shape or stream.dtype != torch.float32:
                raise DataError(
                    f"stream '{name}' is {stream.dtype} of shape {tuple(stream.shape)}; give it one torch.float32 "
                    f"number for each target, of shape {shape}."
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """An evaluation of one global batch, over all ranks.

    Attributes:
        loss: summed over the targets.
        targets: the number of targets; with a stream ``weights``, the sum of their sizes.
        correct: the number of targets whose class has the highest logit; None if targets are tokens or no classes, or
            if tp splits the classes.
    """

    loss: float
    targets: float
    correct: float | None


class TokenMetrics:
    """The metrics of one rank in one run of a program.

    Sums are of numbers on a grid, as the loss of exact mode, so that their order does not matter.

    Args:
        run: the resolved run.
        mesh: the launched ranks.
        last: the model's last unit.
        objective: of a log-probability.
        microbatches: of this data-parallel rank.
        keeps: whether log-probabilities are kept.
        temperature: divides the logits.

    Attributes:
        is_plain: whether the loss is the cross entropy of every target; on all ranks or on none.
        sees: whether single tokens have metrics, likewise.

    Raises:
        DataError: a stream is missing, or is no fp32 number for each target.
        ConfigError: the last unit has a loss of its own, which supports no streams and objectives.
    """

    def __init__(
        self,
        run: Resolved,
        mesh: Mesh,
        last: UnitSpec,
        objective: Objective,
        microbatches: Sequence[Microbatch],
        *,
        keeps: bool = False,
        temperature: float = 1.0,
    ) -> None:
        _require_streams(objective, microbatches)
        self.is_plain = isinstance(objective, CrossEntropy) and "weights" not in microbatches[0].streams
        # In exact mode the losses' sum must stay within a range, which losses of both signs do not show.
        self._is_exact = run.plan.grain is not None
        self.sees = keeps or bool(objective.sums or objective.maxima) or (self._is_exact and not self.is_plain)
        if (self.sees or not self.is_plain or temperature != 1.0) and last.loss is not None:
            raise ConfigError(
                f"unit '{last.name}' has a loss of its own, which says nothing of single tokens: give it no "
                "streams, no objective and no temperature, or leave its loss out."
            )
        weight = run.plan.mtp_weight
        self._further = None if weight is None else FurtherLoss(weight)
        if weight is not None and (not self.is_plain or (self.sees and not keeps)):
            raise ConfigError(
                f"model.mtp_weight = {weight} predicts a second token by the cross entropy alone: give the loss no "
                "streams and no objective, or leave model.mtp_weight out."
            )
        self._sees_part = sees_part(run)
        # Where every tp rank computed the same loss, one of them counts it.
        self._is_counted = mesh.at.tp == 0 or self._sees_part
        self._has_last_unit = mesh.at.pp == run.plan.placement[-1]
        self._microbatches = microbatches
        self._objective = objective
        self._keeps = keeps
        self._temperature = temperature
        self._mesh = mesh
        self._kept: dict[int, list[Tensor]] = {}
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}
        # A rank with a part of the classes does not know the highest logit.
        is_cut = has_cut_output(run.outline, run.plan.rules) and mesh.shape.tp > 1
        self._has_classes = (
            run.samples is not None and isinstance(last.loss, SmoothedCrossEntropy | None) and not is_cut
        )
        self._correct = torch.zeros((), dtype=torch.float64, device=mesh.device.torch)

    def aim(self, microbatch: Microbatch, m: int, *, is_observed: bool = True) -> LossTarget:
        """The loss target of the ``m``-th microbatch; recomputed tokens are not counted again."""

        def tell(trained: TrainedTokens) -> None:
            self._see(m, trained)

        observer = tell if is_observed and self.sees else None
        # A training step reports no accuracy.
        is_evaluated = is_observed and self._has_classes and not torch.is_grad_enabled()
        classify = self._classify if is_evaluated else None
        plain = LossTarget(
            microbatch.targets, microbatch.streams, self._objective, observer, self._temperature, classify
        )
        if self._further is None:
            return plain
        return self._further.aim(plain, microbatch, is_trained=torch.is_grad_enabled())

    def _classify(self, logits: Tensor, targets: Tensor) -> None:
        self._correct += (logits.detach().argmax(-1) == targets).sum()

    def _see(self, m: int, trained: TrainedTokens) -> None:
        if self._keeps:
            self._kept.setdefault(m, []).append(trained.logp_T)
        counts_T = trained.counts_T
        if "weights" in trained.streams:
            counts_T = counts_T & (trained.streams["weights"] != 0)
        watched = dict(self._objective.watch(trained.logp_T, trained.streams))
        values = {TOKENS: counts_T, SIZE: trained.loss_T.abs()} | watched
        for name, values_T in values.items():
            values_T = values_T.detach().double().where(counts_T, 0.0)
            if name in self._objective.maxima:
                self._maxima[name] = torch.maximum(self._maxima.get(name, values_T.new_zeros(())), values_T.amax())
            else:
                self._sums[name] = self._sums.get(name, values_T.new_zeros(())) + exact_loss_sum(values_T)

    def read_logprobs(self, m: int) -> Tensor:
        """The log-probabilities of the ``m``-th microbatch's tokens in a row."""
        kept = torch.cat(self._kept[m])
        return kept if self._further is None else kept[: len(kept) // 2]

    def own_logprobs(self) -> list[Tensor]:
        """The kept log-probabilities of this rank's microbatches, fp32, in their order and of the targets' shape; zero
        for ignored targets. None on ranks without the last unit. The tp ranks call this together.
        """
        if not self._kept:
            return []
        tp = self._mesh.tp if self._sees_part else None
        logprobs = []
        for m, microbatch in enumerate(self._microbatches):
            rows, *dims = microbatch.targets.shape
            if tp is None:
                logprobs.append(self.read_logprobs(m).view(rows, *dims))
            else:
                logprobs.append(gather_sequence(self.read_logprobs(m).view(rows, dims[0] // tp.size(), *dims[1:]), tp))
        return logprobs

    def logprobs(self) -> Tensor:
        """The kept log-probabilities of the whole global batch, [rows, S] and fp32, the same on every rank: in exact
        mode the same bits on every layout. Zero for ignored targets. Every rank calls this together.
        """
        own, at, shape = self.own_logprobs(), self._mesh.at, self._mesh.shape
        size, *dims = self._microbatches[0].targets.shape
        tokens = dims[0] * shape.cp if dims else 0
        count = len(self._microbatches) * size
        whole = torch.zeros(count * shape.dp, *([tokens, *dims[1:]] if dims else []), device=self._mesh.device.torch)
        # Of the ranks that share a token one adds it to the others' zeros, which is exact.
        if own and at.tp == 0:
            mine = torch.cat(own)
            first = at.dp * count
            rows = whole[first : first + len(mine)]
            if shape.cp > 1:
                rows[:, list(positions(tokens, cp=shape.cp, rank=at.cp))] = mine
            else:
                rows.copy_(mine)
        return sum_over(whole, self._mesh.world)

    def totals(self, loss: Tensor) -> Score:
        """The score of one global batch; with a stream ``weights``, its targets are the sum of their sizes. Every rank
        calls this together.

        Args:
            loss: summed over this rank's tokens.
        """
        weight = torch.stack([_weight_sum(m) for m in self._microbatches]).sum().view(1)
        weight = weight * (self._mesh.at.tp == 0 and self._has_last_unit)
        correct = self._correct.view(1) * self._is_counted
        numbers = torch.cat((self._own_loss(loss), weight, correct))
        total, size, right = sum_over(numbers, self._mesh.world).tolist()
        return Score(loss=total, targets=size, correct=right if self._has_classes else None)

    def _own_loss(self, loss: Tensor) -> Tensor:
        return (loss * self._is_counted).double().view(1)

    def _names(self) -> tuple[str, ...]:
        return (TOKENS, SIZE, *self._objective.sums)

    def numbers(self, loss: Tensor) -> Tensor:
        """Numbers to sum over all ranks, fp64: the loss; and where single tokens have metrics their sums, and for each
        maximum a slot for every rank.

        Args:
            loss: summed over this rank's tokens.
        """
        if self._further is not None:
            return self._further.sums.to(self._mesh.device.torch) * (self._is_counted and self._has_last_unit)
        if not self.sees:
            return self._own_loss(loss)
        device, world = self._mesh.device.torch, self._mesh.shape.world
        zero = torch.zeros((), dtype=torch.float64, device=device)
        sums = [self._sums.get(name, zero) if self._is_counted else zero for name in self._names()]
        maxima = torch.zeros(len(self._objective.maxima), world, dtype=torch.float64, device=device)
        for row, name in enumerate(self._objective.maxima):
            maxima[row, self._mesh.rank] = self._maxima.get(name, zero)
        return torch.cat((self._own_loss(loss), torch.stack(sums), maxima.flatten()))

    def decode(self, summed: Sequence[float]) -> dict[str, float]:
        """The measures in ``numbers``, summed over all ranks: means over counted tokens and maxima, by name.

        Raises:
            OutOfRange: exact mode: the sizes of all losses leave the range of its sums.
        """
        if self._further is not None:
            return self._further.mean(*summed[1:])
        if not self.sees:
            return {}
        names, summed = self._names(), summed[1:]
        sums: Mapping[str, float] = dict(zip(names, summed, strict=False))
        tokens = sums[TOKENS]
        means = {name: sums[name] / tokens if tokens else 0.0 for name in self._objective.sums}
        world, rest = self._mesh.shape.world, summed[len(names) :]
        maxima = {n: max(rest[i * world : (i + 1) * world]) for i, n in enumerate(self._objective.maxima)}
        if self._is_exact:
            require_exact_loss(sums[SIZE])  # losses of both signs may leave the range together and have a small sum
        return means | maxima


def _weight_sum(microbatch: Microbatch) -> Tensor:
    """The number of a microbatch's targets, or the sum of their weights' sizes: fp64, in any order."""
    counts = microbatch.targets != IGNORE
    weights = microbatch.streams.get("weights")
    return exact_loss_sum(counts if weights is None else weights.abs().where(counts, 0.0))
