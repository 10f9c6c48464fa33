"""Footprint: bytes of the fullest rank in closed form, of one plan or of many at once.

    parameters   16-bit weights; ZeRO 3: their shard                   (Rajbhandari 2020, sec. 5)
    gradients    as they are accumulated; ZeRO 2 and 3: their shard
    optimizer    fp32 master where weights are narrower, moments; from ZeRO 1 on: their shard
    activations  of a layer (``cost.closed.activations``), times layers, times microbatches in flight; the head's logits
    buffers      gathered units, transfers between stages, buckets of gradients
    workspace    what one layer's backward pass, or the update, makes and drops

Microbatches in flight on rank r of p with m microbatches and v chunks, in layers of the whole rank:

    1f1b         min(p - r, m)                                    (Narayanan 2021, sec. 2.2)
    interleaved  min((v·p + p - 2·r - 1) / v, m): p · (1 + (p - 1)/(p·v)) on the first (Korthikanti 2022, sec. 4.2.3)
    gpipe        m
    zb-h1        as 1f1b; the weights' gradients of r more wait   (Qi 2023, table 1)
    zb-v         as zb-h1; embedding and head are on the first rank both
    zb-2p        min(2·p - 1, m) on every rank

The fullest rank is the first, the last or one beside them: the embedding is on the first, head and loss on the last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np

from superstep.cost.closed.activations import (
    FP32,
    INDEX,
    READ_BY_LAYERS,
    LayerBytes,
    MicrobatchDims,
    dense_layer,
    local,
    mixture_layer,
)
from superstep.cost.closed.framework_arrays import Stack
from superstep.cost.closed.framework_memory import KeptMemory, superstep
from superstep.cost.closed.model_numbers import DecoderNumbers
from superstep.cost.closed.parallel_degrees import SCHEDULES, Layout, once_for_each_run
from superstep.hardware.units import Array

FRAGMENTATION = 0.05
"""The share of transient memory that the caching allocator holds additionally, in unusable pieces. Fitted on peaks
published as reserved: 0.02 to 0.08 fit as well.
"""
CONTEXT_BYTES = 0.5 * 2**30
"""The driver's context, libraries and their workspaces, outside any allocator. Fitted on nvidia-smi's figures."""
COMMUNICATOR_BYTES = 0.75 * 2**30
"""Buffers of the communicators, with more than one rank. Fitted likewise, on other programs: less than
``cost.program.memory.communicators`` counts for any plan of ours.
"""
USABLE = 0.99
"""Share of a chip's memory that a process can have: 79.3 of an A100's 80 GiB, 79.6 of an H100's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes on the fullest rank.

    Attributes:
        parameters: weights that stay from step to step, without the optimizer's.
        gradients: as they are accumulated.
        optimizer: fp32 master weights and moments.
        activations: the most that is kept for backward passes at a time, with logits.
        buffers: gathered weights, whole gradients on their way to a shard, transfers between stages.
        workspace: made and dropped in a layer's backward pass or the update.
    """

    parameters: Array
    gradients: Array
    optimizer: Array
    activations: Array
    buffers: Array
    workspace: Array

    @property
    def lasting(self) -> Array:
        """Bytes that stay from step to step."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def passing(self) -> Array:
        """The most transient bytes within a step."""
        return self.activations + self.buffers + self.workspace

    @property
    def bytes(self) -> Array:
        """All that the software allocates."""
        return self.lasting + self.passing

    @property
    def reserved(self) -> Array:
        """All that its allocator holds: see ``FRAGMENTATION``."""
        return self.lasting + (1 + FRAGMENTATION) * self.passing


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """A stage. ``rank``: its pipeline rank. ``tables``: vocabulary matrices. ``is_last``: whether it has the head."""

    rank: Array
    layers: Array
    tables: Array
    is_last: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class _Core:
    """What all stages have in common.

    Attributes:
        dense, mixture: a layer of each kind; equal where the model has no experts.
        dims: of a microbatch on a rank.
        rows: of a vocabulary matrix on a rank.
    """

    dense: LayerBytes
    mixture: LayerBytes
    dims: MicrobatchDims
    rows: Array


