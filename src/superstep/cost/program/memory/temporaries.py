"""Workspace: the temporaries of a pass over a unit within its instruction, and what a step has throughout.

It is added to what is kept while the instruction runs (``activations``), at the peak of the pass, minus its result
where that does not exist yet. With the letters of ``activations``, C the tokens of one chunk of the loss, R the rows of
a rank's experts, E those experts, O and I the sides of the largest matrix of a rank, G the block in which exact mode
puts numbers on their grid, P a sequence's keys in whole blocks:

    head, fused with its loss
      forward    logits of a chunk, what softmax makes of them in fp32 (in bf16 logits in fp32 as well), their rows; the
                 norm's output                          C·V·(e + 4 (+ 4)) + C·D·e + Tv·D·e
                   where kernels compute in the logits' place                     for e + 4 (+ 4): e
                   where the weight's gradient is rounded before it is added      D·V·e
      backward   the gradient of the norm's output in fp32, times the incoming one; in bf16 both
                                                        Tv·D·4 (+ Tv·D·4) - t·D·e
                   where gradients are not whole (ZeRO 2, 3), the weight's        D·V·4
    block
      forward    of experts, their outputs once more, in the order of the rows, before shared ones and the result; or
                 with shared ones both outputs and their sum
                                                        max(R·D - (3; 4)·m·s·F, (3·m·D))·e - t·D·e
      backward   gradients of gate and up               2·Tf·F·e - t·D·e
                   of experts likewise, or of the rows of their outputs; in bf16 a GPU's kernel makes a weight's of all
                   experts at once                      max(2·R·F, R·D, R·F + E·F·D)·e - t·D·e
                   of shared ones likewise, 2·m·s·F·e - t·D·e, before the others, beside which there is then only the
                   gradient of their input              ... - (3; 4)·m·s·F·e + m·D·e
      BackwardInput
                 those of gate, up and their product, which itself stays
                                                        3·Tf·F·e - t·D·e
                 of experts likewise, or those of their rows by gate and by up, one of them in parts, when gate, up and
                 its silu are gone; after shared ones, with the gradient of their input
                                                        max(3·R·F, 3·R·D - R·F)·e (- m·s·F·e + m·D·e) - t·D·e
                 or all that BackwardWeight needs, when the feed-forward's other activations are gone, and in exact mode
                 and with adapters where these are still there
    exact mode, by torch: backward
      head       the weight's gradient in fp32 and on the grid, the input's       O·I·4 + min(G, O·I)·8 + T·D·4
      block      likewise; or a product's terms; or one of attention's chunks: scores, weights and their gradients
                                                        ... + 2·T·D·4, or terms·T·D·4, or 4·rows·N·chunk·P·4
    exact mode, by its kernels (``plan.saved_activations``): backward
      head       for the weight's gradient its inputs in fp32; the input's        T·D·4 + T·D·4
      block      likewise; or attention: gradients of keys and values on the grid, those of queries, and in bf16 three
                 copies in fp32                         T·F·4 + 2·T·D·4, or T·cp·2·K·H·8 + T·N·H·(e, or e + 16)
    a step
      tables of positions, of each microbatch where documents are kept apart      2·S·H·e, or m·2·T·H·e
      ids and targets of a rank's tokens; of samples all fields                   m·T·16

A dense block's forward pass, and recomputation, make less than its backward pass, with as much kept.
"""

from __future__ import annotations

from superstep.cost.program.buffers import ELEMENT_BYTES, FP32, INDEX, TOKEN, is_exact, zero_stage
from superstep.cost.program.flops import LocalDims, local_dims
from superstep.cost.program.gradient_flow import trains_table
from superstep.cost.program.memory import linear_attention
from superstep.plan.model.attention_rule import AttentionRule, DeltaShape
from superstep.plan.resolution.resolve import Resolved

CHUNK_TOKENS = 512
"""Rows of logits that a fused loss has at once (``numerics.loss``)."""
GRID_BLOCK = 2**16
"""Numbers that exact mode puts on its grid at once (``numerics.fixed_point``)."""
KEY_BLOCK = 256
"""Keys that exact mode's attention sums at once (``numerics.attention.invariant_attention``)."""


