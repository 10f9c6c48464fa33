"""A job of reinforcement learning as bytes, for ranks of torchrun, like that of ``run.job_message``."""

from __future__ import annotations

from pathlib import Path

import msgspec

from superstep.comm.codec import Codec
from superstep.grade.config import GradeConfig
from superstep.launch.torchrun import StoredValue, make_stored_message
from superstep.plan.config_io import parse_config, write_config
from superstep.train.run_folder.run_paths import RunFolder
from superstep.train.weights.model import resolve_config
from superstep.tune.program.text import read_iterations, write_iterations
from superstep.tune.rl.config import RlConfig, RolloutConfig
from superstep.tune.rl.job import RlJob


class RlJobMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of an ``RlJob`` under torchrun: paths, the configuration and the program as text."""

    config: str
    ranks: int
    rl: RlConfig
    rollout: RolloutConfig
    grade: GradeConfig
    root: str
    start: str
    checkpoint: str | None
    program: str
    tasks: dict[int, int]
    kernels: str | None
    files: dict[str, str]


def _message_of(job: RlJob) -> RlJobMessage:
    assert job.snapshots is None, "memories of a launcher of ours do not outlive the ranks of torchrun"
    assert job.recovered is None, "torchrun starts all ranks anew"
    assert job.resumed is None, "torchrun starts all ranks anew"
    return RlJobMessage(
        config=write_config(job.run.config),
        ranks=job.run.plan.mesh.world,
        rl=job.rl,
        rollout=job.rollout,
        grade=job.grade,
        root=str(job.folder.root),
        start=str(job.start),
        checkpoint=_text(job.checkpoint),
        program=write_iterations(job.program),
        tasks=dict(job.tasks),
        kernels=_text(job.kernels),
        files=dict(job.files),
    )


def _job_of(message: RlJobMessage) -> RlJob:
    return RlJob(
        run=resolve_config(parse_config(message.config), message.ranks),
        rl=message.rl,
        rollout=message.rollout,
        grade=message.grade,
        folder=RunFolder(root=Path(message.root)),
        start=Path(message.start),
        checkpoint=_path(message.checkpoint),
        program=read_iterations(message.program),
        tasks=message.tasks,
        kernels=_path(message.kernels),
        files=message.files,
    )


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


RL_JOB: StoredValue[RlJob | None] = make_stored_message(Codec(RlJobMessage | None), _message_of, _job_of)
"""A job, or None for a complete run. ``decode`` raises ConfigError where its configuration cannot be resolved."""
