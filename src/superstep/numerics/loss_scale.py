"""The loss scale of fp16: gradients are computed times a power of two, and divided by it in the update.

Numbers of fp16 reach from 6e-8 to 65504. Small gradients would become 0, and the scale moves them into this range
(Micikevicius 2018, 3.2). It is chosen by trial: where a gradient overflows, all ranks skip the step and lower the
scale; after many steps without an overflow they raise it. A power of two changes no digit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from superstep.plan.loss_scale import LossScaleConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """The current scale, with what decides the next one.

    Attributes:
        exponent: the scale is 2 to this power.
        clean_steps: steps without an overflow since the scale last changed.
        skipped_steps: of the whole run, for an overflow.
    """

    exponent: int = 0
    clean_steps: int = 0
    skipped_steps: int = 0

    def pack(self) -> int:
        """The same as one number of 64 bits, above 0."""
        return (self.skipped_steps * _CLEAN + self.clean_steps) * (MOST + 1) + self.exponent + 1

    @classmethod
    def unpack(cls, word: int) -> LossScale | None:
        """What ``pack`` has packed; None for 0."""
        if not word:
            return None
        steps, exponent = divmod(word - 1, MOST + 1)
        skipped, clean = divmod(steps, _CLEAN)
        return cls(exponent=exponent, clean_steps=clean, skipped_steps=skipped)

    @property
    def factor(self) -> float:
        """The scale itself."""
        return 2.0**self.exponent

    def after_step(self, settings: LossScaleConfig) -> LossScale:
        """The scale after a step without an overflow."""
        clean = self.clean_steps + 1
        if clean < settings.growth_steps:
            return LossScale(exponent=self.exponent, clean_steps=clean, skipped_steps=self.skipped_steps)
        exponent = self.exponent + exponent_of(settings.growth)
        return LossScale(exponent=min(exponent, MOST), skipped_steps=self.skipped_steps)

    def after_overflow(self, settings: LossScaleConfig) -> LossScale | None:
        """The scale after a skipped step; None where it is at its floor already."""
        floor = exponent_of(settings.floor)
        if self.exponent <= floor:
            return None
        exponent = max(self.exponent + exponent_of(settings.backoff), floor)
        return LossScale(exponent=exponent, skipped_steps=self.skipped_steps + 1)


_CLEAN = 2**28
"""More than the steps between two changes of the scale."""
MOST = 40
"""The highest exponent: in a run without any overflow, sums of scaled gradients stay far within fp32."""


def first_scale(settings: LossScaleConfig) -> LossScale:
    """The scale of the first step."""
    return LossScale(exponent=exponent_of(settings.start))


def exponent_of(power: float) -> int:
    """The exponent of a power of two."""
    return int(math.log2(power))
