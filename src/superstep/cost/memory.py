"""Memory: the bytes that each rank will hold, by category, from the plan alone.

What stays from step to step are the flat buffers of the units that a rank holds: the very bytes that
``runtime.buffers`` allocates. What comes and goes is the peak of ``program.memory``, with activations as this decoder
leaves them in eager mode, where e is the bytes of a number in the compute dtype and t, T, Tf, Tv, D, N, K, H, F, V
are ``cost.work.LocalDims``, a tp rank's share:

    block, kept "all"
      input; residual stream between attention and feed-forward       2 · t·D·e
      outputs of both norms, whole where they enter a cut product     (T + Tf)·D·e
      1 / rms of both norms                                           2 · t·4
      queries and keys after rotation; values                         T·(N + 2K)·H·e
      attention's output, and the log-sum-exp of its scores           T·N·H·e + T·N·4
      gate, silu of it, up, their product                             4 · Tf·F·e
      with qk_norm: queries and keys before it, 1 / rms               T·(N + K)·(H·e + 4)
    block, kept "selective": the input, and what products and attention gave
      input                                                           t·D·e
      queries, keys, values before rotation                           T·(N + 2K)·H·e
      attention's output and log-sum-exp                              T·N·H·e + T·N·4
      attention's projection, gate, up, down's output                 (T + Tf)·D·e + 2 · Tf·F·e
    head
      input, 1 / rms                                                  t·D·e + t·4
      whole, fused with the loss:
        the gradient of the norm's output                             Tv·D·e
        where gradients are not whole (ZeRO 2, 3), the weight's       D·V·4
      cut: the norm's output, the softmax                             T·D·e + T·V·4
        each target's column, two masks                               T·10
    embed
      tokens; cut, the own ones, and which are not                    T·8 (+ T·9)

A backward pass that comes in two keeps, from BackwardInput to BackwardWeight, the inputs of the products with
parameters and the gradients of their outputs; and of the norms' weights, which have no product, the gradient itself:

    block
      inputs: both norms' outputs, attention's output, the product of gate and up          2·T·D·e + T·N·H·e + T·F·e
      gradients: of queries, keys, values, gate, up, attention's and feed-forward's sum   T·(N + 2K)·H·e + 2·T·(D + F)·e
      of its norms                                                                        vectors · 4
    head
      fused with the loss: the weight's gradient was made in the forward; ZeRO 2, 3: it   D·4 (+ D·V·4)
      else: the norm's output; the gradient of the logits                                 T·D·e; T·V·e + D·4
    embed
      tokens; the gradient of what they gave                                              T·8; T·D·e

Not counted: what an instruction makes and drops within itself, such as a chunk of the logits; a collective's own
buffers; the batch read ahead; torch itself. Compiled units keep less than this; scores are kept whole on a GPU whose
attention kernels take no fp32 with grouped heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from superstep.cost.work import LocalDims, UnitParameters, local_dims, rank_parameters
from superstep.plan.config import Dtype
from superstep.plan.padding import padded
from superstep.plan.resolve import Resolved
from superstep.plan.shape import ModelShape
from superstep.program.instructions import Program
from superstep.program.memory import Peak, UnitBytes, high_water

ELEMENT_BYTES: dict[Dtype, int] = {"fp32": 4, "bf16": 2}
FP32 = ELEMENT_BYTES["fp32"]
TOKEN = 8
"""Bytes of a token's number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBytes:
    """What one pipeline rank holds, on each of its dp and tp places.

    Attributes:
        params: parameters between steps; in fp32 the master weights are among them.
        gradients: gradient buffers between steps.
        optimizer: Adam's two moments, and master weights that are a copy.
        peak: the most that comes and goes within a step.
    """

    params: int
    gradients: int
    optimizer: int
    peak: Peak

    @property
    def bytes(self) -> int:
        """The rank's peak, all categories together."""
        return self.params + self.gradients + self.optimizer + self.peak.bytes


def rank_bytes(run: Resolved, program: Program) -> tuple[RankBytes, ...]:
    """Each pipeline rank's memory for the step ``program``."""
    owned = rank_parameters(run)
    peaks = high_water(program, unit_bytes(run))
    return tuple(_rank(run, [owned[u] for u in program.held_by(r)], peak) for r, peak in enumerate(peaks))


def buffer_numel(run: Resolved, unit: UnitParameters) -> int:
    """Elements of a unit's whole flat buffer on one tp rank."""
    return padded(unit.on_rank(run.plan.mesh.tp), run.plan.mesh.shards("dense"))


