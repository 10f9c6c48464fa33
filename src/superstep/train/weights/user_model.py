"""resolve_user_model: resolve a run with the user's own model, or of a family that reads more than text. Its units run
once on tensors without memory, and must fit the run's data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from superstep.data.samples.placeholders import require_placeholders
from superstep.data.sources.conversations import read_input
from superstep.data.sources.media_input import row_fields
from superstep.data.sources.source import open_any_samples
from superstep.engine.tracing.trace_user_model import rehearse
from superstep.engine.values.value_shapes import example_rows
from superstep.errors import ConfigError
from superstep.model.custom.inspect import UnitOutput, build, count_multiplications, outline_of, pass_through
from superstep.model.custom.sample_groups import require_whole_groups
from superstep.model.decoder import flash
from superstep.model.multimodal.list_units import list_units
from superstep.model.multimodal.place_rows import EmbeddingWithRows
from superstep.model.unit import GIVEN, Fields, UnitSpec, list_sources
from superstep.plan.config import RunConfig
from superstep.plan.model.attention_rule import PLAIN, AttentionRule
from superstep.plan.resolution.resolve import Resolved, resolve
from superstep.plan.sample_fields import TARGET, SampleFields, is_prepared_folder


def resolve_user_model(config: RunConfig, world: int | None) -> Resolved:
    """``resolve`` for the units of ``model.source``, or of a family that reads more than text.

    Raises:
        ConfigError: as ``resolve``; a file cannot be used; or its units do not run, whole or cut.
        DataError: ``data.source`` gives no samples.
    """
    source = config.model.source or config.model.name
    specs = list_units(config)
    if config.train.loss is not None and specs[-1].loss is not None:
        raise ConfigError(
            f"train.loss = '{config.train.loss}', and {source} gives the last unit '{specs[-1].name}' a loss of its "
            "own; leave one of them out."
        )
    outline = outline_of(specs, source)
    samples = _find_fields(config)
    if outline.decoder is not None and samples is not None:
        outline = replace(outline, tokens=samples.targets)
    run = resolve(config, world, outline)
    _check_compiled(run, specs)
    _check_exact_cut(run, specs)
    run = replace(run, samples=samples)
    require_whole_groups(specs, run, source)
    rows = example_rows(run)
    between = pass_through(specs, rows, torch.float32, source)
    if run.samples is None:
        _check_logits(config, between[-1].shape)
    else:
        _check_targets(source, specs[-1], run.samples, between[-1].shape)
        _check_ragged(source, specs, rows, run.samples)
        _check_encoders(source, specs, between, run.samples)
    if config.data.is_masked:
        _check_documents(config, specs)
    if run.plan.encoder == "bubbles":
        run = replace(run, plan=replace(run.plan, work=count_multiplications(specs, rows, source)))
    if run.plan.mesh.tp > 1:
        rehearse(run, specs, rows, between, source)
    return run


def _find_fields(config: RunConfig) -> SampleFields | None:
    """The fields of the samples of ``data.source``. Conversations that are still to be prepared have those of their
    settings.
    """
    source = config.data.source
    if source is None:
        return None
    if not (is_prepared_folder(source) and config.data.corpus):
        return open_any_samples(source).fields
    tokens = config.data.sequence_tokens
    return row_fields(read_input(config.model), tokens, config.data.media_tokens or tokens)


def _check_compiled(run: Resolved, specs: Sequence[UnitSpec]) -> None:
    """Check that no compiled unit draws noise by an argument: the step's number would be compiled in."""
    for spec, is_compiled in zip(specs, run.plan.recomputed, strict=True):
        if run.config.numerics.compile and is_compiled and "noise" in spec.takes:
            raise ConfigError(
                f"numerics.compile = true: {run.config.model.source}: unit '{spec.name}' takes 'noise', which is not "
                "the same in two steps; set numerics.compile to false, or let a torch.nn.Dropout module draw."
            )


