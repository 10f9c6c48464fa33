"""Assembly of a rank's buffers, modules, attention and loss for the executor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch

from superstep.comm.mesh import Mesh
from superstep.engine.attention.choose_attention import build_sight
from superstep.engine.build_modules import (
    BuiltModule,
    Loss,
    build_loss,
    build_module,
    fill_buffers,
    make_compute,
    on_part,
    selective,
)
from superstep.engine.exact.layer_settings import ExactLayers, grid_of
from superstep.engine.exact.loss import build_exact_loss
from superstep.engine.flat.buffers import UnitBuffers
from superstep.engine.layer_table import LayerContext, RowSinks
from superstep.engine.layers.fused import layer_kernels
from superstep.engine.layers.grad_accumulation import Adder, GradientSink, GradientSums
from superstep.engine.metrics.token_metrics import sees_part
from superstep.engine.parallel.noise import find_held, find_place
from superstep.engine.rank_units import Cache, RankUnits
from superstep.engine.step_context import StepContext
from superstep.engine.values.value_shapes import find_shapes
from superstep.model.mixture.expert_dispatch import ExpertDispatch
from superstep.model.unit import Fields, UnitSpec, list_sources, takes_only_fields
from superstep.numerics.dtypes import DTYPES
from superstep.numerics.fixed_point import RangeExcess
from superstep.plan.resolution.resolve import Resolved
from superstep.plan.sharding.parameters import columns_of, has_cut_output

Buffers = Mapping[int, tuple[UnitBuffers, ...]]


def assemble(
    run: Resolved,
    specs: Sequence[UnitSpec],
    mesh: Mesh,
    buffers: Buffers,
    exchange: ExpertDispatch,
    begin: Callable[[StepContext, int], None],
    example: torch.Tensor | Fields | None,
) -> RankUnits:
    """The units of one rank.

    Args:
        run: the resolved run.
        specs: the model's units.
        mesh: the launched ranks.
        buffers: of every unit with parameters on this rank.
        exchange: of mixtures of experts.
        begin: called with the number of a microbatch before any computation with it.
        example: one row of input, or of each field, if it is no row of tokens.
    """
    plan, compute_dtype = run.plan, DTYPES[run.config.numerics.compute]
    sums, excess = GradientSums(), RangeExcess()
    exact = _exact(run, specs, mesh, buffers, sums, excess)
    here = plan.list_units_of(mesh.at.pp)
    rows = _row_sinks(plan.resting, buffers, exact)
    layers = {unit: _layer_context(run, specs, mesh, unit, sums, exact, rows) for unit in here}
    built = _build_modules(run, specs, mesh, buffers, layers)
    modules = {unit: module for unit, (module, _) in built.items()}
    held = find_held(run, specs, mesh, compute_dtype, example)
    caches: list[Cache] = []
    keep_less = partial(selective, is_exact=exact is not None)
    compute = {
        unit: make_compute(module, specs, unit, exchange, layers[unit].noise, held, mesh.cp)
        for unit, module in modules.items()
    }
    fields, boundaries = find_shapes(run, specs, compute_dtype, example)
    return RankUnits(
        mesh=mesh,
        buffers=buffers,
        trained={
            u: tuple(b for b in every if not b.is_frozen and u not in plan.resting) for u, every in buffers.items()
        },
        sources=list_sources(specs),
        compute=compute,
        chosen={unit: chosen for unit, (_, chosen) in built.items()},
        parameters={unit: tuple(_adders(module, exact, rows)) for unit, module in modules.items()},
        sums=sums,
        selective={u: keep_less(way, caches=caches if u in plan.offloaded else None) for u, way in compute.items()},
        caches=caches,
        loss=_loss(run, mesh, modules.get(len(specs) - 1), specs[-1], exact),
        loss_dtype=torch.float32 if exact is None else torch.float64,
        fields=fields,
        boundaries=boundaries,
        begin=begin,
        excess=excess,
        sight=build_sight(run, mesh, excess),
        place=lambda context, m: find_place(
            run, mesh, context.noise_step, len(context.microbatches), context.microbatches[m].first
        ),
    )


def _build_modules(
    run: Resolved, specs: Sequence[UnitSpec], mesh: Mesh, buffers: Buffers, layers: Mapping[int, LayerContext]
) -> dict[int, BuiltModule]:
    """The modules of this rank's units, and the implementations of their layers."""
    shared = _parameters(buffers, run.plan.resting)
    built = {
        unit: build_module(specs[unit], {local: shared[p.name] for local, p in specs[unit].params.items()}, context)
        for unit, context in layers.items()
    }
    for unit, (module, _) in built.items():
        for b in buffers.get(unit, ()):
            b.place_blocks(module)
        fill_buffers(module, specs[unit], mesh.device.torch, DTYPES[run.config.numerics.compute])
    return built


