"""A job as bytes, for ranks of torchrun: parsed as this one type, without executing anything.

The configuration is sent as the text of run.toml and resolved again by the receiver; so are values that follow from it.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from superstep.comm.codec import Codec
from superstep.launch.torchrun import StoredValue, make_stored_message
from superstep.plan.config import RunConfig
from superstep.plan.config_io import parse_config, write_config
from superstep.run.job import TrainJob
from superstep.train.run_folder.run_paths import RunFolder
from superstep.train.weights.model import flops_per_token, operations, resolve_config
from superstep.tune.config import DpoConfig
from superstep.tune.dpo import Dpo, make_dpo


class JobMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of a ``TrainJob`` under torchrun, with paths and configuration as text."""

    config: str
    ranks: int
    root: str
    corpus: str
    checkpoint: str | None
    was_complete: bool
    verb: str
    files: dict[str, str]
    dpo: DpoConfig | None
    began_at_s: float
    earlier_s: float


def _message_of(job: TrainJob) -> JobMessage:
    assert job.snapshots is None, "memories of a launcher of ours do not outlive the ranks of torchrun"
    assert job.recovered is None, "torchrun starts all ranks anew"
    assert job.requested is None, "ranks of torchrun do not change their number"
    loss = job.sequence_loss
    assert loss is None or isinstance(loss, Dpo), loss
    return JobMessage(
        config=write_config(job.run.config),
        ranks=job.run.plan.mesh.world,
        root=str(job.folder.root),
        corpus=str(job.corpus),
        checkpoint=None if job.checkpoint is None else str(job.checkpoint),
        was_complete=job.was_complete,
        verb=job.verb,
        files=dict(job.files),
        dpo=None if loss is None else DpoConfig(beta=loss.beta, label_smoothing=loss.label_smoothing),
        began_at_s=job.began_at_s,
        earlier_s=job.earlier_s,
    )


def _job_of(message: JobMessage) -> TrainJob:
    config: RunConfig = parse_config(message.config)
    run = resolve_config(config, message.ranks)
    done = operations(run)
    return TrainJob(
        run=run,
        folder=RunFolder(root=Path(message.root)),
        corpus=Path(message.corpus),
        checkpoint=None if message.checkpoint is None else Path(message.checkpoint),
        was_complete=message.was_complete,
        operations=done,
        flops_per_token=flops_per_token(run, done),
        verb=message.verb,
        files=message.files,
        sequence_loss=None if message.dpo is None else make_dpo(message.dpo),
        began_at_s=message.began_at_s,
        earlier_s=message.earlier_s,
    )


JOB: StoredValue[TrainJob | None] = make_stored_message(Codec(JobMessage | None), _message_of, _job_of)
"""A job, or None for a complete run. ``decode`` raises ConfigError where its configuration cannot be resolved."""
