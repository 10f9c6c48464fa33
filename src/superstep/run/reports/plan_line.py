"""A layout in words, as far as it differs from one rank's."""

from __future__ import annotations

from collections.abc import Iterator

from superstep.cost.program.budget.choose_kept import count_choices
from superstep.plan.config import LOOPED
from superstep.plan.resolution.resolve import Resolved


def plan_text(run: Resolved) -> str:
    """The plan of a run on one line, in training's first lines."""
    return " ".join([*_ranks(run), *_schedule(run), _microbatches(run), *_count_kept(run), run.config.numerics.compute])


def layout_text(run: Resolved) -> str:
    """All properties of a layout on one line."""
    return " ".join(_parts(run))


def _parts(run: Resolved) -> Iterator[str]:
    plan, config = run.plan, run.config
    yield from _ranks(run)
    yield from _schedule(run) or [plan.schedule]
    if plan.schedule in LOOPED:
        yield f"group={plan.microbatch_group}"
    if config.plan.stages:
        yield f"stages={','.join(map(str, config.plan.stages))}"
    yield _microbatches(run)
    if plan.recompute != "none":
        yield plan.recompute
    if plan.sequence_parallel:
        yield "sp"
    yield from (f"{axis}={rule}" for axis, rule in config.plan.rules)
    yield "tied" if run.is_tied else "untied"
    if not config.data.packed:
        yield "padded"
    if run.has_documents:
        yield "documents apart" if run.samples is None else "samples apart"
    if config.numerics.compute != "fp32":
        yield config.numerics.compute


def _ranks(run: Resolved) -> list[str]:
    plan, mesh = run.plan, run.plan.mesh
    degrees = {name: getattr(mesh, name) for name in ("pp", "dp", "cp", "tp", "ep", "replicas")}
    parts = [f"{name}={degree}" for name, degree in degrees.items() if degree > 1] or ["1 rank"]
    if mesh.cp > 1:
        parts.append(plan.context)
    if mesh.data > 1:
        parts.append(f"zero={plan.zero}")
    return parts


def _schedule(run: Resolved) -> list[str]:
    """The pipeline's schedule; empty without a pipeline."""
    plan = run.plan
    chunks = [f"chunks={plan.chunks}"] if plan.chunks > 1 else []
    encoder = [f"encoder={plan.encoder}"] if plan.encoders else []
    return [plan.schedule, *chunks, *encoder] if plan.mesh.pp > 1 or chunks else []


def _count_kept(run: Resolved) -> list[str]:
    """How many activations of units and microbatches have each choice, where they are chosen."""
    counts = ", ".join(f"{choice} {count}" for choice, count in count_choices(run.plan.kept).items())
    return [f"keeps ({counts})"] if counts else []


def _microbatches(run: Resolved) -> str:
    return f"m={run.plan.microbatches}x{run.plan.microbatch}"
