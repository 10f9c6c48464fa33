"""Estimate: seconds of a step in closed form, of one plan or of many at once.

A pipeline of p ranks with m microbatches of which rank r takes t_r takes m · max(t) for the slowest rank, and the
others' times once, divided by the chunks: to fill and to drain (Narayanan 2021, sec. 2.2).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from superstep.cost.block import E, Seconds, block_seconds
from superstep.cost.decoder import Array, Decoder
from superstep.cost.kernels import linear_s
from superstep.cost.layout import SCHEDULES, Layout
from superstep.cost.rates import Rates
from superstep.cost.stack import Stack
from superstep.hardware.collectives import Group, all_reduce_s, gather_s, send_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A step's seconds on its slowest rank, split.

    Attributes:
        compute_s: products, attention and memory, without what is computed again.
        recompute_s: what is computed again.
        tensor_s, context_s, experts_s, transfers_s, data_s: traffic that nothing hides, by axis.
        bubble_s: waiting for other stages.
        optimizer_s: the update.
    """

    compute_s: Array
    recompute_s: Array
    tensor_s: Array
    context_s: Array
    experts_s: Array
    transfers_s: Array
    data_s: Array
    bubble_s: Array
    optimizer_s: Array

    @property
    def step_s(self) -> Array:
        """The whole step."""
        return (
            self.compute_s
            + self.recompute_s
            + self.tensor_s
            + self.context_s
            + self.experts_s
            + self.transfers_s
            + self.data_s
            + self.bubble_s
            + self.optimizer_s
        )


def estimate(model: Decoder, layout: Layout, rates: Rates, stack: Stack) -> Estimate:
    """The training step of each plan."""
    dense = block_seconds(model, layout, rates, stack, is_mixture=False)
    mixture = block_seconds(model, layout, rates, stack, is_mixture=True)
    layers = np.ceil(model.layers / layout.pp)
    moe = layers * model.moe_layers / model.layers
    usual = layers - moe
    m = layout.microbatches

    def both(of_dense: Array, of_mixture: Array) -> Array:
        return usual * of_dense + moe * of_mixture

    head_forward, head_backward = _head(model, layout, rates, stack)
    embed = _embedding(model, layout, rates)
    again_share = layout.recomputed_layers
    compute = both(dense.forward_s + dense.backward_s, mixture.forward_s + mixture.backward_s)
    again = again_share * both(_again(dense, layout), _again(mixture, layout))
    # The backward pass sends as much as the forward pass, and full recomputation once more.
    passes = 2 + layout.is_full * again_share
    tensor = passes * both(dense.tensor_s, mixture.tensor_s)
    context = (1 + passes) * both(dense.context_s, mixture.context_s)
    experts = passes * both(mixture.experts_s * 0, mixture.experts_s)
    transfer = _transfer(model, layout, rates, stack)
    middle = compute + again + tensor + context + experts + transfer
    last = middle + head_forward + head_backward
    first = middle + embed
    p, v = layout.pp, layout.chunks
    alone = np.where(p == 1, 1.0, 0.0)
    others = np.where(p == 1, 0.0, np.minimum(first, last) + (p - 2) * middle)
    bubble = np.where(p > 1, others * _bubble_share(dense, layout) / v, 0.0)
    ends = np.where(
        alone > 0, head_forward + head_backward + embed, np.where(first > last, embed, head_forward + head_backward)
    )
    data, optimizer = _data(model, layout, rates, stack, both(dense.backward_s, mixture.backward_s), compute, m)
    return Estimate(
        compute_s=m * (compute + ends),
        recompute_s=m * again,
        tensor_s=m * tensor,
        context_s=m * context,
        experts_s=m * experts,
        transfers_s=m * transfer,
        data_s=data,
        bubble_s=bubble,
        optimizer_s=optimizer,
    )


def _again(block: Seconds, layout: Layout) -> Array:
    return layout.is_full * block.forward_s + layout.is_selective * block.attention_s


def _bubble_share(block: Seconds, layout: Layout) -> Array:
    """Of the time to fill and drain, what the schedule leaves idle: zero-bubble puts weight gradients there."""
    total = block.forward_s + block.backward_s
    h1 = np.maximum(total - 2 * block.weight_s, 0.0) / total
    share = np.ones_like(total)
    share = np.where(layout.schedule == SCHEDULES.index("zb-h1"), h1, share)
    share = np.where(layout.schedule == SCHEDULES.index("zb-v"), h1 * 0.5, share)
    return np.where(layout.schedule == SCHEDULES.index("zb-2p"), 0.0, share)