def footprint(model: DecoderNumbers, layout: Layout, stack: Stack, keeping: KeptMemory | None = None) -> Footprint:
    """The fullest rank of each plan. ``keeping``: what the software keeps; by default Superstep's own."""
    keeping = superstep() if keeping is None else keeping
    core = _core(model, layout, stack, keeping)
    stages = [_stage_bytes(model, layout, stack, keeping, core, stage) for stage in _stages(model, layout, keeping)]
    totals = np.stack(np.broadcast_arrays(*[each.bytes for each in stages]))
    fullest = np.argmax(totals, axis=0)

    def pick(name: str) -> Array:
        values = np.stack(
            np.broadcast_arrays(*[np.broadcast_to(getattr(each, name), fullest.shape) for each in stages])
        )
        chosen: Array = np.take_along_axis(values, fullest[None], axis=0)[0]
        return chosen

    return Footprint(**{field.name: pick(field.name) for field in fields(Footprint)})


def _core(model: DecoderNumbers, layout: Layout, stack: Stack, keeping: KeptMemory) -> _Core:
    def layer(of: Callable[[DecoderNumbers, Layout, Stack, KeptMemory], LayerBytes]) -> LayerBytes:
        if model.layers.ndim or stack.attention.ndim or keeping.element_bytes.ndim:
            return of(model, layout, stack, keeping)
        return once_for_each_run(layout, READ_BY_LAYERS, lambda few: of(model, few, stack, keeping))

    dense = layer(dense_layer)
    return _Core(
        dense=dense,
        mixture=layer(mixture_layer) if np.any(model.experts > 0) else dense,
        dims=local(model, layout, keeping),
        rows=model.vocab_part(layout.tp),
    )


def _stages(model: DecoderNumbers, layout: Layout, keeping: KeptMemory) -> tuple[_Stage, ...]:
    p = layout.pp
    first, usual, last = _split(model, layout, keeping)
    is_v = layout.schedule == SCHEDULES.index("zb-v")
    # What waits for its weights' gradients is more than a kept input, and most waits on the later ranks.
    waits = is_v | (layout.schedule == SCHEDULES.index("zb-h1"))
    both = 2 - model.tied
    return (
        # Going down and up again, the V ends on the rank that it began on.
        _Stage(
            rank=np.zeros_like(p),
            layers=np.where(p == 1, last, np.where(is_v, (first + last) / 2, first)),
            tables=np.where((p == 1) | is_v, both, 1.0),
            is_last=np.where((p == 1) | is_v, 1.0, 0.0),
        ),
        _Stage(
            rank=np.where(layout.is_full * waits > 0, np.maximum(p - 2, 0.0), np.minimum(1.0, p - 1)),
            layers=np.where(p <= 2, last, usual),
            tables=np.where(p == 1, both, np.where((p == 2) & ~is_v, 1.0, 0.0)),
            is_last=np.where((p == 1) | ((p == 2) & ~is_v), 1.0, 0.0),
        ),
        _Stage(
            rank=p - 1,
            layers=np.where(is_v, usual, last),
            tables=np.where(p == 1, both, np.where(is_v, 0.0, 1.0)),
            is_last=np.where((p > 1) & is_v, 0.0, 1.0),
        ),
    )


def _split(model: DecoderNumbers, layout: Layout, keeping: KeptMemory) -> tuple[Array, Array, Array]:
    """Layers of the first pipeline rank, of one in the middle, and of the last."""
    p, stages = layout.pp, layout.pp * layout.chunks
    most = np.ceil(model.layers / p)
    # Where layers and two divide, embedding and head stand for a layer each (Qi 2023, sec. 4; Llama 3, sec. 3.3.2).
    ends = most - np.where((p > 1) & (most * p == model.layers + 2), 1.0, 0.0)
    # Stages of even work: the head is worth so many layers.
    head = model.vocab * model.width / np.maximum(_layer_work(model), 1.0)
    beside = np.clip(np.round((model.layers + head) / stages - head), 0.0, np.ceil(model.layers / stages))
    each = layout.chunks * (model.layers - beside) / np.maximum(stages - 1, 1.0)
    final = beside + each * (1 - 1 / layout.chunks)
    weighs = (keeping.weighs_head > 0) & (p > 1)
    # Down and up again, a rank's second stage makes up for its first.
    even = np.where(layout.schedule == SCHEDULES.index("zb-v"), np.round(model.layers / p), 0.0)
    return (
        # The first stages have the fewest layers among equals: they keep the most microbatches.
        np.where(weighs, np.where(even > 0, even, np.floor(each)), ends),
        np.where(weighs, np.where(even > 0, even, np.ceil(each)), most),
        np.where(weighs, final, ends),
    )


