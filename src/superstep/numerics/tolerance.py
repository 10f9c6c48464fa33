"""How far a layout may lie from the fp32 reference, and why.

A difference is the L2 norm of (ours - reference) over the L2 norm of the reference, a tensor at a time; the loss's is
relative. Sums of floating-point numbers depend on their order, and a layout changes the order: partial products
over tp, gradients over dp and microbatches, chunks of the loss. Each term carries a rounding of half a unit in the
last place, u = 2^-24 for fp32 and 2^-9 for bf16, and a random walk over the k roundings on a path gives about
u·sqrt(k).

    fp32    about 10^3 roundings lie on a gradient's path: 2^-24 · sqrt(10^3) = 2e-6; allowed is ten times that.
    bf16    every activation is rounded to 2^-9 = 2e-3 and again at each of some ten operations a layer, forward and
            backward: a few percent in a gradient, though hardly any in the loss, which averages over tokens.

Adam divides the gradient by its own size, so an element whose gradient is all rounding still moves by the learning
rate: the update's error does not shrink with the gradient's. Weights are therefore compared by their *update* since
the start; where a share f of a tensor's elements has gradients that are all rounding, that differs by up to 2·sqrt(f),
and f = 1e-4 is allowed in fp32, 6e-2 in bf16. After the first update the gradients are those of weights that differ
by so much, so their bound is wider too from the second step on.
"""

from __future__ import annotations

from dataclasses import dataclass

from superstep.plan.config import Dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """The largest relative difference that is still rounding."""

    loss: float
    gradient: float
    gradient_later: float
    update: float


TOLERANCE: dict[Dtype, Tolerance] = {
    "fp32": Tolerance(loss=2e-6, gradient=2e-5, gradient_later=2e-3, update=2e-2),
    "bf16": Tolerance(loss=2e-3, gradient=8e-2, gradient_later=1.5e-1, update=5e-1),
}