def head_workspace(run: Resolved) -> tuple[int, int]:
    """Bytes of the head's forward and of its backward pass."""
    d, e = local_dims(run), ELEMENT_BYTES[run.config.numerics.compute]
    if is_exact(run):
        return 0, _sum_bytes(run, d, d.V, d.D) + d.T * d.D * FP32
    Tv = d.Tv if run.shape.mtp_weight is None else 2 * d.Tv
    rows, is_trained = min(Tv, CHUNK_TOKENS), trains_table(run, len(run.outline.units) - 1)
    is_wide = run.kept.wide_logits or run.shape.style.logit_cap is not None  # a cap makes others in fp32
    in_fp32 = (FP32 if e == FP32 else 2 * FP32) if is_wide else 0
    rounded = d.D * d.V * e if e < FP32 and is_trained and run.kept.rounded_products else 0
    forward = rows * d.V * (e + in_fp32) + (rows + Tv) * d.D * e + rounded
    of_weight = d.D * d.V * FP32 if is_trained and zero_stage(run).shards_gradients else 0
    backward = Tv * d.D * (FP32 if e == FP32 else 2 * FP32) - d.t * d.D * e
    return forward, backward + of_weight


def block_workspace(run: Resolved, mixer: AttentionRule | DeltaShape) -> tuple[int, int]:
    """The same of a block: of its feed-forward, or of its linear attention where that is larger."""
    forward, backward = _feed_forward_workspace(run)
    own = max(forward, count_unpacked(run)), max(backward, count_unpacked(run))
    if isinstance(mixer, AttentionRule):
        return own
    of_mixer = linear_attention.count_workspace(run, local_dims(run), mixer)
    return max(own[0], of_mixer[0]), max(own[1], of_mixer[1])


def count_unpacked(run: Resolved) -> int:
    """Bytes of the largest frozen matrix in blocks on a rank, as a product reads it."""
    packed = [p for unit in run.outline.units for p in unit.parameters if p.block_format]
    elements = (p.numel(run.plan.rules, run.plan.mesh.tp) for p in packed)
    return max(elements, default=0) * ELEMENT_BYTES[run.config.numerics.compute]


def _feed_forward_workspace(run: Resolved) -> tuple[int, int]:
    d, e, moe = local_dims(run), ELEMENT_BYTES[run.config.numerics.compute], run.shape.moe
    if is_exact(run):
        return 0, _exact_block(run, d)
    if moe is None:
        return 0, max(2 * d.Tf * d.F - d.t * d.D, 0) * e
    shared = d.m * moe.shared_experts
    outputs = d.m * moe.experts_per_token * d.D - count_inner(run) * shared * d.F
    forward = max(outputs, 3 * d.m * d.D if shared else 0) - d.t * d.D
    return max(forward, 0) * e, max(_mixture(run, d) - d.t * d.D, 0) * e


def input_workspace(run: Resolved, product_gradients: int, mixer: AttentionRule | DeltaShape) -> int:
    """Bytes of a block's BackwardInput.

    Args:
        product_gradients: bytes of gradients that it leaves for BackwardWeight.
    """
    d, e, moe = local_dims(run), ELEMENT_BYTES[run.config.numerics.compute], run.shape.moe
    if is_exact(run) or run.config.lora is not None:
        return max(block_workspace(run, mixer)[1], product_gradients)
    if moe is None:
        made, dropped = 3 * d.Tf * d.F, (2 + keeps_gate(run)) * d.Tf * d.F
    else:
        R, shared = d.m * moe.experts_per_token, d.m * moe.shared_experts
        made = R * max(3 * d.F, 3 * d.D - d.F) - shared * d.F + (d.m * d.D if shared else 0)
        dropped = (count_inner(run) - 1) * (R + shared) * d.F + R * d.D
    of_mixer = linear_attention.count_workspace(run, d, mixer)[1] if isinstance(mixer, DeltaShape) else 0
    return max((made - d.t * d.D) * e, product_gradients - dropped * e, of_mixer)


