"""The model of a run: our own decoder, or the units of a user's file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from superstep.comm.objects import gather
from superstep.cost.program import lora
from superstep.cost.program.flops import model_flops_per_token
from superstep.cost.program.time.operation import UnitOperations, flops
from superstep.engine.activations.saved_activations import with_kept_here
from superstep.engine.engine import Engine
from superstep.engine.tracing.trace_units import operations_of
from superstep.model.axes import units
from superstep.model.lora import adapt
from superstep.model.meta import on_meta
from superstep.model.multimodal.list_units import list_units
from superstep.model.unit import UnitSpec, global_specs, in_phase, list_phases, mark_frozen, weigh_losses
from superstep.numerics.own_loss import load_loss
from superstep.plan.config import RunConfig
from superstep.plan.mesh import MeshShape
from superstep.plan.model.multimodal.families import has_own_units
from superstep.plan.resolution.resolve import Resolved, resolve
from superstep.state.tensor_piece import SCALE, TensorPiece, Tensors
from superstep.train.weights.fit_budget import fit_budget
from superstep.train.weights.user_model import resolve_user_model


def resolve_config(config: RunConfig, world: int | None = None) -> Resolved:
    """``resolve``, for our decoder, for the model of ``model.source`` and for families that read more than text, within
    ``plan.memory``.

    Raises:
        ConfigError: as ``resolve``; the file cannot be used; its units do not run, whole or cut; or they do not fit.
    """
    run = _resolve_model(config, world)
    if config.plan.memory is None:
        return run
    return fit_budget(run, operations(run) if run.decoder is None else None)


def _resolve_model(config: RunConfig, world: int | None) -> Resolved:
    if config.train.loss is not None:
        load_loss(config.train.loss)  # refused before any rank is launched
    if not has_own_units(config.model):
        run = resolve(config, world)
        return with_kept_here(run)
    return resolve_user_model(config, world)


def units_of(run: Resolved) -> Sequence[UnitSpec]:
    """The units of a run's configuration, with its adapters and what is frozen."""
    specs = list_units(run.config) if run.decoder is None else units(run.decoder)
    if run.config.phases is not None:
        specs = weigh_losses(specs, dict(run.config.phases.loss_weights))
    if run.config.lora is not None:
        return adapt(specs, run.outline, run.config.lora)
    return mark_frozen(specs, run.outline)


def model_alone(run: Resolved) -> Resolved:
    """The same run without adapters."""
    return run if run.config.lora is None else resolve_config(replace(run.config, lora=None))


def shapes_of(run: Resolved) -> dict[str, torch.Size]:
    """The shape of every global tensor of the model, in its order, without those of adapters."""
    shapes: dict[str, torch.Size] = {}
    for unit in units_of(run):
        with on_meta():
            module = unit.build()
        for local, spec in unit.params.items():
            if spec.factor is not None or (spec.packed and spec.packed.is_scales):
                continue
            if spec.packed is not None:
                shapes[spec.packed.matrix] = torch.Size(spec.packed.shape)
                continue
            shapes |= {name: view.shape for name, view in spec.views(module.get_parameter(local))}
    return shapes


def operations(run: Resolved) -> tuple[UnitOperations, ...] | None:
    """The operations of each unit of the run on a rank, for one phase of its step after the other; None for a user's
    own units with data-dependent control flow.
    """
    specs = units_of(run)
    if run.decoder is not None:
        return operations_of(run, specs)
    phases = zip(run.list_phases(), list_phases(specs) or ("",), strict=True)
    try:
        return tuple(
            each for phase, name in phases for each in operations_of(phase, in_phase(specs, name) if name else specs)
        )
    except RuntimeError:  # fake tensors have no values to branch on
        return None


def flops_per_token(run: Resolved, traced: Sequence[UnitOperations] | None) -> float | None:
    """Operations of training on one token, or one target of samples, by ``cost.program.flops.MFU_CONVENTION``; for a
    user's own units and with frozen parameters, those that were traced, None without a trace.
    """
    mesh = run.plan.mesh
    if run.decoder is not None and run.config.lora is not None:
        return lora.flops_per_token(run)
    if run.decoder is not None and run.config.freeze is None:
        return model_flops_per_token(run.decoder, run.config.data.sequence_tokens)
    if traced is not None and mesh.tp * mesh.cp > 1:
        # Work that is not cut runs on every rank, and must count once.
        here = (0,) * len(run.plan.stages)
        whole = replace(run.plan, mesh=MeshShape(), placement=here, sequence_parallel=False, encoder="front")
        traced = operations(replace(run, plan=whole))
    if traced is None:
        return None
    plans = [phase.plan for phase in run.list_phases()]
    is_needed = [unit in plan.needed for plan in plans for unit in range(len(plan.units))]
    has_backward = [is_back for plan in plans for is_back in plan.has_backward]
    forward = (flops(unit.forward) for unit, is_there in zip(traced, is_needed, strict=True) if is_there)
    backward = (flops(unit.backward) for unit, is_back in zip(traced, has_backward, strict=True) if is_back)
    return (sum(forward) + sum(backward)) / (run.plan.microbatch * run.targets_of_row)


def vocab_of(run: Resolved) -> int:
    """The number of ids that the tokenizer may have."""
    decoder = run.decoder or run.outline.decoder
    vocab = run.config.model.vocab if decoder is None else decoder.vocab
    assert vocab is not None, "a model of the user's own is resolved with its vocabulary"
    return vocab


def tensor_shapes(engine: Engine) -> dict[str, tuple[int, ...]]:
    """The shape of every global tensor in a checkpoint's weights, in the order of the model. Every rank calls this
    together.
    """
    return _gather_shapes(engine, engine.pieces(("weight",)))


def tensors_of(engine: Engine) -> Tensors:
    """The shape of every global tensor in a checkpoint, by kind: frozen ones have weights alone. Every rank calls this
    together.
    """
    trained = list(engine.list_trained_pieces())
    by_kind = {kind: [piece for piece in trained if piece.kind == kind] for kind in engine.state_kinds}
    return {kind: _gather_shapes(engine, of) for kind, of in by_kind.items()} | {"weight": tensor_shapes(engine)}


def _gather_shapes(engine: Engine, pieces: Iterable[TensorPiece]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for part in gather({piece.name: piece.shape for piece in pieces}, dict[str, tuple[int, ...]]):
        shapes |= part
    names = (each for name in global_specs(engine.specs) for each in (name, name + SCALE))
    return {name: shapes[name] for name in names if name in shapes}
