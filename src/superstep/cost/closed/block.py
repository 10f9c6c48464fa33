"""Block: seconds of one layer on one rank, for one microbatch.

T tokens of the microbatch on a context-parallel rank, t those of the residual stream there (T / tp where the sequence
is split), e bytes of a number. Passes are reads or writes of a whole tensor:

                                 two norms   two sums   rotation   activation
    fused, one kernel each       2 · 2       2 · 3      2          2, gated 3       of t·D, t·D, T·(N + K)·H, T·F
    eager                        2 · 17      2 · 3      13         3, gated 5

Eager norms go to fp32 and back, an operation at a time; biases and dropout add their own passes there. The backward
pass moves twice as much.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from superstep.cost.closed.framework_arrays import Stack
from superstep.cost.closed.kernels import attention_s, linear_s, window_share
from superstep.cost.closed.model_numbers import DecoderNumbers
from superstep.cost.closed.parallel_degrees import Layout
from superstep.cost.closed.rates import ChipRates
from superstep.hardware.collectives import RankGroup, all_to_all_s, dispatch_s, gather_s, relay_s
from superstep.hardware.units import Array
from superstep.plan.model.shape import ROTATED

E = 2.0
"""Bytes of an activation."""
READ_BY_BLOCKS = ("microbatch", "microbatches", "cp", "tp", "ep", "sequence_parallel", "is_ulysses")
"""The fields of a layout on which a block's seconds depend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSeconds:
    """One layer's seconds.

    Attributes:
        forward_s, input_s, weight_s: compute of the forward pass, of the gradients of inputs and of weights.
        attention_s: the part that selective recomputation repeats.
        tensor_s: exposed tensor-parallel traffic of one forward pass; the backward pass has as much.
        context_s, experts_s: the same for context and expert parallelism.
    """

    forward_s: Array
    input_s: Array
    weight_s: Array
    attention_s: Array
    tensor_s: Array
    context_s: Array
    experts_s: Array

    @property
    def backward_s(self) -> Array:
        return self.input_s + self.weight_s


def block_seconds(
    model: DecoderNumbers, layout: Layout, rates: ChipRates, stack: Stack, *, is_mixture: bool
) -> LayerSeconds:
    """A layer with one feed-forward, or with a mixture of experts."""
    tokens = layout.microbatch * model.sequence_tokens / layout.cp
    stream = np.where(layout.sequence_parallel > 0, tokens / layout.tp, tokens)
    flops = rates.product_flops_per_s
    heads, kv_heads = model.heads / layout.tp, np.maximum(model.kv_heads / layout.tp, 1.0)
    inner = heads * model.head_dim
    products = _projections(model, layout, tokens, heads, kv_heads, rates)
    core = attention_s(
        layout.microbatch * heads,
        model.sequence_tokens / layout.cp,
        model.sequence_tokens,
        model.head_dim,
        rates,
        stack,
        1 - model.windowed_layers * (1 - window_share(model.window, model.sequence_tokens)),
    )
    # Cut into runs of neighbours, the last rank sees nearly all keys, and all wait for it (Brandon 2023).
    uneven = np.where((stack.balances_context > 0) | (layout.is_ulysses > 0), 1.0, 2 - 1 / layout.cp)
    # Where queries and keys are wider than values, one of the two products forward and three of the five backward are.
    wider = model.turned / np.maximum(model.head_dim, 1.0)
    core = (core[0] * uneven * (1 + wider / 2), core[1] * uneven * (1 + 3 * wider / 5))
    width = np.where(is_mixture, model.shared_ffn, model.ffn) / layout.tp
    moved = _count_moved_bytes(model, tokens, stream, inner + kv_heads * model.head_dim, width, stack)
    kernels = np.where(stack.has_fused_elementwise > 0, 8.0, 30.0) + np.where(stack.has_fused_norms > 0, 0.0, 14.0)
    if not is_mixture:
        up = linear_s(tokens, width * (1 + model.gated), model.width, flops, rates)
        products += [up, linear_s(tokens, model.width, width, flops, rates)]
        experts_s = np.zeros_like(tokens)
    else:
        more, more_moved, experts_s = _experts(model, layout, rates, stack)
        kernels = kernels + 24
        products += more
        moved = moved + more_moved
    moved = moved + np.where(stack.is_eight_bit > 0, _cast(model, tokens, stream, inner, width), 0.0)
    moved_s = moved / rates.memory_bytes_per_s + kernels * rates.launch_s
    forward_s = sum((each[0] for each in products), core[0] + moved_s)
    input_s = sum((each[1] for each in products), core[1] + 2 * moved_s)
    gathered_s = _gather_bytes(model, layout, stack, is_mixture=is_mixture) / rates.memory_bytes_per_s
    weight_s = (1 - model.frozen) * sum((each[2] for each in products), gathered_s)
    return LayerSeconds(
        forward_s=forward_s,
        input_s=input_s,
        weight_s=weight_s,
        attention_s=core[0],
        tensor_s=_tensor_s(model, layout, tokens, rates, stack),
        context_s=_context_s(model, layout, tokens, kv_heads, rates, core[0]),
        experts_s=experts_s,
    )


