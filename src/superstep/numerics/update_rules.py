"""Update rules: how an optimizer changes a parameter, w, and its moments, by its gradient, g.

With the learning rate lr, the decay d, and the number of updates t, this one included:

    adamw   m = β1 m + (1 - β1) g                                          Loshchilov 2019, algorithm 2
            v = β2 v + (1 - β2) g²
            w = (1 - lr d) w - lr / (1 - β1^t) · m / (√(v / (1 - β2^t)) + eps)

    lion    c = β1 m + (1 - β1) g                                          Chen 2023, algorithm 2
            w = (1 - lr d) w - lr sign(c)
            m = β2 m + (1 - β2) g

    sgd     w = (1 - lr d) w - lr g

Each is written in operations that IEEE 754 rounds in one way, on each element by itself: so it has the same bits
however a tensor is cut. A rule may have a kernel besides, for runs that are not exact. The moments that a rule is given
are those of ``plan.optimizers``, in that order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from superstep.plan.optimizers import OptimizerName


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """An optimizer's settings that stay the same for the whole run. Lion has no ``eps``."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    clip_norm: float
    clip_row_norm: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateNumbers:
    """The numbers of one update of some parameters.

    Attributes:
        lr: the learning rate.
        decay: the weight decay; 0 for vectors.
        scale: the gradients are divided by it: the loss scale, times a number of at least 1 that clips them.
        number: updates so far, this one included.
    """

    lr: float
    decay: float
    scale: float
    number: int


Update = Callable[[Tensor, Tensor, Sequence[Tensor], OptimizerSettings, UpdateNumbers], None]
"""Changes a parameter and its moments in place: (parameter, gradient, moments, settings, numbers); fp32, one shape."""

FusedUpdate = Callable[[list[Tensor], list[Tensor], Sequence[list[Tensor]], OptimizerSettings, UpdateNumbers], None]
"""The same for lists of parameters and gradients, and a list for each moment."""


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """An optimizer's update.

    Attributes:
        fused: a kernel that rounds otherwise; None where there is none.
        is_adamw: whether the kernel of moments in blocks of 8 bits has this update.
    """

    update: Update
    fused: FusedUpdate | None = None
    is_adamw: bool = False


def _adamw(
    param: Tensor, grad: Tensor, moments: Sequence[Tensor], settings: OptimizerSettings, now: UpdateNumbers
) -> None:
    (first, second), h = moments, settings
    grad = grad / now.scale
    first.mul_(h.beta1).add_(grad * (1 - h.beta1))
    second.mul_(h.beta2).add_((grad * grad).mul_(1 - h.beta2))
    size = _root(second).mul_((1 - h.beta2**now.number) ** -0.5).add_(h.eps)
    param.mul_(1 - now.lr * now.decay).sub_((first / size).mul_(now.lr / (1 - h.beta1**now.number)))


def _root(x: Tensor) -> Tensor:
    """The root, rounded correctly on every device: torch's on a CPU, from MKL, is not. fp64 has the digits for it."""
    return x.double().sqrt().float()


def _update_fused_adamw(
    params: list[Tensor],
    grads: list[Tensor],
    moments: Sequence[list[Tensor]],
    settings: OptimizerSettings,
    now: UpdateNumbers,
) -> None:
    first, second = moments
    count = params[0].new_full((), float(now.number))
    torch._fused_adamw_(
        params,
        grads,
        first,
        second,
        [],
        [count] * len(params),
        lr=now.lr,
        beta1=settings.beta1,
        beta2=settings.beta2,
        weight_decay=now.decay,
        eps=settings.eps,
        amsgrad=False,
        maximize=False,
        grad_scale=params[0].new_full((), now.scale),  # the kernel divides by it: clipping costs no pass of its own
        found_inf=None,
    )


def _lion(
    param: Tensor, grad: Tensor, moments: Sequence[Tensor], settings: OptimizerSettings, now: UpdateNumbers
) -> None:
    (first,), h = moments, settings
    grad = grad / now.scale
    change = (first * h.beta1).add_(grad * (1 - h.beta1)).sign_()
    param.mul_(1 - now.lr * now.decay).sub_(change.mul_(now.lr))
    first.mul_(h.beta2).add_(grad.mul_(1 - h.beta2))


def _sgd(
    param: Tensor, grad: Tensor, moments: Sequence[Tensor], settings: OptimizerSettings, now: UpdateNumbers
) -> None:
    if now.decay:
        param.mul_(1 - now.lr * now.decay)
    param.sub_((grad / now.scale).mul_(now.lr))


RULES: Mapping[OptimizerName, UpdateRule] = {
    "adamw": UpdateRule(_adamw, _update_fused_adamw, is_adamw=True),
    "lion": UpdateRule(_lion),
    "sgd": UpdateRule(_sgd),
}