def step_bytes(run: Resolved, *, has_blocks: bool) -> int:
    """Bytes that a step has throughout: tables of our own decoder's blocks, on ranks that have any, ids and targets; of
    samples all fields.
    """
    microbatches, tokens = run.plan.microbatches, run.plan.microbatch * run.targets_of_row
    if run.samples is not None:
        return microbatches * run.plan.microbatch * run.samples.row_bytes
    ids = microbatches * tokens // run.plan.mesh.cp * 2 * TOKEN
    if not has_blocks:
        return ids
    d, e = local_dims(run), ELEMENT_BYTES[run.config.numerics.compute]
    tables = 1 if run.shape.style.local_theta is None else 2
    if run.shape.positions != "rope":
        tables = 0
    return ids + tables * (microbatches * d.T if run.config.data.is_masked else d.S) * 2 * d.H * e


def count_inner(run: Resolved) -> int:
    """Tensors of an expert's inner width that are kept of a row: gate, up and their product; and silu of the gate."""
    return 3 if run.shape.style.gate_limit is not None else 3 + run.kept.silu


def keeps_gate(run: Resolved) -> bool:
    """Whether a feed-forward keeps the activation of its gate: kernels, which do not, have silu alone."""
    return run.kept.silu or run.shape.style.gate != "silu"


def batch_bytes(run: Resolved, *, streams: int) -> int:
    """Bytes of a global batch with ``streams`` streams, where all of it is on every rank."""
    numbers = run.config.train.batch_sequences * run.config.data.sequence_tokens
    return numbers * (2 * TOKEN + INDEX + streams * FP32)


def exact_terms(cells: int, tp: int) -> int:
    """The most result-sized matrices of exact mode's sum at once: one for each cell of a rank's inner dim, and for each
    rank with other cells.
    """
    return cells // tp + (tp + 1 if tp > 1 else 0)


def _mixture(run: Resolved, d: LocalDims) -> int:
    """Elements made in the backward pass of a block's experts."""
    moe = run.shape.moe
    assert moe is not None
    rows, shared = d.m * moe.experts_per_token, d.m * moe.shared_experts
    # Only this kernel gives the gradient of all experts' weights as a tensor of its own.
    of_weights = 0 if run.config.numerics.compute == "fp32" else moe.experts // run.plan.mesh.ep * d.F * d.D
    of_experts = max(2 * rows * d.F, rows * d.D, rows * d.F + of_weights)
    if not shared:
        return of_experts
    return max(2 * shared * d.F, of_experts - count_inner(run) * shared * d.F + d.m * d.D)


def _exact_block(run: Resolved, d: LocalDims) -> int:
    grain = run.plan.grain
    assert grain is not None, "exact mode"
    gradient = _sum_bytes(run, d, d.D, max(d.F, d.N * d.H)) + 2 * d.T * d.D * FP32
    product = exact_terms(grain.cells, run.plan.mesh.tp) * d.T * d.D * FP32
    return max(gradient, product, _exact_attention(run, d, grain.chunks))


def _exact_attention(run: Resolved, d: LocalDims, chunks: int) -> int:
    # Documents are attended to one after the other, and so are rows then.
    rows = 1 if run.config.data.is_masked else run.plan.microbatch
    if run.kept.exact_scores:
        keys = -(-d.S // KEY_BLOCK) * KEY_BLOCK
        return 4 * rows * d.N * (d.S // chunks) * keys * FP32
    e = ELEMENT_BYTES[run.config.numerics.compute]
    sums = d.T * (run.plan.mesh.cp if run.plan.context == "ring" else 1) * 2 * d.K * d.H * 8
    return sums + d.T * d.N * d.H * (e if e == FP32 else e + 4 * FP32)


def _sum_bytes(run: Resolved, d: LocalDims, outputs: int, inputs: int) -> int:
    """A matrix's gradient, and a block of it on the grid; or its terms."""
    if not run.kept.exact_products:
        return d.T * inputs * FP32
    return outputs * inputs * FP32 + min(GRID_BLOCK, outputs * inputs) * 8
