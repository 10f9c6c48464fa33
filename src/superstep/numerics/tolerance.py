"""The tolerance of a layout against the fp32 reference in fast mode, derived from exact mode.

A difference is the L2 norm of (ours - reference) over the L2 norm of the reference, a tensor at a time; the loss's is
relative. Exact mode has the same bits for a model on every layout. So the distance between fast mode and the reference,
which is written without the engine, has two parts that can be measured separately:

    order    from fast mode to exact mode in the same dtype: the same roundings, of sums in another order
    dtype    from exact mode to the fp32 reference: what the dtype itself rounds away

``python -m bench.tolerance`` measures both, over every layout of 1, 2 and 4 ranks and every tensor of a small model;
the largest are in ``bench/results/tolerance.json``. What is allowed is their sum times a factor, rounded up:

    fp32  loss, gradients of the first step    5 to 10    larger models have longer sums. k roundings on a path make
                                                          u · sqrt(k) with u = 2^-24: 25 times as many for 5
          later gradients, updates             30         Adam divides a gradient by its own size, so an element whose
                                                          gradient is all rounding still moves by the learning rate;
                                                          how many there are is a matter of the model
    bf16  loss                                 60         averages over tokens, of which a small batch has few
          gradients                            1.5 to 2   each activation is rounded to 2^-9 at some ten operations a
                                                          layer, the same for a large model as for a small one
          updates                              1.2 in all an update whose sign is rounding differs by twice itself: in
                                                          a tensor of a few elements this says little, and the next
                                                          step's loss and gradients say the rest
    bf16  scale of all gradients               8 to 35      roundings go up as often as down, so nearly nothing of them
                                                          is left in the factor between all gradients and the
                                                          reference's: 1.3e-3 in a first step and 8.5e-4 in later ones
                                                          at most, over 52 runs of small models on one and two ranks,
                                                          with and without experts. A gradient that is too large
                                                          everywhere shows in it alone
    with experts, bf16                                    near ties in a router fall the other way, and a token's
                                                          gradient goes to another expert: only exact mode can tell
                                                          this from a fault, so prove it with --exact
    fp16                                                  it has no exact mode: 2 to 3 times the distance of fast mode
                                                          from the reference, and more for the loss and the scale, as
                                                          in bf16, whose roundings are four times as large

Moments in fewer bits differ by what their format rounds away (``ROUNDED``), and by a part of it so do later updates and
gradients. Master weights in bf16 differ by their stochastic roundings, which ``train.proof.compare`` counts from the
weights' own spacing: beside a small learning rate they are larger than the update.

Measured there, order + dtype: see the table in docs/explanation/numbers.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from superstep.plan.config import Dtype
from superstep.plan.optimizers import MomentFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """The largest relative difference that is still rounding.

    Attributes:
        moment: what moments may differ by in addition, for their format.
    """

    loss: float
    gradient: float
    gradient_later: float
    update: float
    scale: float
    scale_later: float
    moment: float = 0.0

    def with_moments(self, rounded: float) -> Tolerance:
        """The tolerance where moments are rounded to a format. Updates differ by half as much, and later gradients by a
        twentieth: measured, as the table is.
        """
        return replace(
            self,
            moment=rounded,
            update=self.update + rounded,
            gradient_later=self.gradient_later + rounded / 10,
            scale_later=self.scale_later + rounded / 10,
        )

    def of(self, kind: str, *, is_first: bool) -> float:
        """The tolerance of a kind of value, in the first step or a later one."""
        gradient = self.gradient if is_first else self.gradient_later
        match kind:
            case "loss":
                return self.loss
            case "scale":
                return self.scale if is_first else self.scale_later
            case "update":
                return self.update
            case "square":
                # (1 + d)^2 is 2d off, and more where few elements make up the norm
                return 3 * gradient + self.moment
            case "moment":
                return gradient + self.moment
            case "gradient" | "norm":
                return gradient
            case _:
                raise AssertionError(f"nothing is compared as {kind}")


TOLERANCE: dict[Dtype, Tolerance] = {
    "fp32": Tolerance(loss=2e-6, gradient=2e-5, gradient_later=2e-3, update=2e-2, scale=2e-5, scale_later=2e-3),
    "bf16": Tolerance(loss=2e-3, gradient=9e-2, gradient_later=1.5e-1, update=1.2, scale=1e-2, scale_later=3e-2),
    "fp16": Tolerance(loss=4e-4, gradient=1e-2, gradient_later=4e-2, update=8e-1, scale=2.5e-3, scale_later=7.5e-3),
}

WITH_EXPERTS: dict[Dtype, Tolerance] = {
    "fp32": Tolerance(loss=2e-6, gradient=2e-5, gradient_later=2e-3, update=2e-2, scale=2e-5, scale_later=2e-3),
    "bf16": Tolerance(loss=2e-3, gradient=5e-1, gradient_later=7e-1, update=1.5, scale=1e-2, scale_later=3e-2),
    "fp16": Tolerance(loss=4e-4, gradient=2e-1, gradient_later=3e-1, update=1.0, scale=2.5e-3, scale_later=7.5e-3),
}


SAME_ROUNDING = Tolerance(loss=1e-6, gradient=1e-5, gradient_later=2e-2, update=2e-2, scale=1e-5, scale_later=2e-2)
"""For a layout in bf16 against one rank in bf16, where no product is cut: both round the same numbers, and only the
order of fp32 sums differs. Measured over such layouts of 2 and 4 ranks: 1e-7 of a loss, 7e-8 of a first gradient;
later, where a weight between two bf16 numbers is rounded differently, 5e-3 of a gradient of four elements and 2e-3 of
an update.
"""


ROUNDED: dict[MomentFormat, float] = {"fp32": 0.0, "bf16": 8e-3, "8bit": 4e-2}
"""What a format rounds away of moments: 2.4 times the largest distance of three steps in fp32, over the layouts of one
and two ranks, which is 3.3e-3 in bf16 and 1.7e-2 in 8 bits (``python -m bench.tolerance --moments``). It does not
depend on the model's size: a block has its own scale.
"""

CROSSED = 0.05
"""The share of it for layouts that round the same numbers: few of them lie so near the middle between two values that
the order of sums decides, and in 4,096 numbers one is a sixtieth of its distance.
"""


def tolerance(dtype: Dtype, *, has_experts: bool, moments: MomentFormat = "fp32") -> Tolerance:
    return (WITH_EXPERTS if has_experts else TOLERANCE)[dtype].with_moments(ROUNDED[moments])


def same_rounding(moments: MomentFormat) -> Tolerance:
    """The tolerance of layouts that round the same numbers as one rank."""
    return SAME_ROUNDING.with_moments(CROSSED * ROUNDED[moments])