def _head(model: Decoder, layout: Layout, rates: Rates, stack: Stack) -> tuple[Array, Array]:
    tokens = layout.microbatch * model.sequence_tokens / layout.cp
    columns = model.vocab / layout.tp
    forward, by_input, by_weight = linear_s(tokens, columns, model.width, rates.half_flops_per_s, rates)
    # Logits are written, read in fp32, their softmax kept and read again; fused losses make them chunk by chunk.
    passes = np.where(stack.has_fused_loss > 0, 8.0, 24.0)
    moved_s = passes * tokens * columns / rates.memory_bytes_per_s
    return forward + moved_s / 2, by_input + by_weight + moved_s / 2


def _embedding(model: Decoder, layout: Layout, rates: Rates) -> Array:
    tokens = layout.microbatch * model.sequence_tokens / layout.cp
    return 6 * E * tokens * model.width / rates.memory_bytes_per_s


def _transfer(model: Decoder, layout: Layout, rates: Rates, stack: Stack) -> Array:
    """Seconds for each microbatch of the transfers that nothing hides: one each way for each chunk."""
    tokens = layout.microbatch * model.sequence_tokens / layout.cp
    size = E * tokens * model.width / layout.tp
    seconds = send_s(size, layout.tp * layout.cp * layout.dp, rates.links)
    return np.where(layout.pp > 1, 2 * layout.chunks * seconds * (1 - stack.overlap_pipeline), 0.0)


def _data(
    model: Decoder, layout: Layout, rates: Rates, stack: Stack, backward: Array, compute: Array, m: Array
) -> tuple[Array, Array]:
    """Seconds of the data-parallel traffic that nothing hides, and of the update."""
    # The fullest rank: a stage with the embedding or the head.
    ends = model.vocab * model.width * np.where(layout.pp > 1, 1.0, 2 - model.tied)
    usual = (model.layers - model.moe_layers) * model.dense_parameters + model.moe_layers * model.mixture_parameters
    dense = (usual / layout.pp + ends) / layout.tp
    experts = model.moe_layers * model.expert_parameters / layout.pp / layout.ep
    data = layout.dp * layout.cp
    group = Group(layout.shards, layout.tp)
    copies = Group(data / layout.shards, layout.tp * layout.shards)
    gather_bytes, reduce_bytes = E * dense, stack.gradient_bytes * dense
    # Where a shard is spread over fewer ranks than there are, its sum goes over the copies besides.
    across = np.where(data > layout.shards, all_reduce_s(reduce_bytes / layout.shards, copies, rates.links), 0.0)
    layers = np.ceil(model.layers / layout.pp)
    sharded = layout.zero == 3
    pieces = np.where(sharded, layers, 1.0)
    gather = pieces * gather_s(gather_bytes / pieces, group, rates.links)
    reduce = pieces * gather_s(reduce_bytes / pieces, group, rates.links)
    plain = all_reduce_s(reduce_bytes, Group(data, layout.tp), rates.links)
    expert_copies = Group(np.maximum(data * layout.tp / layout.ep, 1.0), layout.ep)
    for_experts = np.where(
        model.moe_layers > 0, 2 * gather_s(stack.gradient_bytes * experts, expert_copies, rates.links), 0.0
    )
    share = np.where(layout.zero > 0, layout.shards, 1.0)
    total = np.where(layout.zero == 0, plain, reduce + gather + across) + for_experts
    total = np.where(data > 1, total, 0.0)
    # With ZeRO 3 each microbatch gathers twice, for forward and backward, and reduces.
    each = np.where(data > 1, 2 * gather + reduce, 0.0)
    exposed_three = m * np.maximum(each - stack.overlap_data * compute, each * 0.04) + np.where(data > 1, across, 0.0)
    hidden = np.minimum(stack.overlap_data * backward, stack.overlap_data * total)
    data_s = np.where(sharded, exposed_three, total - hidden)
    held = (dense / share) + experts / np.where(layout.zero > 0, expert_copies.ranks, 1.0)
    update = 30.0 * held / rates.memory_bytes_per_s
    off = 28.0 * held / rates.host_bytes_per_s
    return data_s, np.where(layout.offload > 0, off, update)