def _check_exact_cut(run: Resolved, specs: Sequence[UnitSpec]) -> None:
    """Check that exact mode over tp has one order for the sums of each parameter of a user's units."""
    plan = run.plan
    if plan.grain is None or plan.mesh.tp == 1:
        return
    for spec in specs:
        for param in spec.params.values():
            if "head_dim" in param.axes:
                what = "has a gradient that sums over heads, which tp cuts"
            elif param.sections and plan.rules.cut(param.axes[0]) == "tp":
                what = f"has {len(param.sections)} parts, each of which tp cuts"
            else:
                continue
            raise ConfigError(
                f"plan.tp = {plan.mesh.tp} with numerics.exact = true and {run.config.model.label}: '{param.name}' "
                f"{what}, and exact mode has one order of such sums in built-in decoders alone; set plan.tp to 1, or "
                "numerics.exact to false."
            )


def _check_logits(config: RunConfig, shape: torch.Size) -> None:
    source, tokens = config.model.source, config.data.sequence_tokens
    if len(shape) != 3 or shape[:2] != (1, tokens):
        raise ConfigError(
            f"{source}: the last unit gives {list(shape)} for one sequence of {tokens} tokens; it must return logits, "
            f"[1, {tokens}, model.vocab]."
        )
    if config.model.vocab != shape[2]:
        raise ConfigError(
            f"{source}: the last unit gives {shape[2]} logits, and model.vocab = {config.model.vocab}, which the "
            f"tokenizer is made for; set model.vocab to {shape[2]}."
        )


def _check_targets(source: str, last: UnitSpec, samples: SampleFields, shape: torch.Size) -> None:
    """Check that the last unit's output fits the samples' targets."""
    if last.loss is not None or last.losses:
        return
    target = samples.target
    if target.dtype != "int64":
        raise ConfigError(
            f"{source}: the samples' target is {target}, and the cross entropy needs class numbers, int64; convert it, "
            f"or give the last unit '{last.name}' a loss of its own."
        )
    if shape[:-1] != (1, *target.dims):
        raise ConfigError(
            f"{source}: the last unit '{last.name}' gives {list(shape)} for one sample, and its target is {target}; it "
            f"must return logits, {[1, *target.dims, 'classes']}, or have a loss of its own."
        )


def _check_ragged(source: str, specs: Sequence[UnitSpec], rows: Fields, samples: SampleFields) -> None:
    """Check that units which take attention or positions run on places of the target: its samples are kept apart."""
    if not samples.capacities or not any({"attend", "positions"} & {*spec.takes} for spec in specs):
        return
    places = samples.capacities[TARGET]

    def attend(q_BSNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, rule: AttentionRule = PLAIN) -> Tensor:
        if q_BSNH.shape[1] != places:
            raise ValueError(f"{q_BSNH.shape[1]} queries; use attend_within for places of another field")
        return flash(q_BSNH, k_BSKH, v_BSKH, rule)

    given = {**GIVEN, "attend": attend, "positions": torch.empty(1, places, dtype=torch.long, device="meta")}
    where = f"{source}, with attention and positions within the samples of the target's {places} places"
    pass_through(specs, rows, torch.float32, where, given)


def _check_encoders(
    source: str, specs: Sequence[UnitSpec], between: Sequence[UnitOutput], samples: SampleFields
) -> None:
    """Check that the model reads its encoders at the tokens that the samples have for them, a row for each."""
    for spec, sources in zip(specs, list_sources(specs), strict=True):
        module = build(spec, source)
        if isinstance(module, EmbeddingWithRows):
            rows = [between[of].shape[1] for of in sources if isinstance(of, int)]
            read = dict(zip(module.tokens, rows, strict=True))
            require_placeholders(read, samples, f"{source}: unit '{spec.name}'")


def _check_documents(config: RunConfig, specs: Sequence[UnitSpec]) -> None:
    """Check that the units accept documents: attention and positions as arguments."""
    source, tokens = config.model.source, config.data.sequence_tokens
    needs = {"attend": "attention as an argument", "positions": "positions, which begin at 0 in each document"}
    for name, what in needs.items():
        if not any(name in spec.takes for spec in specs):
            raise ConfigError(
                f"{source}: data.document_mask = true needs units that take {what}, and none takes '{name}'; "
                f"let those that use it take '{name}', or set data.document_mask = false."
            )
    rows = torch.empty(2, tokens, dtype=torch.long, device="meta")
    given = {**GIVEN, "positions": torch.empty_like(rows)}
    pass_through(
        specs, rows, torch.float32, f"{source}, data.document_mask = true, positions {list(rows.shape)}", given
    )
