"""Memory of linear attention, in the place of attention's: what a block keeps of it, and what its passes make and drop.

With the letters of ``activations``; N value heads and K key heads of a tp rank, H and V their widths, C = 2·K·H + N·V
what the convolution mixes, and c the tokens of a chunk, to which the tokens T' of each row are filled up:

    kept "all"
      what the convolution reads and gives, after its SiLU as well           3 · T·C·e
      the gate z and its SiLU; the output, normalised, times the gate; 1 / rms    5 · T·N·V·e + T·N·4
      β; softplus's input and output, and g                                  T·N·e + 3 · T·N·4
    kept "selective": what the projections and the rule gave                 T·(C + 2·N·V + 2·N)·e
    with cp, of each of a rank's two runs: the state that enters, and its map   2·m·N·H·(V + H)·4

The rule computes in fp32, for all chunks at once: its terms (``numerics.delta_rule.rule.Terms``), the states before
each chunk, and in the backward their gradients and those of the terms.
"""

from __future__ import annotations

from dataclasses import dataclass

from superstep.cost.program.buffers import FP32
from superstep.cost.program.flops import LocalDims
from superstep.plan.model.attention_rule import DELTA_CHUNK, DeltaShape
from superstep.plan.resolution.resolve import Resolved


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaDims:
    """The dims above on a tensor-parallel rank."""

    N: int
    K: int
    H: int
    V: int

    @classmethod
    def of(cls, delta: DeltaShape, run: Resolved) -> DeltaDims:
        ways = run.plan.mesh.tp if run.plan.rules.cut("heads") == "tp" else 1
        return cls(N=delta.value_heads // ways, K=delta.key_heads // ways, H=delta.key_dim, V=delta.value_dim)

    @property
    def mixed(self) -> int:
        """Numbers of a token that the convolution mixes."""
        return 2 * self.K * self.H + self.N * self.V


def count_kept(run: Resolved, d: LocalDims, e: int, delta: DeltaShape) -> int:
    """Bytes that a block keeps, beside the input of the projections."""
    x = DeltaDims.of(delta, run)
    values, heads = d.T * x.N * x.V, d.T * x.N
    return (3 * d.T * x.mixed + 5 * values + heads) * e + 4 * heads * FP32 + _count_states(run, d, x)


def count_products(run: Resolved, d: LocalDims, e: int, delta: DeltaShape) -> int:
    """Bytes of what projections and the rule gave, which selective recompute keeps."""
    x = DeltaDims.of(delta, run)
    return d.T * (x.mixed + 2 * x.N * x.V + 2 * x.N) * e + _count_states(run, d, x)


def count_deferred(run: Resolved, d: LocalDims, e: int, delta: DeltaShape) -> tuple[int, int]:
    """For BackwardWeight: the input of the last projection, and the gradients of all projections' outputs."""
    x = DeltaDims.of(delta, run)
    small = x.mixed * delta.taps + 2 * x.N + x.V
    return d.T * x.N * x.V * e, d.T * (x.mixed + x.N * x.V + 2 * x.N + d.D) * e + small * FP32


def count_workspace(run: Resolved, d: LocalDims, delta: DeltaShape) -> tuple[int, int]:
    """Bytes that the rule makes in its forward and in its backward."""
    x = DeltaDims.of(delta, run)
    rows = run.plan.microbatch * (2 if run.plan.mesh.cp > 1 else 1)
    tokens = -(-d.T // rows // DELTA_CHUNK) * DELTA_CHUNK * rows
    states = x.H * x.V // DELTA_CHUNK
    terms = x.K * 2 * x.H + x.N * (4 * DELTA_CHUNK + 4 * x.H + 3 * x.V)
    forward = terms + x.N * (states + 3 * x.V)
    backward = terms + x.N * (3 * states + 6 * x.V + 7 * x.H + 5 * DELTA_CHUNK)
    maps = 3 * run.plan.mesh.cp * _count_states(run, d, x)  # gathered, and in the order of the sequence
    return tokens * forward * FP32 + maps, tokens * backward * FP32 + maps


def _count_states(run: Resolved, d: LocalDims, x: DeltaDims) -> int:
    if run.plan.mesh.cp == 1 or run.plan.grain is not None:
        return 0
    return 2 * run.plan.microbatch * x.N * x.H * (x.V + x.H) * FP32
