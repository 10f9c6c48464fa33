"""Updates of parameters with moments or master weights in fewer bits than fp32.

Every form is widened to fp32, updated by the optimizer's rule, and stored again:

    8bit    blocks of 256 by dynamic maps, rounded to the nearest value (``kernels.blocks``)
    bf16    rounded stochastically: up with the probability of the part that is cut off, so that the mean of what is
            stored is what was computed, and changes below half a step are not lost

The random words of a stochastic rounding belong to the seed, the step, the tensor and the element's number in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from superstep.kernels.blocks.adamw import AdamWNumbers, BlockMoment, has_kernel, update_blocks
from superstep.kernels.blocks.dynamic_map import SIZE, decode, dynamic_map, encode
from superstep.numerics.fixed_point import BLOCK
from superstep.numerics.update_rules import OptimizerSettings, UpdateNumbers, UpdateRule
from superstep.plan.optimizers import Moment

KeptMoment = Tensor | BlockMoment
"""A moment as it is kept: fp32, bf16, or blocks of 8 bits."""

DrawWords = Callable[[str, int, int, int], Tensor]
"""Random words, int32: for a stored kind (``weight`` or a moment), the number of the update, and the elements of a part
from one to another.
"""

_CUT = 0xFFFF
"""The bits of fp32 that bf16 does not have."""


def round_stochastically(numbers: Tensor, words: Tensor) -> Tensor:
    """fp32 to bf16, up or down by the lower half of each random word. What is not finite stays as it is."""
    drawn = (numbers.view(torch.int32) + (words.view(numbers.shape) & _CUT)) & ~_CUT
    return torch.where(numbers.isfinite(), drawn.view(torch.float32), numbers).to(torch.bfloat16)


def is_signed(moment: str) -> bool:
    """Whether a moment has negative numbers."""
    return moment != "exp_avg_sq"


@dataclass(frozen=True, slots=True)
class NarrowPart:
    """Consecutive elements of a parameter, and their state.

    Attributes:
        param: fp32 or bf16 [N].
        grad: fp32 [N].
        moments: by name; N is a multiple of 256 where one is in blocks.
        draw: the words of what is in bf16.
    """

    param: Tensor
    grad: Tensor
    moments: dict[Moment, KeptMoment]
    draw: DrawWords


def update_narrow(part: NarrowPart, rule: UpdateRule, settings: OptimizerSettings, now: UpdateNumbers) -> None:
    """Update a part in place, by a kernel where there is one: its bits are those of torch."""
    kept = list(part.moments.values())
    blocks = [moment for moment in kept if isinstance(moment, BlockMoment)]
    is_wide = part.param.dtype == torch.float32
    if rule.is_adamw and is_wide and len(blocks) == len(kept) and has_kernel(part.param.device):
        update_blocks(part.param, part.grad, blocks, _adamw_numbers(settings, now))
        return
    for low in range(0, part.param.numel(), BLOCK):
        _update_some(part, low, min(low + BLOCK, part.param.numel()), rule, settings, now)


def _update_some(
    part: NarrowPart, low: int, high: int, rule: UpdateRule, settings: OptimizerSettings, now: UpdateNumbers
) -> None:
    here = slice(low, high)
    stored = part.param[here]
    param = stored.float()
    wide = {name: _widen(name, moment, low, high) for name, moment in part.moments.items()}
    rule.update(param, part.grad[here], list(wide.values()), settings, now)
    for name, moment in part.moments.items():
        if isinstance(moment, BlockMoment):
            encode(wide[name], *_cut(moment, low, high), dynamic_map(is_signed=is_signed(name)))
        elif moment.dtype == torch.bfloat16:
            moment[here] = round_stochastically(wide[name], part.draw(name, now.number, low, high))
    if stored.dtype == torch.bfloat16:
        stored.copy_(round_stochastically(param, part.draw("weight", now.number, low, high)))


def _widen(name: Moment, moment: KeptMoment, low: int, high: int) -> Tensor:
    """Some numbers of a moment in fp32: those themselves where they are kept so."""
    if isinstance(moment, Tensor):
        return moment[low:high].float()
    return decode(*_cut(moment, low, high), dynamic_map(is_signed=is_signed(name)))


def _cut(moment: BlockMoment, low: int, high: int) -> tuple[Tensor, Tensor]:
    return moment.codes[low:high], moment.scales[low // SIZE : high // SIZE]


def _adamw_numbers(settings: OptimizerSettings, now: UpdateNumbers) -> AdamWNumbers:
    return AdamWNumbers(
        scale=now.scale,
        beta1=settings.beta1,
        rest1=1 - settings.beta1,
        beta2=settings.beta2,
        rest2=1 - settings.beta2,
        root_by=(1 - settings.beta2**now.number) ** -0.5,
        eps=settings.eps,
        keep=1 - now.lr * now.decay,
        rate=now.lr / (1 - settings.beta1**now.number),
    )
