"""Metrics of tokens during a program: their log-probabilities, and the measures of an objective."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from superstep.comm.mesh import Mesh
from superstep.engine.microbatch import Microbatch
from superstep.errors import DataError
from superstep.numerics.fixed_point import exact_loss_sum
from superstep.numerics.objective import CrossEntropy, LossTarget, Objective, TrainedTokens

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


class TokenMetrics:
    """The metrics of one rank in one run of a program.

    Sums are of numbers on a grid, as the loss of exact mode, so that their order does not matter.

    Args:
        objective: of a log-probability.
        microbatches: of this data-parallel rank.
        mesh: the launched ranks.
        is_exact: whether the losses' sum must stay within a range, which losses of both signs do not show.
        keeps: whether log-probabilities are kept.
        temperature: divides the logits.

    Attributes:
        is_plain: whether the loss is the cross entropy of every target; on all ranks or on none.
        sees: whether single tokens have metrics, likewise.

    Raises:
        DataError: a stream is missing, or is no fp32 number for each target.
    """

    def __init__(
        self,
        objective: Objective,
        microbatches: Sequence[Microbatch],
        mesh: Mesh,
        *,
        is_exact: bool = False,
        keeps: bool = False,
        temperature: float = 1.0,
    ) -> None:
        _require_streams(objective, microbatches)
        self.is_plain = isinstance(objective, CrossEntropy) and "weights" not in microbatches[0].streams
        self.sees = keeps or bool(objective.sums or objective.maxima) or (is_exact and not self.is_plain)
        self._objective = objective
        self._keeps = keeps
        self._temperature = temperature
        self._mesh = mesh
        self._kept: dict[int, list[Tensor]] = {}
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    def aim(self, microbatch: Microbatch, m: int, *, is_seen: bool = True) -> LossTarget:
        """The loss target of the ``m``-th microbatch; recomputed tokens are not counted again."""

        def tell(seen: TrainedTokens) -> None:
            self._see(m, seen)

        tells = tell if is_seen and self.sees else None
        return LossTarget(microbatch.targets, microbatch.streams, self._objective, tells, self._temperature)

    def _see(self, m: int, seen: TrainedTokens) -> None:
        if self._keeps:
            self._kept.setdefault(m, []).append(seen.logp_T)
        counts_T = seen.counts_T
        if "weights" in seen.streams:
            counts_T = counts_T & (seen.streams["weights"] != 0)
        values = {TOKENS: counts_T, SIZE: seen.loss_T.abs()} | dict(self._objective.watch(seen.logp_T, seen.streams))
        for name, values_T in values.items():
            values_T = values_T.detach().double().where(counts_T, 0.0)
            if name in self._objective.maxima:
                self._maxima[name] = torch.maximum(self._maxima.get(name, values_T.new_zeros(())), values_T.amax())
            else:
                self._sums[name] = self._sums.get(name, values_T.new_zeros(())) + exact_loss_sum(values_T)

    def kept(self, m: int) -> Tensor:
        """The log-probabilities of the ``m``-th microbatch's tokens in a row."""
        return torch.cat(self._kept[m])

    @property
    def has_kept(self) -> bool:
        """Whether this rank has kept any token."""
        return bool(self._kept)

    def _names(self) -> tuple[str, ...]:
        return (TOKENS, SIZE, *self._objective.sums)

    def numbers(self, *, is_counted: bool) -> Tensor:
        """Numbers to sum over all ranks, fp64: the sums, and for each maximum a slot for every rank.

        Args:
            is_counted: whether no other rank counts this rank's tokens.
        """
        device, world = self._mesh.device.torch, self._mesh.shape.world
        zero = torch.zeros((), dtype=torch.float64, device=device)
        sums = [self._sums.get(name, zero) if is_counted else zero for name in self._names()]
        maxima = torch.zeros(len(self._objective.maxima), world, dtype=torch.float64, device=device)
        for row, name in enumerate(self._objective.maxima):
            maxima[row, self._mesh.rank] = self._maxima.get(name, zero)
        return torch.cat((torch.stack(sums), maxima.flatten()))

    def decode(self, summed: Sequence[float]) -> tuple[dict[str, float], float]:
        """Decode ``numbers``, summed over all ranks: means over counted tokens and maxima, by name; and the sum of the
        sizes of all losses.
        """
        names = self._names()
        sums: Mapping[str, float] = dict(zip(names, summed, strict=False))
        tokens = sums[TOKENS]
        means = {name: sums[name] / tokens if tokens else 0.0 for name in self._objective.sums}
        world, rest = self._mesh.shape.world, summed[len(names) :]
        maxima = {n: max(rest[i * world : (i + 1) * world]) for i, n in enumerate(self._objective.maxima)}
        return means | maxima, sums[SIZE]