def _layer_context(
    run: Resolved,
    specs: Sequence[UnitSpec],
    mesh: Mesh,
    unit: int,
    sums: GradientSums,
    exact: ExactLayers | None,
    rows: RowSinks,
) -> LayerContext:
    plan = run.plan
    return LayerContext(
        tp=mesh.tp,
        rules=plan.rules,
        sums=sums,
        sequence_parallel=plan.sequence_parallel,
        is_first=takes_only_fields(list_sources(specs)[unit]),
        # Only blocks are compiled: embedding and head are faster with gradients that are accumulated in place.
        is_compiled=run.config.numerics.compile and plan.recomputed[unit],
        kernels=layer_kernels(run, mesh.device),
        exact=exact,
        rows=rows,
        is_users=run.decoder is None and specs[unit].decoder is None,
    )


def _parameters(buffers: Buffers, resting: Sequence[int]) -> dict[str, torch.nn.Parameter]:
    """Parameters by global name: units that name the same tensor share it. Those of ``resting`` units have none."""
    every = [(b, b.make_resting() if unit in resting else b.params) for unit, each in buffers.items() for b in each]
    return {slot.spec.name: params[slot.local] for b, params in every for slot in b.layout.slots}


def _row_sinks(resting: Sequence[int], buffers: Buffers, exact: ExactLayers | None) -> RowSinks:
    """The targets of the sparse gradients of tables."""
    every = [b for unit, each in buffers.items() if unit not in resting for b in each]
    return {
        param: b.make_row_sink(slot, None if exact is None else exact.sinks[param].grid)
        for b in every
        if b.touched is not None
        for slot in b.layout.slots
        for param in (b.params[slot.local],)
    }


def _adders(
    module: torch.nn.Module, exact: ExactLayers | None, rows: RowSinks
) -> Iterator[tuple[torch.nn.Parameter, Adder]]:
    """For each parameter, the function that adds a gradient to its buffer."""
    for param in module.parameters():
        if param in rows:
            yield param, rows[param].add
        elif exact is not None and param.requires_grad:
            yield param, exact.sinks[param].add
        elif param.grad is not None:
            yield param, param.grad.add_


def _exact(
    run: Resolved,
    specs: Sequence[UnitSpec],
    mesh: Mesh,
    buffers: Buffers,
    sums: GradientSums,
    excess: RangeExcess,
) -> ExactLayers | None:
    plan, grain, shape = run.plan, run.plan.grain, run.plan.mesh
    if grain is None:
        return None

    def sink(unit: int, b: UnitBuffers, local: str) -> GradientSink:
        slot = next(slot for slot in b.layout.slots if slot.local == local)
        return GradientSink(b.sinks[local], grid_of(slot.spec, grain, run.decoder or specs[unit].decoder, excess), sums)

    every = [(unit, b) for unit, each in buffers.items() if unit not in plan.resting for b in each]
    return ExactLayers(
        grain=grain,
        rules=plan.rules,
        chunks=grain.chunks // shape.cp,
        parts=grain.parts // (shape.cp * shape.tp),
        stream_parts=grain.parts // (shape.cp * (shape.tp if plan.sequence_parallel else 1)),
        group=mesh.tp,
        sinks={
            param: sink(unit, b, local) for unit, b in every if not b.is_frozen for local, param in b.params.items()
        },
    )


def _loss(
    run: Resolved,
    mesh: Mesh,
    head: torch.nn.Module | None,
    spec: UnitSpec,
    exact: ExactLayers | None,
) -> Loss:
    plan = run.plan
    if exact is not None and head is not None:
        return build_exact_loss(head, spec, exact, run.decoder or spec.decoder)
    is_straight = not plan.shards_gradients or mesh.sharers["dense"].shards == 1
    tp = mesh.tp if has_cut_output(run.outline, plan.rules) else None
    vocab = columns_of(run.outline, plan.rules)
    loss = build_loss(
        head or torch.nn.Identity(),
        tp,
        is_straight=is_straight,
        vocab=vocab,
        is_fused=layer_kernels(run, mesh.device) != "torch",
        given=spec.loss,
    )
    return on_part(loss, mesh.tp) if mesh.tp is not None and sees_part(run) else loss
