"""Memory that softmax attention keeps for its backward pass, with the letters of ``activations``."""

from __future__ import annotations

from superstep.cost.program.buffers import FP32, INDEX, is_exact
from superstep.cost.program.flops import LocalDims
from superstep.cost.program.gradient_flow import GradientFlow
from superstep.plan.model.attention_rule import AttentionRule
from superstep.plan.model.shape import T5_BUCKETS
from superstep.plan.resolution.resolve import Resolved


def count_kept(run: Resolved, d: LocalDims, e: int, rule: AttentionRule, flow: GradientFlow) -> int:
    """Bytes that attention keeps, with ``e`` bytes an activation."""
    kept = d.T * 2 * d.N * d.H * e + _keys(d, e, run, rule) + _log_sums(d, run) + _exchange_bytes(d, e, run)
    kept += _norms_of_heads(d, e, run, flow) if run.shape.qk_norm else 0
    gate = 2 * d.T * d.N * d.H * e * run.shape.style.output_gate  # and what it gives
    return kept + gate + _latent(d, e, run) + _sliding(d, e, run, rule) + _bias(d, e, run)


def _norms_of_heads(d: LocalDims, e: int, run: Resolved, flow: GradientFlow) -> int:
    rows = {"q": d.N, "k": d.K}
    reached = [heads for letter, heads in rows.items() if flow.reaches_heads(letter)]
    scales = len(reached) if run.shape.style.wide_qk_norm else sum(reached)
    return d.T * sum(reached) * d.H * e + d.T * scales * FP32


def _keys(d: LocalDims, e: int, run: Resolved, rule: AttentionRule) -> int:
    """Bytes of keys and values as attention keeps them; that by blocks of queries keeps what it was given."""
    if not is_exact(run):
        is_expanded = run.kept.expanded_keys and not (rule.is_blockwise or run.shape.style.attention_sinks)
        return d.T * 2 * (d.N if is_expanded else d.K) * d.H * e
    return d.T * 2 * d.K * d.H * FP32 * (run.plan.mesh.cp if run.plan.context == "ring" else 1)


def _log_sums(d: LocalDims, run: Resolved) -> int:
    return 0 if is_exact(run) and run.kept.exact_scores else d.T * d.N * FP32


def _sliding(d: LocalDims, e: int, run: Resolved, rule: AttentionRule) -> int:
    """Further bytes of attention in a window, for longer sequences."""
    window = rule.window_in(d.S)
    is_ring = run.plan.mesh.cp > 1 and run.plan.context == "ring"  # which keeps its inputs and output alone
    if window is None or is_exact(run) or is_ring or rule.is_blockwise:
        return 0
    if not run.kept.window_blocks:
        return d.S * INDEX
    if run.shape.style.attention_sinks:  # as with a soft cap, each block of queries is computed again
        return 0
    ends = [(start, min(start + window, d.S)) for start in range(0, d.S, window)]
    return d.T * d.N * d.H * e + sum((end - start) * (end - max(0, start - window + 1)) for start, end in ends) * e


def _latent(d: LocalDims, e: int, run: Resolved) -> int:
    """Bytes that latent attention keeps beyond plain: the rotated part of each head's query, key, padded value and
    output; the output without padding; both narrow widths, before their norms and after, and 1 / rms.
    """
    latent = run.shape.latent
    if latent is None:
        return 0
    narrow, norms = 2 * latent.narrow + latent.rotated, 1 if latent.query_rank is None else 2
    return d.T * ((4 * latent.rotated + d.H) * d.N + narrow) * e + norms * d.T * FP32


def _bias(d: LocalDims, e: int, run: Resolved) -> int:
    """Bytes of a position bias, beside its parameter."""
    shape, distances = run.shape, run.shape.max_distance + 1
    match shape.positions:
        case "rope" | "alibi":  # slopes are made once
            return 0
        case "t5":  # its table by distance, and which distances are of a bucket
            return (0 if is_exact(run) else d.N + T5_BUCKETS) * distances * FP32
        case "relative":
            return d.N * d.H * distances * FP32 if e < FP32 and not is_exact(run) else 0


def _exchange_bytes(d: LocalDims, e: int, run: Resolved) -> int:
    cp = run.plan.mesh.cp
    if run.plan.context == "ring" or cp == 1:
        return 0
    heads = max(cp, d.K)
    # Queries, keys and values come as one tensor, which the queries' part keeps whole.
    beside = heads if run.kept.expanded_keys and heads < d.N else heads - d.K
    return (2 * beside + d.N) * d.T * d.H * e
