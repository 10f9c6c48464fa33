"""Workspace: what a pass over a unit makes and drops within one instruction, beside what ``memory`` counts.

With the letters of ``cost.program.memory``, C the tokens of one chunk of the loss, O and I the sides of the largest
matrix of a rank, G the block in which exact mode puts numbers on their grid, P a sequence's keys in whole blocks:

    fast mode
      head, fused with its loss    logits of a chunk and their softmax; its rows; in bf16 the weight's gradient
                                                                       C·V·(e + 4) + C·D·e (+ D·V·e)
      block                        gradients in its feed-forward       2·Tf·F·e
    exact mode, by torch
      head                         the weight's gradient in fp32 and on the grid, the input's
                                                                       O·I·4 + min(G, O·I)·8 + T·D·4
      block                        likewise; or a product's terms; or one of attention's chunks: scores, weights and
                                   their gradients        ... + 2·T·D·4, or terms·T·D·4, or 4·rows·N·chunk·P·4
    exact mode, by its kernels (``plan.kept``)
      head                         for the weight's gradient its inputs in fp32; the input's
                                                                       T·D·4 + T·D·4
      block                        likewise; or attention: gradients of keys and values on the grid, those of queries,
                                   and in bf16 three copies in fp32
                                                          T·F·4 + 2·T·D·4, or T·cp·2·K·H·8 + T·N·H·(e, or e + 16)
    positions, where documents are kept apart: a table of each microbatch          m·2·T·H·e
    the batch of a step, where all of it lies on every rank: ids, targets, starts, and streams of fp32

It is the height of a unit's passes and no course: a step's peak is where most is kept, which is beside the head or the
last block of a rank, so that the larger of both is added there.
"""

from __future__ import annotations

from superstep.cost.program.memory import ELEMENT_BYTES, FP32, INDEX, TOKEN, is_exact
from superstep.cost.program.work import LocalDims, local_dims
from superstep.plan.resolve import Resolved

CHUNK_TOKENS = 512
"""Rows of logits that a fused loss has at once (``numerics.loss``)."""
GRID_BLOCK = 2**16
"""Numbers that exact mode puts on its grid at once (``numerics.fixed_point``)."""
KEY_BLOCK = 256
"""Keys that exact mode's attention sums at once (``numerics.invariant_attention``)."""


def workspace(run: Resolved) -> int:
    """The most that an instruction of the step makes and drops, and the tables that a step has throughout."""
    d, e = local_dims(run), ELEMENT_BYTES[run.config.numerics.compute]
    work = max(_exact_head(run, d), _exact_block(run, d)) if is_exact(run) else max(_head(d, e), 2 * d.Tf * d.F * e)
    return work + _tables(run, d)


def attention_workspace(run: Resolved) -> int:
    """What exact mode's attention by torch makes and drops of one chunk's queries: the scores of all their heads, and
    what follows from them. 0 where kernels compute it, in fast mode, and of units of the user's own.
    """
    grain = run.plan.grain
    if run.decoder is None or grain is None or not run.kept.exact_scores:
        return 0
    return _exact_attention(run, local_dims(run), grain.chunks)


def batch_bytes(run: Resolved, *, streams: int) -> int:
    """A global batch with so many streams."""
    numbers = run.config.train.batch_sequences * run.config.data.sequence_tokens
    return numbers * (2 * TOKEN + INDEX + streams * FP32)


def exact_terms(cells: int, tp: int) -> int:
    """Matrices as large as a product's result that exact mode's sum of it has at once: one of each cell of a rank's
    inner dim, and of each rank that has other cells.
    """
    return cells // tp + (tp + 1 if tp > 1 else 0)


def _head(d: LocalDims, e: int) -> int:
    C = min(d.Tv, CHUNK_TOKENS)
    return C * d.V * (e + FP32) + C * d.D * e + (d.D * d.V * e if e < FP32 else 0)


def _exact_head(run: Resolved, d: LocalDims) -> int:
    return _summed(run, d, d.V, d.D) + d.T * d.D * FP32


def _exact_block(run: Resolved, d: LocalDims) -> int:
    grain = run.plan.grain
    assert grain is not None, "exact mode"
    gradient = _summed(run, d, d.D, max(d.F, d.N * d.H)) + 2 * d.T * d.D * FP32
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


def _summed(run: Resolved, d: LocalDims, outputs: int, inputs: int) -> int:
    """A matrix's gradient, and a block of it on the grid; or what it is made of."""
    if not run.kept.exact_products:
        return d.T * inputs * FP32
    return outputs * inputs * FP32 + min(GRID_BLOCK, outputs * inputs) * 8


def _tables(run: Resolved, d: LocalDims) -> int:
    e = ELEMENT_BYTES[run.config.numerics.compute]
    return (run.plan.microbatches * d.T if run.config.data.is_masked else d.S) * 2 * d.H * e
