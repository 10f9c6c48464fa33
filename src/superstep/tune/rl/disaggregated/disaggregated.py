"""Ranks apart: some sample and others train, each in processes of their own, on one host or on several.

    trainer     publish v0 ─────────────── train s0 ─ publish v1 ─ train s1 ─ publish v2 ...
                         └▶ sampler    take v0 ─ sample g0 to g3 ─ retire v0 ─ take v1 ─ sample g4, g5 ...
                            grader                 └ g0 ┘ └ g1 ┘               (on the trainer's rank 0)

Each runs its own lane of the program. Results of other lanes arrive over the connections of ``RolloutHub``; the program
says which version samples which group, independent of timing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from superstep.comm.objects import gather
from superstep.launch.ranks import RankWorld, World
from superstep.tune.program.instructions import Iterations
from superstep.tune.program.memory import require_room
from superstep.tune.rl.colocated import samples_from
from superstep.tune.rl.job import (
    RlJob,
    own_ranks,
    serve_of,
)
from superstep.tune.rl.memory_budget import beside_communicators, pages_for, sampler_plan, sizes_of


def samplers_of(job: RlJob) -> int:
    """Number of samplers: each is a world of ``rollout.tp`` ranks."""
    return own_ranks(job.rollout) // job.rollout.tp


def owners_of(program: Iterations, samplers: int) -> dict[int, int]:
    """The sampler of each group: groups that are sampled together are divided in turn."""
    lane = program.lane("sampler")
    owners: dict[int, int] = {}
    at = 0
    while at < len(lane):
        batch = samples_from(lane[at:])
        owners |= {number: nth % samplers for nth, number in enumerate(batch)}
        at += max(1, len(batch))
    return owners


def require_own_room(world: World, job: RlJob, who: Literal["sampler", "trainer"]) -> int | None:
    """Check memory, and choose the pages of the KV cache. On a CPU both are known before the launch.

    Raises:
        ConfigError: something does not fit on this rank's GPU.
    """
    if world.device.kind == "cpu":
        return job.rollout.pages
    serve = serve_of(job.run, job.rollout, job.kernels)
    plan = job.run.plan if who == "trainer" else sampler_plan(job.run, serve).plan
    free_bytes = beside_communicators(world.device.free_bytes(1), plan)
    pages = min(gather(pages_for(job.run, serve, free_bytes), int))
    require_room(job.program, sizes_of(job.run, serve, job.rl, pages=pages, gives_back=True), {who: free_bytes})
    return pages


def worlds_of(
    job: RlJob,
    train: Callable[..., Any],
    sample: Callable[..., Any],
    **given: Any,  # noqa: ANN401
) -> list[RankWorld]:
    """The worlds of a run: the trainer's, and one for each sampler that has ranks of its own.

    Args:
        job: of the run.
        train: runs a trainer's rank, with its world, the job and what is given.
        sample: runs a sampler's rank, with its world, the job and the sampler's number.
        given: named arguments of ``train``.
    """
    name = "trainer" if samplers_of(job) else ""
    trainer = RankWorld(name=name, size=job.run.plan.mesh.world, worker=train, args=(job,), kwargs=given)
    samplers = [
        RankWorld(name=f"sampler {number}", size=job.rollout.tp, worker=sample, args=(job, number))
        for number in range(samplers_of(job))
    ]
    return [trainer, *samplers]
