"""A layout in words, as far as it differs from one rank's."""

from __future__ import annotations

from collections.abc import Iterator

from superstep.plan.resolve import Resolved


def layout_text(run: Resolved) -> str:
    """Everything that makes a layout another one, on one line."""
    return " ".join(_parts(run))


def _parts(run: Resolved) -> Iterator[str]:
    plan, mesh, config = run.plan, run.plan.mesh, run.config
    degrees = {name: getattr(mesh, name) for name in ("pp", "dp", "cp", "tp", "ep", "replicas")}
    yield from [f"{name}={degree}" for name, degree in degrees.items() if degree > 1] or ["1 rank"]
    if mesh.cp > 1:
        yield plan.context
    if mesh.data > 1:
        yield f"zero={plan.zero}"
    yield plan.schedule
    if plan.chunks > 1:
        yield f"chunks={plan.chunks}"
    if plan.schedule in ("interleaved", "breadth-first"):
        yield f"group={plan.microbatch_group}"
    if config.plan.stages:
        yield f"stages={','.join(map(str, config.plan.stages))}"
    yield f"m={plan.microbatches}x{plan.microbatch}"
    if plan.recompute != "none":
        yield plan.recompute
    if plan.sequence_parallel:
        yield "sp"
    yield from (f"{axis}={rule}" for axis, rule in config.plan.rules)
    yield "tied" if run.outline.is_tied else "untied"
    if not config.data.packed:
        yield "padded"
    if config.numerics.compute != "fp32":
        yield config.numerics.compute
