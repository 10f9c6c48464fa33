"""compile: makes a program from a plan, one pass after the other, each checked."""

from __future__ import annotations

from functools import partial

from superstep.plan.resolution.resolve import Plan
from superstep.program.check import check
from superstep.program.encoder_gaps import fill_gaps, share_by_work
from superstep.program.encoder_tasks import add_encoder, go_round, shift_stages
from superstep.program.instructions import Program
from superstep.program.offload import add_offload
from superstep.program.p2p_setup import check_first_uses, routes
from superstep.program.passes import (
    add_fetch,
    add_recompute,
    add_reductions,
    add_snapshot,
    add_step,
    add_transfers,
    lower,
)
from superstep.program.schedule import Order, StageTask, forward_order, order


def compile_step(plan: Plan, *, is_each_pass_checked: bool = True) -> Program:
    """The training step of a plan.

    With ``is_each_pass_checked`` False only the last program is checked. Pricing is as safe then, but the error names
    the broken rule less exactly.
    """
    held = check if is_each_pass_checked else _as_it_is
    tasks = order(
        plan.schedule,
        placement=plan.placement[1:] if plan.encoders else plan.placement,
        microbatches=plan.microbatches,
        group=plan.microbatch_group,
    )
    program = held(_lower(plan, tasks, is_training=True))
    program = held(add_recompute(program))
    program = held(add_transfers(program))
    program = held(add_reductions(program, dp=_sharers(plan), tp=plan.mesh.tp, replicas=plan.mesh.replicas))
    program = held(add_fetch(program, dp=_shards(plan), prefetch=plan.prefetch))
    if plan.offloaded:
        program = held(add_offload(program, plan.moves, ahead=plan.reload_ahead))
    if plan.snapshots:
        program = held(add_snapshot(program))
    return check_first_uses(check(add_step(program)), routes(plan.placement, plan.encoders))


def _lower(plan: Plan, tasks: Order, *, is_training: bool) -> Program:
    """The program of the tasks of each rank, without those of an encoder that all of them hold."""
    if not plan.encoders:
        return lower(plan, tasks, is_training=is_training)
    behind = shift_stages(tasks)
    if plan.encoder == "spread":
        encoding = go_round(plan.mesh.pp, plan.microbatches)
        return lower(plan, add_encoder(behind, encoding), encoding, is_training=is_training)
    work = partial(count_work, plan, is_training=is_training)
    encoding = share_by_work(behind, plan.microbatches, work)
    with_encoder = fill_gaps(behind, encoding, work) if is_training else add_encoder(behind, encoding)
    return lower(plan, with_encoder, encoding, is_training=is_training)


def count_work(plan: Plan, task: StageTask, *, is_training: bool) -> float:
    """The multiplications of a task; the backward pass of a unit has twice those of its forward pass."""
    work, units = plan.work or (1,) * len(plan.units), plan.stages[task.stage]
    if task.kind == "forward":
        return sum(work[unit] for unit in units)
    halves = 1 if task.kind in ("input", "weight") else 2
    return halves * sum(work[unit] for unit in units if is_training and plan.has_backward[unit])


def _as_it_is(program: Program) -> Program:
    return program


def compile_evaluation(plan: Plan) -> Program:
    """Forward passes over one global batch, for its loss only: of several phases that of the first."""
    plan = plan.list_phases()[0]
    placement = plan.placement[1:] if plan.encoders else plan.placement
    tasks = forward_order(placement=placement, microbatches=plan.microbatches)
    program = check(_lower(plan, tasks, is_training=False))
    program = check(add_transfers(program))
    program = check(add_fetch(program, dp=_shards(plan), prefetch=plan.prefetch))
    return check_first_uses(program, routes(plan.placement, plan.encoders))


def _sharers(plan: Plan) -> int:
    """The most ranks that hold the same parameters, over all families."""
    return max(plan.mesh.sharers(family) for family in plan.families)


def _shards(plan: Plan) -> int:
    return max(plan.mesh.shards(family) for family in plan.families)
