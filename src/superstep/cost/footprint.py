"""Footprint: bytes of the fullest rank in closed form, of one plan or of many at once.

    parameters   16-bit weights; ZeRO 3: their shard                   (Rajbhandari 2020, sec. 5)
    gradients    as they are accumulated; ZeRO 2 and 3: their shard
    optimizer    fp32 master and two moments; from ZeRO 1 on: their shard
    activations  of a layer (``cost.activations``), times layers, times microbatches in flight; the head's logits
    buffers      gathered units, transfers between stages, what the update makes and drops

Microbatches in flight on rank r of p with m microbatches and v chunks, in layers of the whole rank:

    1f1b         min(p - r, m)                                    (Narayanan 2021, sec. 2.2)
    interleaved  min((v·p + p - 2·r - 1) / v, m): p · (1 + (p - 1)/(p·v)) on the first (Korthikanti 2022, sec. 4.2.3)
    gpipe        m
    zb-h1        as 1f1b; the weights' gradients of r more wait   (Qi 2023, table 1)
    zb-v         p on every rank
    zb-2p        min(2·p - 1, m) on every rank

The fullest rank is the first, the second or the last stage: the embedding is on the first, head and loss on the last.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from superstep.cost.activations import FP32, INDEX, LayerBytes, dense_layer, local, mixture_layer
from superstep.cost.decoder import Array, Decoder, array
from superstep.cost.keeping import Keeping, superstep
from superstep.cost.layout import SCHEDULES, Layout
from superstep.cost.stack import Stack


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes on the fullest rank.

    Attributes:
        parameters: weights that stay from step to step, but for the optimizer's.
        gradients: as they are accumulated.
        optimizer: fp32 master weights and two moments.
        activations: the most that is kept for backward passes at a time, logits among it.
        buffers: gathered weights, transfers, what a layer or the update makes and drops.
    """

    parameters: Array
    gradients: Array
    optimizer: Array
    activations: Array
    buffers: Array

    @property
    def bytes(self) -> Array:
        """All that the software allocates."""
        total: Array = self.parameters + self.gradients + self.optimizer + self.activations + self.buffers
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """A stage by what it holds.

    Attributes:
        rank: its pipeline rank.
        layers: of them.
        tables: vocabulary matrices.
        is_last: whether it has the head.
    """

    rank: Array
    layers: Array
    tables: Array
    is_last: Array


def footprint(
    model: Decoder, layout: Layout, stack: Stack, keeping: Keeping | None = None, *, imbalance: float = 1.0
) -> Footprint:
    """The fullest rank of each plan.

    Args:
        model, layout, stack: one or many.
        keeping: what the software keeps; Superstep's own where none is given.
        imbalance: the rows that the fullest rank's experts take, as a share of even ones.
    """
    keeping = superstep() if keeping is None else keeping
    layers = (
        dense_layer(model, layout, stack, keeping),
        mixture_layer(model, layout, stack, keeping, array(imbalance)),
    )
    found = [_stage_bytes(model, layout, stack, keeping, layers, stage) for stage in _stages(model, layout)]
    totals = np.stack(np.broadcast_arrays(*[each.bytes for each in found]))
    fullest = np.argmax(totals, axis=0)

    def pick(name: str) -> Array:
        values = np.stack(np.broadcast_arrays(*[np.broadcast_to(getattr(each, name), fullest.shape) for each in found]))
        chosen: Array = np.take_along_axis(values, fullest[None], axis=0)[0]
        return chosen

    return Footprint(**{field.name: pick(field.name) for field in fields(Footprint)})


def _stages(model: Decoder, layout: Layout) -> tuple[_Stage, ...]:
    p = layout.pp
    most = np.ceil(model.layers / p)
    # Where layers and two divide, embedding and head stand for a layer each (Qi 2023, sec. 4; Llama 3, sec. 3.3.2).
    ends = most - np.where((p > 1) & (most * p == model.layers + 2), 1.0, 0.0)
    alone = np.where(p == 1, 1.0, 0.0)
    tables = np.where(p == 1, 2 - model.tied, 1.0)
    return (
        _Stage(rank=np.zeros_like(p), layers=ends, tables=tables, is_last=alone),
        _Stage(
            rank=np.minimum(1.0, p - 1),
            layers=np.where(p <= 2, ends, most),
            tables=np.where(p <= 2, tables, 0.0),
            is_last=np.where(p <= 2, 1.0, 0.0),
        ),
        _Stage(rank=p - 1, layers=ends, tables=tables, is_last=np.ones_like(p)),
    )


