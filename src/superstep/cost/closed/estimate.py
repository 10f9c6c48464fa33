"""Estimate: seconds of a step in closed form, of one plan or of many at once.

A pipeline of p ranks with m microbatches, where rank r takes t_r for each, takes m · max(t) for the slowest rank, and
the others' times once, divided by the chunks: to fill and to drain (Narayanan 2021, sec. 2.2).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from superstep.cost.closed.block import READ_BY_BLOCKS, E, LayerSeconds, block_seconds
from superstep.cost.closed.framework_arrays import Stack
from superstep.cost.closed.kernels import linear_s
from superstep.cost.closed.model_numbers import DecoderNumbers
from superstep.cost.closed.parallel_degrees import SCHEDULES, Layout, once_for_each_run
from superstep.cost.closed.rates import ChipRates
from superstep.hardware.collectives import RankGroup, all_reduce_s, gather_s, send_s
from superstep.hardware.units import Array
from superstep.plan.optimizers import OptimizerName, update_passes


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A step's seconds on its slowest rank, by use.

    Attributes:
        compute_s: products, attention and memory, without recomputation.
        tensor_s, context_s, experts_s, transfers_s, data_s: exposed traffic, by axis.
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


def update_traffic_bytes(optimizer: OptimizerName) -> float:
    """Bytes that an update reads and writes for each of its numbers: fp32, and the 16-bit weight that computes."""
    return 4 * update_passes(optimizer) + E


def estimate(
    model: DecoderNumbers, layout: Layout, rates: ChipRates, stack: Stack, *, optimizer: OptimizerName = "adamw"
) -> Estimate:
    """The training step of each plan."""

    def block(*, is_mixture: bool) -> LayerSeconds:
        if model.layers.ndim:
            return block_seconds(model, layout, rates, stack, is_mixture=is_mixture)
        return once_for_each_run(
            layout, READ_BY_BLOCKS, lambda few: block_seconds(model, few, rates, stack, is_mixture=is_mixture)
        )

    dense = block(is_mixture=False)
    mixture = block(is_mixture=True) if np.any(model.experts > 0) else dense
    share = model.moe_layers / model.layers

    def layer(of_dense: Array, of_mixture: Array) -> Array:
        return (1 - share) * of_dense + share * of_mixture

    computed = layer(dense.forward_s + dense.backward_s, mixture.forward_s + mixture.backward_s)
    again = layout.recomputed_layers * layer(_again(dense, layout), _again(mixture, layout))
    # The backward pass sends as much as the forward pass, and full recomputation once more.
    passes = 2 + layout.is_full * layout.recomputed_layers
    tensor = passes * layer(dense.tensor_s, mixture.tensor_s)
    context = (1 + passes) * layer(dense.context_s, mixture.context_s)
    experts = passes * layer(np.zeros_like(mixture.experts_s), mixture.experts_s)
    whole = computed + again + tensor + context + experts
    layers, ends, others = _stages(
        model, layout, whole, embedding_s(model, layout, rates), head_s(model, layout, rates, stack)
    )
    transfer = _transfer(model, layout, rates, stack)
    m = layout.microbatches
    data, updated = _data(
        model, layout, rates, stack, layers * layer(dense.backward_s, mixture.backward_s), layers * computed
    )
    rate = np.where(layout.offload > 0, rates.host_bytes_per_s, rates.memory_bytes_per_s)
    return Estimate(
        compute_s=m * (layers * computed + ends),
        recompute_s=m * layers * again,
        tensor_s=m * layers * tensor,
        context_s=m * layers * context,
        experts_s=m * layers * experts,
        transfers_s=(m + layout.pp - 1) * transfer,
        data_s=data,
        bubble_s=others * _bubble_share(dense, layout) / layout.chunks * _unevenness(model, layout),
        optimizer_s=update_traffic_bytes(optimizer) * updated / rate,
    )


def _stages(
    model: DecoderNumbers, layout: Layout, layer: Array, embed: Array, head: Array
) -> tuple[Array, Array, Array]:
    """Layers of the slowest rank, seconds of embedding and head on it, and the seconds of all other ranks.

    Where the layers do not divide, the last and the first rank, with head and embedding, hold one fewer.
    """
    most = np.ceil(model.layers / layout.pp)
    spare = most * layout.pp - model.layers
    on_last, on_first = most - (spare >= 1), most - (spare >= 2)
    middle, first, last = most * layer, on_first * layer + embed, on_last * layer + head
    has_middle = layout.pp > 2
    is_last = (last >= first) & ((last >= middle) | ~has_middle)
    is_first = ~is_last & ((first >= middle) | ~has_middle)
    layers = np.where(is_last, on_last, np.where(is_first, on_first, most))
    ends = np.where(is_last, head, np.where(is_first, embed, 0.0))
    total = model.layers * layer + embed + head
    alone = layout.pp == 1
    others = np.where(alone, 0.0, total - layers * layer - ends)
    return np.where(alone, model.layers, layers), np.where(alone, embed + head, ends), others


def _again(block: LayerSeconds, layout: Layout) -> Array:
    return layout.is_full * block.forward_s + layout.is_selective * block.attention_s


def _unevenness(model: DecoderNumbers, layout: Layout) -> Array:
    """Layers of the largest stage over the mean: a pipeline of several stages on a rank fills at its pace."""
    stages = layout.pp * layout.chunks
    return np.where(layout.chunks > 1, np.ceil(model.layers / stages) * stages / model.layers, 1.0)


def _bubble_share(block: LayerSeconds, layout: Layout) -> Array:
    """The idle share of the time to fill and drain: zero-bubble schedules put weight gradients there.

    ZB-V needs 2·p - 1 microbatches (Qi 2023, sec. 6); a single one passes all stages alone.
    """
    total = block.forward_s + block.backward_s
    p, m = layout.pp, layout.microbatches
    # Fewer microbatches than ranks leave fewer weights' gradients to fill with; a lone one has its own.
    fillers = 2 - np.clip((p - m) / np.maximum(p - 1, 1.0), 0.0, 1.0)
    h1 = np.maximum(total - fillers * block.weight_s, 0.0) / total
    share = np.ones_like(total)
    share = np.where(layout.schedule == SCHEDULES.index("zb-h1"), h1, share)
    folded = np.clip((2 * p - 1 - m) / np.maximum(2 * p - 2, 1.0), 0.0, 1.0)
    share = np.where(
        layout.schedule == SCHEDULES.index("zb-v"), (1 - folded) * h1 * 0.5 + folded * layout.chunks, share
    )
    # Breadth-first fills and drains the pipeline for each group of microbatches (Lamy-Poirier 2023, sec. 3).
    groups = np.where(layout.group > 0, np.ceil(m / np.maximum(layout.group, 1.0)), 1.0)
    share = np.where(layout.schedule == SCHEDULES.index("breadth-first"), groups, share)
    return np.where(layout.schedule == SCHEDULES.index("zb-2p"), 0.0, share)


def head_s(model: DecoderNumbers, layout: Layout, rates: ChipRates, stack: Stack) -> Array:
    """Seconds of the head and the loss on one microbatch, both passes."""
    tokens = layout.microbatch * model.sequence_tokens / layout.cp
    columns = model.vocab_part(layout.tp)
    forward, by_input, by_weight = linear_s(tokens, columns, model.width, rates.half_flops_per_s, rates)
    # Logits are written, read in fp32, their softmax kept and read again; fused losses make them chunk by chunk.
    passes = np.where(stack.has_fused_loss > 0, 8.0, 24.0)
    moved_s = passes * tokens * columns / rates.memory_bytes_per_s
    return forward + by_input + by_weight + moved_s


def embedding_s(model: DecoderNumbers, layout: Layout, rates: ChipRates) -> Array:
    """Seconds of the embedding on one microbatch, both passes."""
    tokens = layout.microbatch * model.sequence_tokens / layout.cp
    return 6 * E * tokens * model.width / rates.memory_bytes_per_s


def _transfer(model: DecoderNumbers, layout: Layout, rates: ChipRates, stack: Stack) -> Array:
    """Seconds of exposed transfers for each microbatch: one each way for each chunk."""
    tokens = layout.microbatch * model.sequence_tokens / layout.cp
    size = E * tokens * model.width / layout.tp
    seconds = send_s(size, layout.tp * layout.cp * layout.dp, rates.links)
    return np.where(layout.pp > 1, 2 * layout.chunks * seconds * (1 - stack.overlap_pipeline), 0.0)


def _data(
    model: DecoderNumbers, layout: Layout, rates: ChipRates, stack: Stack, backward: Array, compute: Array
) -> tuple[Array, Array]:
    """Seconds of exposed data-parallel traffic, and the numbers that a rank updates."""
    # The fullest rank: a stage with the embedding or the head.
    ends = model.vocab_part(layout.tp) * model.width * np.where(layout.pp > 1, 1.0, 2 - model.tied)
    usual = (model.layers - model.moe_layers) * model.dense_parameters + model.moe_layers * model.mixture_parameters
    trained = np.where(model.frozen > 0, 0.01, 1.0)
    dense = trained * (usual / layout.pp / layout.tp + ends)
    experts = model.moe_layers * model.expert_parameters / layout.pp / layout.ep
    data = layout.dp * layout.cp
    group = RankGroup(layout.shards, layout.tp)
    copies = RankGroup(data / layout.shards, layout.tp * layout.shards)
    gather_bytes, reduce_bytes = E * dense, stack.gradient_bytes * dense
    # Where a shard is spread over fewer ranks than there are, its sum goes over the copies besides.
    across = np.where(data > layout.shards, all_reduce_s(reduce_bytes / layout.shards, copies, rates.links), 0.0)
    layers = np.ceil(model.layers / layout.pp)
    sharded = layout.shards_parameters
    m = layout.microbatches
    pieces = np.where(sharded, layers, np.ceil(gather_bytes / stack.bucket_bytes))
    gather = pieces * gather_s(gather_bytes / pieces, group, rates.links)
    reduce = pieces * gather_s(reduce_bytes / pieces, group, rates.links)
    many = np.ceil(reduce_bytes / stack.bucket_bytes)
    plain = many * all_reduce_s(reduce_bytes / many, RankGroup(data, layout.tp), rates.links)
    expert_copies = RankGroup(np.maximum(data * layout.tp / layout.ep, 1.0), layout.ep)
    for_experts = np.where(
        model.moe_layers > 0, 2 * gather_s(stack.gradient_bytes * experts, expert_copies, rates.links), 0.0
    )
    share = np.where(layout.shards_optimizer, layout.shards, 1.0)
    comes_last = (layout.reductions > 0) & layout.shards_optimizer
    last = np.where(comes_last, across, 0.0)
    total = np.where(layout.shards_optimizer, reduce + gather + across - last, plain) + for_experts
    of_twins = np.where(comes_last, _twins_s(layout, rates, stack, experts, expert_copies), 0.0)
    last, total = last + of_twins, np.maximum(total - of_twins, 0.0)
    total = np.where(data > 1, total, 0.0)
    # Where parameters or sums come again with each microbatch, they run beside it.
    gathers = np.where(layout.gathers > 0, layout.gathers, np.where(sharded, 2 * m, 1.0))
    sums = np.where(layout.reductions > 0, layout.reductions, np.where(sharded, m, 1.0))
    repeats = sharded | (sums > 1)
    each = np.where(data > 1, gathers * gather + sums * reduce, 0.0)
    experts_apart = model.moe_layers > 0
    each += np.where(experts_apart, gathers * gather_s(E * experts, expert_copies, rates.links), 0.0)
    each += np.where(experts_apart, sums * gather_s(stack.gradient_bytes * experts, expert_copies, rates.links), 0.0)
    each = each / m
    exposed_three = m * np.maximum(each - stack.overlap_shards * compute, (1 - stack.overlap_shards) * each) + np.where(
        data > 1, across, 0.0
    )
    hidden = np.minimum(stack.overlap_data * backward, stack.overlap_data * total)
    # The embedding's gradient is the last to be final: no compute is left to hide its sum.
    tail = total * model.vocab_part(layout.tp) * model.width / (dense + experts)
    data_s = np.where(repeats, exposed_three, np.maximum(total - hidden, np.minimum(tail, total)) + last)
    return data_s, (dense / share) + experts / np.where(layout.shards_optimizer, expert_copies.ranks, 1.0)


def _twins_s(layout: Layout, rates: ChipRates, stack: Stack, experts: Array, copies: RankGroup) -> Array:
    """Seconds to sum the gradients of experts over the replicas of their shards."""
    holders = np.maximum(layout.shards * layout.tp / layout.ep, 1.0)
    twins = RankGroup(copies.ranks / holders, layout.ep * holders)
    seconds = all_reduce_s(stack.gradient_bytes * experts / holders, twins, rates.links)
    return np.where((experts > 0) & (twins.ranks > 1), seconds, 0.0)
