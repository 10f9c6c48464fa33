"""compile: a plan becomes a program, one pass after the other, each checked."""

from __future__ import annotations

from superstep.plan.resolve import Plan
from superstep.program.check import check
from superstep.program.instructions import Program
from superstep.program.passes import add_fetch, add_recompute, add_reductions, add_step, add_transfers, lower
from superstep.program.schedule import forward_order, order


def compile_step(plan: Plan) -> Program:
    """The training step of a plan."""
    tasks = order(
        plan.schedule,
        pp=plan.mesh.pp,
        chunks=plan.chunks,
        microbatches=plan.microbatches,
        group=plan.microbatch_group,
    )
    program = check(lower(plan, tasks, is_training=True))
    program = check(add_recompute(program))
    program = check(add_transfers(program))
    program = check(add_reductions(program, dp=max(map(plan.mesh.sharers, plan.families)), tp=plan.mesh.tp))
    program = check(add_fetch(program, dp=max(map(plan.mesh.shards, plan.families)), prefetch=plan.prefetch))
    return check(add_step(program))


def compile_evaluation(plan: Plan) -> Program:
    """Forward passes over one global batch, for its loss alone."""
    tasks = forward_order(pp=plan.mesh.pp, chunks=plan.chunks, microbatches=plan.microbatches)
    program = check(lower(plan, tasks, is_training=False))
    program = check(add_transfers(program))
    return check(add_fetch(program, dp=max(map(plan.mesh.shards, plan.families)), prefetch=plan.prefetch))
