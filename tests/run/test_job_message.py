"""A job that goes to ranks of torchrun as bytes is the same job there."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from superstep.comm.codec import VERSION
from superstep.plan.config import DataConfig, LoraConfig, ModelConfig, PlanConfig, RunConfig, TrainConfig
from superstep.run.job import TrainJob
from superstep.run.job_message import JOB
from superstep.train.run_folder.run_paths import RunFolder
from superstep.train.weights.model import flops_per_token, operations, resolve_config
from superstep.tune.dpo import Dpo

CONFIG = RunConfig(
    model=ModelConfig(vocab=64, layers=2, width=32, heads=2, head_dim=16),
    data=DataConfig(sequence_tokens=16),
    train=TrainConfig(batch_sequences=8, lr=1 / 3),
    plan=PlanConfig(dp=2),
)


def job(config, **changed):
    run = resolve_config(config, 2)
    done = operations(run)
    return TrainJob(
        run=run,
        folder=RunFolder(root=Path("runs/a b")),
        corpus=Path("/data/ö"),
        checkpoint=Path("runs/a b/checkpoints/step-000005"),
        was_complete=True,
        operations=done,
        flops_per_token=flops_per_token(run, done),
        began_at_s=1789.5000001,
        earlier_s=2.5,
        **changed,
    )


@pytest.mark.parametrize(
    "config",
    [CONFIG, replace(CONFIG, plan=PlanConfig(tp=2)), replace(CONFIG, lora=LoraConfig(rank=4, alpha=8.0))],
    ids=["dp", "tp", "lora"],
)
def test_a_job_arrives_as_it_was_sent(config):
    sent = job(
        config, verb="tune dpo", files={"recipe.toml": "[dpo]\n"}, sequence_loss=Dpo(beta=0.1, label_smoothing=0.2)
    )
    assert JOB.decode(JOB.encode(sent)) == sent
    assert JOB.decode(JOB.encode(None)) is None


@pytest.mark.parametrize("message", [b"", b"\x80\x04N.", bytes([VERSION]) + msgspec.msgpack.encode({"config": "x"})])
def test_other_bytes_are_no_job(message):
    with pytest.raises(msgspec.DecodeError):
        JOB.decode(message)
