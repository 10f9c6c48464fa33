"""A run of reinforcement learning small enough for a test: random weights, answers of a few tokens, exact mode."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

import model_folder
from superstep.grade.config import GradeConfig
from superstep.plan.config import (
    DataConfig,
    LoraConfig,
    NumericsConfig,
    PlanConfig,
    RunConfig,
    StateConfig,
    TrainConfig,
)
from superstep.plan.resolve import resolve
from superstep.runtime.device import Device
from superstep.runtime.launch import World
from superstep.state.folders import checkpoints
from superstep.train.run_folder import RunFolder
from superstep.tune.rl.config import RlConfig, RolloutConfig
from superstep.tune.rl.judge import Learnt
from superstep.tune.rl.record import Record
from superstep.tune.rl.reinforce import Job, job_of, reinforce, with_start
from superstep.tune.rl.sampling import Group, Sampler

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
) -> Job:
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


def planted(rank: int, size: int, job: Job, group: int, answer: int, nth: int) -> list[dict]:
    """``run``, and the sampler tells of one token a log-probability whose last bit is another."""
    sample = Sampler.sample

    def wrong(self: Sampler, *args: object, **kwargs: object) -> Iterator[Group]:
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

    Sampler.sample = wrong  # type: ignore[method-assign, assignment]
    try:
        return run(rank, size, job)
    finally:
        Sampler.sample = sample  # type: ignore[method-assign]


def run(rank: int, size: int, job: Job, cut: int | None = None) -> list[dict]:
    """What is told of each step, on one rank of a pool.

    Args:
        rank: of the pool.
        size: its ranks.
        job: to be done.
        cut: end after so many lines of the record, on every rank; told are the steps until then.
    """
    told: list[dict] = []

    def tell(learnt: Learnt) -> None:
        told.append(
            {
                "step": learnt.step,
                "loss": learnt.result.loss,
                "norm": learnt.result.grad_norm,
                "reward": learnt.reward,
                "max_dlogp": learnt.result.measures.get("max_dlogp"),
                "measures": dict(learnt.result.measures),
                "lag": learnt.lag,
                "drawn_tokens": learnt.drawn_tokens,
            }
        )

    kept = Record._keep
    lines = 0

    def keep(self: Record, line: dict) -> None:
        nonlocal lines
        kept(self, line)
        lines += "verdicts" not in line  # rank 0 alone knows when those come
        if lines == cut:
            raise Cut

    Record._keep = keep  # type: ignore[method-assign]
    try:
        reinforce(World(rank, size, Device("cpu")), job, tell)
    except Cut:
        pass
    finally:
        Record._keep = kept  # type: ignore[method-assign]
    return told
