"""A run of reinforcement learning small enough for a test: random weights, answers of a few tokens, exact mode."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import model_folder
from superstep.comm.device import Device
from superstep.errors import Fault
from superstep.grade.config import GradeConfig
from superstep.grade.environment import load_environment
from superstep.launch.ranks import World
from superstep.launch.rendezvous import LaunchStore
from superstep.launch.stop_request import StopRequest
from superstep.model.files.hf import open_weights
from superstep.plan.config import (
    DataConfig,
    LoraConfig,
    NumericsConfig,
    PlanConfig,
    RunConfig,
    StateConfig,
    TrainConfig,
)
from superstep.plan.resolution.resolve import resolve
from superstep.state.checkpoint_dirs import checkpoints
from superstep.train.run_folder.run_paths import RunFolder
from superstep.tune.program.instructions import Instruction, Role, Swap
from superstep.tune.program.order import issue_order
from superstep.tune.rl import rollout_worker as seat_module
from superstep.tune.rl.colocated import ColocatedRank, reinforce
from superstep.tune.rl.config import RlConfig, RolloutConfig
from superstep.tune.rl.disaggregated.disaggregated import worlds_of
from superstep.tune.rl.disaggregated.sampler_rank import sample_apart
from superstep.tune.rl.disaggregated.trainer_rank import train_apart
from superstep.tune.rl.initial_policy import with_start
from superstep.tune.rl.job import RlJob, job_of, serve_of
from superstep.tune.rl.rollout_log import RolloutLog
from superstep.tune.rl.rollout_worker import RolloutWorker, SamplerSettings, TrainerLeft
from superstep.tune.rl.sampling import RolloutSampler, TaskGroup, words_of
from superstep.tune.rl.step_rewards import RlStepResult

ENVIRONMENT = """
from superstep.grade.task import Message, Observation, Done, Task

def task(index, seed):
    return Task(prompt="to be " + "or " * (index % 3))

def reply(task, turns):
    return Observation((Message("user", "not"),)) if len(turns) < 2 else Done()

def grade(task, rollout):
    said = "".join(turn.content for turn in rollout.turns if turn.role == "assistant")
    return sum(c in "aeiou " for c in said) / (len(said) or 1)
"""
TOKENS = 96

RECIPE = """
start = "{start}"

[data]
sequence_tokens = 96

[rl]
environment = "{start}/{environment}"
group = 4
groups = 2
lag = 1
overlong = "none"

[rollout]
max_tokens = 6
turns = 2
pages = 64

[grade]
sandbox = "none"
workers = 1