def _layer_work(model: DecoderNumbers) -> Array:
    """Multiplications of one layer for a token, of the most frequent kind of layer."""
    inner = np.where(model.experts > 0, model.experts_per_token * model.expert_ffn + model.shared_ffn, model.ffn)
    scores = model.sequence_tokens * model.heads * (2 * model.head_dim + model.turned)
    return model.attention_parameters + model.matrices * model.width * inner + scores


def _stage_bytes(
    model: DecoderNumbers,
    layout: Layout,
    stack: Stack,
    keeping: KeptMemory,
    core: _Core,
    stage: _Stage,
) -> Footprint:
    moe = stage.layers * model.moe_layers / model.layers
    usual = stage.layers - moe
    mixture = _mixture_parameters(model, layout, keeping)
    cut = usual * model.dense_parameters / layout.tp + stage.tables * core.rows * model.width
    dense, experts = cut + moe * mixture, moe * model.expert_parameters / layout.ep
    # Experts are cut over ep of all ranks, and sharded over those that hold the same ones.
    expert_shards = np.maximum(layout.shards * layout.tp / layout.ep, 1.0)
    shared = dense / layout.shards + experts / expert_shards
    held = dense + experts

    def at(level: int, each: Array) -> Array:
        spread: Array = each * np.where(layout.zero >= level, shared, held)
        return spread

    def weights(numbers: Array, ranks: Array) -> Array:
        # A lone shard has nobody to share with: it is whole.
        lone = ~layout.shards_parameters | (ranks == 1)
        return np.where(lone, keeping.element_bytes, keeping.weight_shard_bytes / ranks) * numbers

    sharded = np.where(layout.shards_parameters & (layout.shards > 1), 1.0, 0.0)
    on_chip = np.where(layout.offload > 0, 0.0, 1.0)
    update, listed = (on_chip * at(1, each) for each in (keeping.update_bytes, keeping.listed_bytes))
    activations, transient = _activations(model, layout, stack, keeping, core, stage)
    block = np.where(
        moe > 0,
        mixture + model.expert_parameters / layout.ep,
        model.dense_parameters / layout.tp,
    )
    table = np.where(stage.tables > 0, core.rows * model.width, 0.0)
    # Two units' weights, the one at work and the one that comes next, and the whole gradients of as many, or of both
    # tables; with several stages on a rank, those of one.
    gathered = sharded * keeping.element_bytes * (block + np.maximum(block, table))
    grown = block * np.where(layout.chunks > 1, stage.layers / layout.chunks, 1.0) + table
    grown = np.maximum(grown, stage.tables * table)
    whole = np.where(
        layout.shards_gradients & (layout.shards > 1), stack.gradient_bytes * grown + keeping.bucket_bytes, 0.0
    )
    boundary = core.dims.t * model.width * keeping.element_bytes
    passing = np.where(layout.pp > 1, 2.0 + _count_unanswered(layout, keeping, stage), 0.0) * boundary
    trains = 1 - model.frozen
    # Moments, and master weights where the others are narrower.
    states = FP32 * (keeping.moments + np.where(keeping.element_bytes < FP32, keeping.masters, 0))
    return Footprint(
        parameters=weights(dense, layout.shards) + weights(experts, expert_shards),
        gradients=trains * at(2, stack.kept_gradient_bytes),
        optimizer=trains * at(1, on_chip * states),
        activations=activations,
        buffers=gathered + whole + passing,
        workspace=np.maximum(np.maximum(transient, update), listed - activations),
    )


def _mixture_parameters(model: DecoderNumbers, layout: Layout, keeping: KeptMemory) -> Array:
    """Parameters of a layer with experts, without these, on one tensor-parallel rank."""
    beside = model.width * (model.matrices * model.shared_ffn + model.experts)
    repeated = np.where(keeping.repeats_shared > 0, beside, 0.0)
    return (model.mixture_parameters - repeated) / layout.tp + repeated


