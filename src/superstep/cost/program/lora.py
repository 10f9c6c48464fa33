"""What adapters change in the work and the bytes of a decoder: the frozen weights have no gradient, and the factors do.

T  rows of the linear       I, O  its inputs and outputs on this rank      R  rank      e  bytes of a number

for each adapted linear     products of a forward pass    [T, I] · [I, R]    [T, R] · [R, O]
                            kept                          its input, which linears may share; T·R·e
                            with selective recomputation  its output, as of any linear
other linears               keep nothing, but for their gate
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from superstep.cost.program.flops import LocalDims, local_dims
from superstep.plan.model.outline import Parameter
from superstep.plan.resolution.resolve import Resolved
from superstep.plan.sharding.unit_flops import count_visible_tokens, forward_flops_per_token

CONVENTION = (
    "adapters: forward pass and input gradients of what is frozen, 3 passes of attention and of the factors; head and "
    "full-square attention count, embedding and recomputation do not"
)
"""What ``flops_per_token`` counts, in the words of a display."""

READS = {
    **dict.fromkeys((f"in_proj_{end}" for end in ("qkv", "z", "b", "a", "qkvz", "ba")), "first norm"),
    "q_proj": "first norm",
    "k_proj": "first norm",
    "v_proj": "first norm",
    "o_proj": "attention",
    "out_proj": "attention",
    "gate_proj": "second norm",
    "up_proj": "second norm",
    "down_proj": "gate",
}
"""The input of each linear of a block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraLinear:
    """One linear of a block with its factors, on one rank and for one microbatch."""

    linear: str
    rows: int
    inputs: int
    outputs: int
    rank: int

    @property
    def forward_flops(self) -> int:
        return 2 * self.rows * self.rank * (self.inputs + self.outputs)


def list_adapted_linears(run: Resolved) -> tuple[LoraLinear, ...]:
    """The adapted linears of one block of the decoder; all blocks are alike."""
    if run.config.lora is None:
        return ()
    return tuple(_lora_linear(run, a, b, local_dims(run)) for a, b in _pairs(run))


def _pairs(run: Resolved) -> Iterator[tuple[Parameter, Parameter]]:
    factors = [p for p in run.outline.units[1].parameters if p.factor is not None]
    return zip(factors[::2], factors[1::2], strict=True)


def _lora_linear(run: Resolved, a: Parameter, b: Parameter, d: LocalDims) -> LoraLinear:
    def count_held(size: int, axis: str | None) -> int:
        return size // (run.plan.mesh.tp if run.plan.rules.cut(axis) == "tp" else 1)

    linear = a.name.split(".")[-3]
    return LoraLinear(
        linear=linear,
        rows=d.T if READS[linear] in ("first norm", "attention") else d.Tf,
        inputs=count_held(a.dims[1], a.axes[1]),
        outputs=count_held(b.dims[0], b.axes[0]),
        rank=a.dims[0],
    )


def count_kept_inner(run: Resolved) -> int:
    return sum(one.rows * one.rank for one in list_adapted_linears(run))


def count_kept_outputs(run: Resolved) -> int:
    return sum(one.rows * one.outputs for one in list_adapted_linears(run))


def flops_per_token(run: Resolved) -> int:
    """Operations for training the adapters on one token, by ``CONVENTION``."""
    shape, tokens = run.shape, run.config.data.sequence_tokens
    visible = sum(count_visible_tokens(shape, layer, tokens) for layer in range(shape.layers))
    attention = 4 * visible * shape.heads * shape.head_dim
    frozen = sum(forward_flops_per_token(shape, tokens)) - attention
    factors = sum(2 * (p.dims[0] * p.dims[1]) for unit in run.outline.units for p in unit.parameters if p.factor)
    return 2 * frozen + 3 * (attention + factors)