[observe]
tensorboard = false
"""
"""The recipe of such a run, as far as it says nothing of its steps, its ranks and its directory."""


def start(folder: Path) -> Path:
    """A model to begin with, and the environment beside it."""
    model_folder.write_folder(folder, layers=2, width=32, heads=4, kv_heads=4, ffn=64)
    (folder / "tasks.py").write_text(ENVIRONMENT)
    return folder


def job(
    root: Path,
    start: Path,
    *,
    steps: int = 3,
    lag: int = 1,
    exact: bool = True,
    rl: dict | None = None,
    rollout: dict | None = None,
    grade: dict | None = None,
    environment: str = "tasks.py",
    tokens: int = TOKENS,
    lora: LoraConfig | None = None,
    **plan: int,
) -> RlJob:
    """What every rank is told; it goes on where the run in ``root`` stands."""
    learn = RlConfig(environment=str(start / environment), group=4, groups=2, lag=lag, overlong="none")
    learn = replace(learn, **(rl or {}))
    config, folder = with_start(
        RunConfig(
            data=DataConfig(sequence_tokens=tokens),
            train=TrainConfig(steps=steps, lr=3e-3, warmup_steps=1, weight_decay=0.0),
            plan=PlanConfig(microbatch=2, **plan),
            numerics=NumericsConfig(exact=exact),
            state=StateConfig(dir=str(root), save_every=1),
            lora=lora,
        ),
        learn,
        str(start),
    )
    root.mkdir(exist_ok=True)  # by who launches it
    found = checkpoints(RunFolder(root=root).checkpoints)
    return job_of(
        resolve(config),
        learn,
        replace(RolloutConfig(max_tokens=6, turns=2, pages=64), **(rollout or {})),
        GradeConfig(**({"sandbox": "none", "workers": 1} | (grade or {}))),
        folder=RunFolder(root=root),
        start=folder,
        checkpoint=found[-1] if found else None,
    )


class Cut(Exception):
    """The run ends here, with what is on disk."""


def planted(rank: int, size: int, job: RlJob, group: int, answer: int, nth: int) -> list[dict]:
    """``run``, and the sampler tells of one token a log-probability whose last bit is another."""
    sample = RolloutSampler.sample

    def wrong(self: RolloutSampler, *args: object, **kwargs: object) -> Iterator[TaskGroup]:
        for found in sample(self, *args, **kwargs):  # type: ignore[arg-type]
            if found.number != group:
                yield found
                continue
            answers = list(found.answers)
            first, *rest = answers[answer].strands
            logprobs = list(first.logprobs)
            logprobs[nth] = float(np.nextafter(np.float32(logprobs[nth]), np.float32(-100.0)))
            strands = (replace(first, logprobs=tuple(logprobs)), *rest)
            answers[answer] = replace(answers[answer], strands=strands)
            yield replace(found, answers=tuple(answers))

    RolloutSampler.sample = wrong  # type: ignore[method-assign, assignment]
    try:
        return run(rank, size, job)
    finally:
        RolloutSampler.sample = sample  # type: ignore[method-assign]


CPU = Device("cpu")


def run(rank: int, size: int, job: RlJob, cut: int | None = None, device: Device = CPU) -> list[dict]:
    """What is told of each step, on one rank of a pool.

    Args:
        rank: of the pool.
        size: its ranks.
        job: to be done.
        cut: end after so many lines of the record, on every rank; told are the steps until then.
        device: of this rank.
    """
    told: list[dict] = []
    with _cut_after(cut):
        reinforce(World(rank, size, device), job, lambda learnt: told.append(_of(learnt)))
    return told


def uneven(rank: int, size: int, job: RlJob, limit_s: float, pause_s: float) -> list[dict]:
    """``run``, and the last replica pauses before each step of its engine.

    Args:
        rank: of the pool.
        size: its ranks.
        job: to be done.
        limit_s: how long a collective may take while there is sampling.
        pause_s: so long.
    """
    world, step, sample = dist.group.WORLD, RolloutSampler._step, ColocatedRank._sample
    assert world is not None
    usual = timedelta(minutes=1)

    def slow(self: RolloutSampler, *args: object) -> object:
        if rank >= size - job.rollout.tp:
            time.sleep(pause_s)
        return step(self, *args)  # type: ignore[arg-type]

    def limited(self: ColocatedRank, *args: object) -> None:
        dist.barrier()
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=limit_s), world)
        try:
            sample(self, *args)  # type: ignore[arg-type]
        finally:
            dist.distributed_c10d._set_pg_timeout(usual, world)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RolloutSampler, "_step", slow)
        patch.setattr(ColocatedRank, "_sample", limited)
        patch.setattr(seat_module, "MESH_TIMEOUT", timedelta(seconds=limit_s))
        patch.setattr(seat_module, "BEAT_S", limit_s / 10)
        return run(rank, size, job)


def run_apart(
    rank: int,
    size: int,
    job: RlJob,
    folder: str,
    cut: int | None = None,
    stop: int | None = None,
    device: Device = CPU,
) -> list[dict]:
    """The same of ranks apart: the first ones train, then come samplers. Each party is a world of its own.

    Args:
        rank: of the pool.
        size: its ranks.
        job: to be done.
        folder: of this launch.
        cut: end after so many lines of the record. For a trainer of one rank.
        stop: asked for once so many steps are done.
        device: of this rank.
    """
    dist.barrier()  # who leaves before the others have connected breaks their connection
    dist.destroy_process_group()
    told: list[dict] = []
    first = 0
    for party, each in enumerate(worlds_of(job, train_apart, sample_apart)):
        if first <= rank < first + each.size:
            store, number = f"file://{folder}/store-{party}", rank - first
            bound = {"device_id": device.of_groups}
            dist.init_process_group(device.backend, init_method=store, rank=number, world_size=each.size, **bound)
            world = World(number, each.size, device, store=LaunchStore.of_folder(Path(folder)))

            def tell(learnt: RlStepResult, asked: StopRequest = world.stop) -> None:
                told.append(_of(learnt))
                if learnt.step == stop:
                    asked.ask()

            if party == 0:
                with _cut_after(cut):
                    assert train_apart(world, *each.args, tell) == (stop is not None)
            else:
                with suppress(*((Fault,) if cut else ())):  # it misses the trainer
                    sample_apart(world, *each.args)
        first += each.size
    assert first == size
    return told


def leaves(rank: int, size: int, job: RlJob) -> tuple[list[int], list[int]]:
    """The groups that a sampler draws whose listener leaves after two steps, and those that it draws then."""
    told = SamplerSettings(
        serve=serve_of(job.run, job.rollout), how=job.rollout, group=job.rl.group, seed=0, start=job.start
    )
    words, environment = words_of(job.start), load_environment(job.rl.environment)
    seat = RolloutWorker(World(rank, size, Device("cpu")), told, words, environment, others=(0, 1))
    looks = 0

    def leave() -> None:
        nonlocal looks
        looks += 1
        if looks == 2:
            raise TrainerLeft

    tasks = [(number, environment.task(number, 0)) for number in range(2)]
    drawn = tuple([group.number for group in seat.sample(job.start, 0, tasks, tell)] for tell in (leave, lambda: None))
    seat.close()
    words.template.close()
    return drawn


def in_turn(job: RlJob) -> RlJob:
    """A job of ranks apart as one for shared ranks, who do its instructions one after the other."""
    lane: list[Instruction] = []
    role: Role = "train"
    for place in issue_order(job.program):
        wanted: Role = "sample" if place[0] == "sampler" else "train"
        if place[0] != "grader":
            lane += [Swap(wanted)] * (role != wanted) + [job.program.lane(place[0])[place[1]]]
            role = wanted
    lanes = (("ranks", tuple(lane)), ("grader", job.program.lane("grader")))
    return replace(job, program=replace(job.program, lanes=lanes))


def _of(learnt: RlStepResult) -> dict:
    return {
        "step": learnt.step,
        "loss": learnt.result.loss,
        "norm": learnt.result.grad_norm,
        "reward": learnt.reward,
        "max_dlogp": learnt.result.measures.get("max_dlogp"),
        "measures": dict(learnt.result.measures),
        "lag": learnt.lag,
        "drawn_tokens": learnt.drawn_tokens,
    }


@contextmanager
def _cut_after(cut: int | None) -> Iterator[None]:
    """The block ends after so many lines of the record."""
    kept = RolloutLog.keep
    lines = 0

    def keep(self: RolloutLog, line: dict) -> None:
        nonlocal lines
        if cut is not None and lines >= cut:  # another thread has met it
            raise Cut
        kept(self, line)
        lines += "verdicts" not in line  # rank 0 alone knows when those come
        if lines == cut:
            raise Cut

    RolloutLog.keep = keep  # type: ignore[method-assign]
    try:
        with suppress(Cut):
            yield
    finally:
        RolloutLog.keep = kept  # type: ignore[method-assign]


def weights(root):
    """The last checkpoint's tensors."""
    folder = checkpoints(RunFolder(root=root).checkpoints)[-1]
    adapter = folder / "adapter_model.safetensors"
    found = open_weights(adapter if adapter.exists() else folder)
    return {name: found[name][:] for name in found}


def require_same(found, root, wanted):
    """Losses, norms, rewards and weights to the bit."""
    told, tensors = wanted
    assert found == told
    now = weights(root)
    assert now.keys() == tensors.keys()
    assert [name for name in tensors if not torch.equal(now[name], tensors[name])] == []