def zero_stage(run: Resolved) -> int:
    """The ZeRO stage in effect: a lone data-parallel rank has nobody to share with."""
    return run.plan.zero if run.plan.mesh.shards("dense") > 1 else 0


def has_fused_loss(run: Resolved) -> bool:
    """Whether the head computes its loss and its gradient chunk by chunk, in its forward pass: it does where whole."""
    return not _is_vocabulary_cut(run)


def _is_vocabulary_cut(run: Resolved) -> bool:
    return run.plan.mesh.tp > 1 and run.plan.rules.cut("vocab") == "tp"


def _rank(run: Resolved, held: list[UnitParameters], peak: Peak) -> RankBytes:
    zero, compute = zero_stage(run), run.config.numerics.compute
    whole = sum(buffer_numel(run, unit) for unit in held)
    share = whole // run.plan.mesh.shards("dense") if zero else whole
    # Master weights of their own: wherever the compute dtype is not theirs. With ZeRO 3 in fp32 they are all there is.
    master = FP32 * share if compute != "fp32" else 0
    kept = 0 if zero == 3 else ELEMENT_BYTES[compute] * whole
    return RankBytes(
        params=FP32 * share if zero == 3 and compute == "fp32" else kept,
        gradients=FP32 * (share if zero >= 2 else whole),
        optimizer=2 * FP32 * share + master,
        peak=peak,
    )


def unit_bytes(run: Resolved) -> tuple[UnitBytes, ...]:
    """What each unit brings and drops within a step, in model order: activations of one microbatch."""
    d, e = local_dims(run), ELEMENT_BYTES[run.config.numerics.compute]
    boundary = d.t * d.D * e
    tokens = TOKEN * d.T
    embed = tokens + (TOKEN + 1) * d.T if _is_vocabulary_cut(run) else tokens
    head = _head(run, d, e)
    kept = [
        (embed, embed, tokens, 0, (tokens, d.T * d.D * e)),
        *[
            (
                _block(d, e, run.shape),
                _block_selective(d, e),
                boundary,
                boundary,
                _block_products(d, e, run.shape),
            )
        ]
        * run.shape.layers,
        (head, head, boundary, boundary, _head_products(run, d, e)),
    ]
    return tuple(
        UnitBytes(
            params=e * buffer_numel(run, unit),
            gradient=FP32 * buffer_numel(run, unit),
            kept_all=whole,
            kept_selective=selective,
            kept_input=kept_input,
            product_inputs=products[0],
            product_gradients=products[1],
            boundary=passed,
        )
        for unit, (whole, selective, kept_input, passed, products) in zip(rank_parameters(run), kept, strict=True)
    )


def _block(d: LocalDims, e: int, shape: ModelShape) -> int:
    stream = 2 * d.t * d.D * e + (d.T + d.Tf) * d.D * e + 2 * d.t * FP32
    attention = d.T * (d.N + 2 * d.K) * d.H * e + d.T * d.N * (d.H * e + FP32)
    qk_norm = d.T * (d.N + d.K) * (d.H * e + FP32) if shape.qk_norm else 0
    return stream + attention + qk_norm + 4 * d.Tf * d.F * e


def _block_selective(d: LocalDims, e: int) -> int:
    attention = d.T * (d.N + 2 * d.K) * d.H * e + d.T * d.N * (d.H * e + FP32)
    return d.t * d.D * e + attention + (d.T + d.Tf) * d.D * e + 2 * d.Tf * d.F * e


def _block_products(d: LocalDims, e: int, shape: ModelShape) -> tuple[int, int]:
    """Inputs of the products, and gradients of their outputs."""
    vectors = 2 * d.D + (2 * d.H if shape.qk_norm else 0)
    inputs = (d.T + d.Tf) * d.D * e + d.T * d.N * d.H * e + d.Tf * d.F * e
    gradients = d.T * (d.N + 2 * d.K) * d.H * e + (d.T + d.Tf) * d.D * e + 2 * d.Tf * d.F * e
    return inputs, gradients + vectors * FP32


def _head_products(run: Resolved, d: LocalDims, e: int) -> tuple[int, int]:
    if has_fused_loss(run):
        return 0, d.D * FP32 + (d.D * d.V * FP32 if zero_stage(run) >= 2 else 0)
    return d.T * d.D * e, d.T * d.V * e + d.D * FP32


def _head(run: Resolved, d: LocalDims, e: int) -> int:
    stream = d.t * d.D * e + d.t * FP32 + d.Tv * d.D * e
    if has_fused_loss(run):
        return stream + (d.D * d.V * FP32 if zero_stage(run) >= 2 else 0)
    return stream + d.T * d.V * FP32 + (TOKEN + 2) * d.T