def _gather_bytes(model: DecoderNumbers, layout: Layout, stack: Stack, *, is_mixture: bool) -> Array:
    """Memory traffic to add a microbatch's weight gradients to earlier ones: read, and the sum read and written.

    The first microbatch has none before it; each has its part of the others' traffic.
    """
    dense = (model.mixture_parameters if is_mixture else model.dense_parameters) / layout.tp
    experts = model.expert_parameters / layout.ep if is_mixture else 0.0
    often = 1 - 1 / layout.microbatches
    return often * (E + 2 * stack.kept_gradient_bytes) * (dense + experts)


def _projections(
    model: DecoderNumbers, layout: Layout, tokens: Array, heads: Array, kv_heads: Array, rates: ChipRates
) -> list[tuple[Array, Array, Array]]:
    """Products before and after attention; latent attention goes through two narrow widths."""
    flops, wide = rates.product_flops_per_s, heads * model.head_dim
    plain = linear_s(tokens, (heads + 2 * kv_heads) * model.head_dim, model.width, flops, rates)
    keys = np.maximum(model.key_rank, 1.0)
    latent = [
        linear_s(tokens, model.query_rank + keys + ROTATED, model.width, flops, rates),
        linear_s(tokens, 1.5 * wide, model.query_inputs, flops, rates),
        linear_s(tokens, 2 * wide, keys, flops, rates),
    ]
    has_latent = model.key_rank > 0
    before = tuple(np.where(has_latent, a + b + c, d) for a, b, c, d in zip(*latent, plain, strict=True))
    return [(before[0], before[1], before[2]), linear_s(tokens, model.width, wide, flops, rates)]


def _count_moved_bytes(
    model: DecoderNumbers, tokens: Array, stream: Array, rotated: Array, width: Array, stack: Stack
) -> Array:
    """Memory traffic of a forward pass, without products and attention."""
    norms = np.where(stack.has_fused_norms > 0, 4.0, 34.0 * stack.eager) * stream * model.width
    fused = stack.has_fused_elementwise > 0
    sums = (
        np.where(fused, 6.0 + model.dropout, (6.0 + 4 * model.biases + 5 * model.dropout) * stack.eager)
        * stream
        * model.width
    )
    rotation = np.where(fused, 2.0, 13.0 * stack.eager) * tokens * rotated * model.rotates
    activation = np.where(fused, 2 + model.gated, 3 + 2 * model.gated + 2 * model.biases) * tokens * width
    return E * (norms + sums + rotation + activation)


def _cast(model: DecoderNumbers, tokens: Array, stream: Array, inner: Array, width: Array) -> Array:
    """Memory traffic to convert products' inputs to 8 bits, plain and transposed: 2 read, 2 written.

    A split sequence is cast before it is gathered.
    """
    return 4.0 * (2 * stream * model.width + tokens * (inner + width))


