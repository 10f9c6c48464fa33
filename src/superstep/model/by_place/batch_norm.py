"""Batch norm over groups of samples (Ioffe 2015; ghost batches, Hoffer 2017): the same result on every layout.

A group is ``group`` consecutive samples of the global batch, so no layout cuts it between samples and none makes
it larger. The samples must be whole: with cp or sequence parallelism a rank would normalise its part alone. If the
group is the whole batch, this is torch's batch norm.

    y = (x - mean) / sqrt(var + eps) · weight + bias         mean, var over a group's samples, in each channel
    r = (1 - momentum) r + momentum s                        for each group in order: running mean, unbiased variance

With K groups a step adds  Σ momentum (1 - momentum)^(K-1-k) (s_k - r)  to a running statistic r. That is a sum over the
groups, as a gradient is: so statistics are parameters of which this sum is the gradient, and the update adds it. They
are reduced, sharded, saved and recovered as the others are.

A batch norm that another phase of the step trains normalises by the groups' statistics too, as torch's train mode does,
and its running ones stay as they are. One that ``[freeze]`` names normalises by the running ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from superstep.errors import ConfigError
from superstep.numerics.noise import EVALUATION, CurrentNoise, SamplePlace

STATISTICS = ("running_mean", "running_var")


def is_statistic(module: nn.Module, local: str) -> bool:
    """Whether a parameter of a module, by its name there, is a running statistic."""
    path, _, leaf = local.rpartition(".")
    return leaf in STATISTICS and isinstance(module.get_submodule(path), BatchNorm)


def freeze_statistics(module: nn.Module, frozen: Iterable[str]) -> None:
    """Let batch norms normalise by their running statistics in training too.

    Args:
        module: has them.
        frozen: names there of the parameters that a run does not train.
    """
    for path, _, leaf in (local.rpartition(".") for local in frozen):
        if leaf == STATISTICS[0] and isinstance(layer := module.get_submodule(path), BatchNorm):
            layer.is_frozen = True


class BatchNorm(nn.Module):
    """Batch norm of [B, channels, ...], samples first.

    Args:
        channels: of the second dim.
        group: samples that are normalised together.
        eps: added to the variance.
        momentum: the share of a group's statistics in the running ones.

    Attributes:
        is_frozen: whether the running statistics normalise in training too.
    """

    def __init__(self, channels: int, group: int, *, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__()
        self.group, self.eps, self.momentum, self.is_frozen = group, eps, momentum, False
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.running_mean, self.running_var = nn.Parameter(torch.zeros(channels)), nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor, place: SamplePlace = EVALUATION) -> Tensor:
        """Normalise by the groups' statistics in training, and by the running ones else, or where they are frozen.

        Args:
            x: [B, channels, ...].
            place: of the microbatch in the training.

        Raises:
            ConfigError: in training, a group is not whole.
        """
        scale, shift = self.weight.float(), self.bias.float()
        if self.is_frozen or not place.is_training:
            running = self.running_mean.detach().float(), self.running_var.detach().float()
            return F.batch_norm(x, *running, scale, shift, training=False, eps=self.eps)
        if x.is_meta:  # one row, for its shape
            return self._normalise(x, scale, shift)[0]
        if len(x) % self.group or place.sample % self.group:
            raise ConfigError(
                f"batch norm over groups of {self.group} samples gets {len(x)}, from number {place.sample} on; give "
                "it a group that divides plan.microbatch."
            )
        parts = [self._normalise(part, scale, shift) for part in x.split(self.group)]
        out = parts[0][0] if len(parts) == 1 else torch.cat([part for part, _, _ in parts])
        sums = [self._merge(each, place) for each in zip(*(statistics for _, *statistics in parts), strict=True)]
        return _WithStatistics.apply(out, self.running_mean, self.running_var, *sums)  # type: ignore[no-any-return, no-untyped-call]

    def _normalise(self, x: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A group normalised, and how far its mean and unbiased variance are from the running ones."""
        out, mean, inverse = torch.native_batch_norm(
            x, scale, shift, running_mean=None, running_var=None, training=True, momentum=0.0, eps=self.eps
        )
        count = x.numel() // x.shape[1]
        variance = (inverse.detach() ** -2 - self.eps) * (count / max(count - 1, 1))
        return out, mean.detach() - self.running_mean.detach(), variance - self.running_var.detach()

    def _merge(self, differences: tuple[Tensor, ...], place: SamplePlace) -> Tensor:
        """What the groups of a microbatch add to a running statistic, given how far each of them is from it."""
        last = place.samples // self.group - 1
        first = place.sample // self.group
        shares = [self.momentum * (1 - self.momentum) ** (last - first - k) for k in range(len(differences))]
        return functools.reduce(torch.add, (x * share for x, share in zip(differences, shares, strict=True)))


class _WithStatistics(torch.autograd.Function):
    """Returns ``x`` unchanged; its backward gives the two running statistics ``sums`` as their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mean: Tensor, var: Tensor, *sums: Tensor) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(*sums)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        return grad, *ctx.saved_tensors, None, None


def normalise_by_place(layer: BatchNorm, current: CurrentNoise) -> Callable[[Tensor], Tensor]:
    """The forward of a batch norm, which takes its place from the forward of the unit that runs now."""
    own = layer.forward

    def forward(x: Tensor) -> Tensor:
        return own(x, EVALUATION if current.noise is None else current.noise.place)

    return forward