def _activations(
    model: DecoderNumbers,
    layout: Layout,
    stack: Stack,
    keeping: KeptMemory,
    core: _Core,
    stage: _Stage,
) -> tuple[Array, Array]:
    """The bytes kept at the peak, and one layer's transient bytes beside them."""
    moe = model.moe_layers / model.layers

    def mean(name: str) -> Array:
        value: Array = (1 - moe) * getattr(core.dense, name) + moe * getattr(core.mixture, name)
        return value

    d = core.dims
    whole, selective, boundary = mean("whole"), mean("selective"), mean("boundary")
    often = layout.recomputed_layers
    kept = (
        whole
        - layout.is_full * often * (whole - boundary)
        - layout.is_selective * often * np.maximum(whole - selective, 0.0)
    )
    flying, waiting, heads = _in_flight(layout, stage)
    embedding = np.where(stage.rank == 0, d.T * INDEX + model.dropout * d.t * d.D, 0.0)
    deferred = mean("deferred")
    # A backward pass in two leaves all layers' share of the second part behind the first.
    is_split = layout.schedule >= SCHEDULES.index("zb-h1")
    behind = np.where(is_split, np.maximum(deferred - kept, 0.0) / layout.chunks, 0.0)
    in_layers = flying * (stage.layers * kept + embedding) + stage.layers * (waiting * deferred + behind)
    head = stage.is_last * _head(model, layout, stack, keeping, core, (waiting, heads))
    again = np.maximum(np.where(moe > 0, core.mixture.whole, core.dense.whole) - kept, 0.0) * np.where(
        (layout.is_full + layout.is_selective) * often > 0, 1.0, 0.0
    )
    transient = np.where(moe > 0, core.mixture.transient, core.dense.transient) + again
    # The loss comes before the first backward pass of a layer: their peaks do not add up.
    return in_layers + head, np.maximum(transient - head, 0.0)


def _head(
    model: DecoderNumbers,
    layout: Layout,
    stack: Stack,
    keeping: KeptMemory,
    core: _Core,
    microbatches: tuple[Array, Array],
) -> Array:
    """The last norm, the gradients of microbatches with delayed weight passes, and the logits at the head."""
    d, e = core.dims, keeping.element_bytes
    waiting, heads = microbatches
    has_chunks = (stack.has_fused_loss > 0) & ((layout.tp == 1) | (keeping.chunks_cut_head > 0))
    gathers = (keeping.gathers_logits > 0) & (layout.tp > 1)
    numbers = np.where(has_chunks, 0.0, d.T * np.where(gathers, model.vocab, core.rows))
    # Gathered logits are there twice in 16 bits, and so are their gradients: whole and in parts.
    copies = keeping.logit_bytes + np.where(gathers, 2 * e, 0.0)
    # A loss in chunks makes its weight's gradient in the forward pass.
    early = np.where(has_chunks & layout.shards_gradients, stack.gradient_bytes * core.rows * model.width, 0.0)
    kept = (d.t + d.G) * d.D * e + FP32 * numbers + early
    return heads * kept + (copies - FP32) * numbers + waiting * (e * numbers + early)


def _count_unanswered(layout: Layout, keeping: KeptMemory, stage: _Stage) -> Array:
    """How many outputs a rank has sent and still keeps, beside the last one: one for each microbatch in flight and each
    of its stages, but the model's last stage sends nothing.
    """
    flying, _, _ = _in_flight(layout, stage)
    return np.where(keeping.keeps_sent > 0, np.maximum(flying * (layout.chunks - stage.is_last) - 1, 0.0), 0.0)


def _in_flight(layout: Layout, stage: _Stage) -> tuple[Array, Array, Array]:
    """Microbatches with kept activations on a stage, those where only the weights' gradients are left, those at the
    head. A schedule that forwards all microbatches first keeps all their logits.
    """
    p, m, v, r = layout.pp, layout.microbatches, layout.chunks, stage.rank
    name = {schedule: layout.schedule == code for code, schedule in enumerate(SCHEDULES)}
    usual = np.minimum(p - r, m)
    are_all = (name["gpipe"] | name["breadth-first"]) & ((p > 1) | (layout.group > 0))
    together = np.where(layout.group > 0, layout.group, m)
    flying = np.where(are_all, together, usual)
    group = np.where(layout.group > 0, layout.group, p)
    looped = np.minimum(((v - 1) * group + 2 * (p - r) - 1) / v, m)
    flying = np.where(name["interleaved"] & (p > 1), looped, flying)
    flying = np.where(name["zb-2p"], np.minimum(2 * p - 1, m), flying)
    waiting = np.where(name["zb-h1"] | name["zb-v"], np.minimum(p, m) - usual, 0.0)
    return flying, waiting, np.where(are_all, together, 1.0)