def _stage_bytes(
    model: Decoder,
    layout: Layout,
    stack: Stack,
    keeping: Keeping,
    layers: tuple[LayerBytes, LayerBytes],
    stage: _Stage,
) -> Footprint:
    moe = stage.layers * model.moe_layers / model.layers
    usual = stage.layers - moe
    dense = usual * model.dense_parameters + moe * model.mixture_parameters + stage.tables * model.vocab * model.width
    dense, experts = dense / layout.tp, moe * model.expert_parameters / layout.ep
    # Experts are cut over ep of all ranks, and sharded over those that hold the same ones.
    expert_shards = np.maximum(layout.shards * layout.tp / layout.ep, 1.0)
    shared = dense / layout.shards + experts / expert_shards
    held = dense + experts

    def at(level: int, each: Array) -> Array:
        spread: Array = each * np.where(layout.zero >= level, shared, held)
        return spread

    sharded = np.where((layout.zero == 3) & (layout.shards > 1), 1.0, 0.0)
    update = keeping.update_bytes * np.where(layout.zero >= 1, shared, held)
    activations, transient = _activations(model, layout, stack, keeping, layers, stage)
    block = np.where(
        moe > 0,
        model.mixture_parameters / layout.tp + model.expert_parameters / layout.ep,
        model.dense_parameters / layout.tp,
    )
    unit = np.maximum(block, np.where(stage.tables > 0, model.vocab * model.width / layout.tp, 0.0))
    # Two units' weights, the one at work and the one that comes next, and a whole gradient.
    gathered = np.where(layout.zero == 3, 2 * keeping.element_bytes * unit, 0.0)
    whole = np.where((layout.zero >= 2) & (layout.shards > 1), stack.gradient_bytes * unit, 0.0)
    boundary = local(model, layout, keeping).t * model.width * keeping.element_bytes
    passing = np.where(layout.pp > 1, 2.0, 0.0) * boundary
    return Footprint(
        parameters=at(3, np.where(sharded > 0, keeping.weight_shard_bytes, keeping.element_bytes)),
        gradients=at(2, stack.kept_gradient_bytes * np.ones_like(held)),
        optimizer=at(1, np.where(layout.offload > 0, 0.0, 3 * FP32)),
        activations=activations,
        buffers=np.maximum(transient + gathered * sharded + whole + passing, update),
    )


def _activations(
    model: Decoder,
    layout: Layout,
    stack: Stack,
    keeping: Keeping,
    layers: tuple[LayerBytes, LayerBytes],
    stage: _Stage,
) -> tuple[Array, Array]:
    """What is kept at the peak, and what one layer makes and drops beside it."""
    moe = model.moe_layers / model.layers

    def mean(name: str) -> Array:
        value: Array = (1 - moe) * getattr(layers[0], name) + moe * getattr(layers[1], name)
        return value

    d = local(model, layout, keeping)
    whole, selective, boundary = mean("whole"), mean("selective"), mean("boundary")
    often = layout.recomputed_layers
    kept = (
        whole
        - layout.is_full * often * (whole - boundary)
        - layout.is_selective * often * np.maximum(whole - selective, 0.0)
    )
    flying, waiting = _in_flight(layout, stage)
    embedding = np.where(stage.rank == 0, d.T * INDEX + model.dropout * d.t * d.D, 0.0)
    in_layers = flying * (stage.layers * kept + embedding) + waiting * stage.layers * mean("deferred")
    has_chunks = (stack.has_fused_loss > 0) & (layout.tp == 1)
    gathers = (keeping.gathers_logits > 0) & (layout.tp > 1)
    # Gathered logits are there twice in 16 bits, and so are their gradients: whole and in parts.
    copies = keeping.logit_bytes + np.where(gathers, 2 * keeping.element_bytes, 0.0)
    logits = np.where(has_chunks, 0.0, copies * d.T * model.vocab / np.where(gathers, 1.0, layout.tp))
    head = stage.is_last * ((d.t + d.G) * d.D * keeping.element_bytes + logits)
    again = np.maximum(np.where(moe > 0, layers[1].whole, layers[0].whole) - kept, 0.0) * np.where(
        (layout.is_full + layout.is_selective) * often > 0, 1.0, 0.0
    )
    transient = np.where(moe > 0, layers[1].transient, layers[0].transient) + again
    # The loss comes before the first backward pass of a layer: their peaks do not add up.
    return in_layers + head, np.maximum(transient - head, 0.0)


def _in_flight(layout: Layout, stage: _Stage) -> tuple[Array, Array]:
    """Microbatches whose activations a stage keeps, and those of which only the weights' gradients wait."""
    p, m, v, r = layout.pp, layout.microbatches, layout.chunks, stage.rank
    usual = np.minimum(p - r, m)
    flying = np.where(layout.schedule == SCHEDULES.index("gpipe"), m, usual)
    flying = np.where(layout.schedule == SCHEDULES.index("breadth-first"), m, flying)
    looped = np.minimum((v * p + p - 2 * r - 1) / v, m)
    flying = np.where((layout.schedule == SCHEDULES.index("interleaved")) & (p > 1), looped, flying)
    flying = np.where(layout.schedule == SCHEDULES.index("zb-v"), np.minimum(p, m), flying)
    flying = np.where(layout.schedule == SCHEDULES.index("zb-2p"), np.minimum(2 * p - 1, m), flying)
    waiting = np.where(layout.schedule == SCHEDULES.index("zb-h1"), np.minimum(p, m) - usual, 0.0)
    return flying, waiting