def _tensor_s(model: DecoderNumbers, layout: Layout, tokens: Array, rates: ChipRates, stack: Stack) -> Array:
    """Two all-reduces, or with a split sequence two gathers and two reduce-scatters (Korthikanti 2022, fig. 5)."""
    group = RankGroup(layout.tp, np.ones_like(layout.tp))
    size = E * tokens * model.width
    seconds = 4 * gather_s(size, group, rates.links)
    return np.where(layout.tp > 1, seconds * np.maximum(1 - stack.overlap_tensor, 0.0), 0.0)


def _context_s(
    model: DecoderNumbers, layout: Layout, tokens: Array, kv_heads: Array, rates: ChipRates, attention: Array
) -> Array:
    """Keys and values go round a ring beside attention; the rest is exposed (Liu 2023)."""
    group = RankGroup(layout.cp, layout.tp)
    size = E * tokens * layout.cp * kv_heads * (2 * model.head_dim + model.turned)
    seconds = relay_s(size, group, rates.links)
    first = seconds / np.maximum(layout.cp - 1, 1.0)
    ring = np.maximum(seconds - attention, first)
    # Queries, keys, values and the output change hands, and attention waits for them (Jacobs 2023, sec. 3.1).
    heads = model.heads / layout.tp + np.maximum(kv_heads, layout.cp)
    exchange = all_to_all_s(E * tokens * heads * (2 * model.head_dim + model.turned), group, rates.links)
    return np.where(layout.cp > 1, np.where(layout.is_ulysses > 0, exchange, ring), 0.0)


def _experts(
    model: DecoderNumbers, layout: Layout, rates: ChipRates, stack: Stack
) -> tuple[list[tuple[Array, Array, Array]], Array, Array]:
    """Products, memory traffic and all-to-alls of a mixture; tp cuts the tokens there, not the experts. The rank with
    the most rows decides, as all others wait for it.
    """
    tokens = layout.microbatch * model.sequence_tokens / layout.cp / layout.tp
    rows = tokens * model.experts_per_token * model.imbalance
    held = np.maximum(model.experts / layout.ep, 1.0)
    each = np.maximum(rows / held, 1.0)
    width = np.maximum(model.expert_ffn, 1.0)
    flops = rates.product_flops_per_s
    up = linear_s(each, width * (1 + model.gated), model.width, flops * rates.grouped_share, rates)
    down = linear_s(each, model.width, width, flops * rates.grouped_share, rates)
    # A grouped product launches once: its tiles are dealt to the cores together.
    spare = (held - 1) * rates.launch_s
    grouped = [tuple(held * seconds - spare for seconds in layer) for layer in (up, down)]
    shared = np.maximum(model.shared_ffn / layout.tp, 1.0)
    whole = layout.microbatch * model.sequence_tokens / layout.cp
    has_shared = np.where(model.shared_ffn > 0, 1.0, 0.0)
    beside = [
        tuple(has_shared * seconds for seconds in layer)
        for layer in (
            linear_s(whole, shared * (1 + model.gated), model.width, flops, rates),
            linear_s(whole, model.width, shared, flops, rates),
        )
    ]
    router = linear_s(tokens, np.maximum(model.experts, 1.0), model.width, rates.half_flops_per_s, rates)
    # Rows are put in order, given back and weighed; each way a read and a write.
    moved = E * (8 * rows * model.width + (2 + model.gated) * rows * width)
    moved = moved + np.where(stack.is_eight_bit > 0, 4.0 * rows * (model.width + width), 0.0)
    group = RankGroup(layout.ep, np.ones_like(layout.ep))
    plain = all_to_all_s(E * rows * model.width, group, rates.links)
    once = dispatch_s(E * tokens * model.imbalance * model.width, model.experts_per_token, group, rates.links)
    exchange = np.where(layout.ep > 1, 2 * np.where(stack.sends_once > 0, once, plain) / rates.exchange_share, 0.0)
    exchange = exchange * (1 - stack.overlap_experts)
    return [*grouped, *beside, router], moved, exchange  # type: ignore[list-item]
