"""What a trainer saves: parameters without dims too; and what breaks around a checkpoint on one rank stops all."""

import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from safetensors.torch import load_file

import runs
from superstep.comm.device import Device
from superstep.data.preparation.prepare import prepare
from superstep.engine.engine import Engine
from superstep.errors import Fault
from superstep.launch.ranks import World
from superstep.plan.config import ModelConfig
from superstep.state import checkpoint_dirs
from superstep.state.checkpoint_dirs import checkpoint_at, checkpoints
from superstep.state.manifest import Position
from superstep.train.corpus_trainer import CorpusTrainer
from superstep.train.run_folder.run_paths import RunFolder
from superstep.train.throughput import PeakRate
from superstep.train.weights.model import resolve_config

SOURCE = """
import torch
from torch import nn
from superstep.model.unit import ParamSpec, UnitSpec

class Gain(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, h_BSD):
        return h_BSD * self.gain

def matrix(name):
    return {"weight": ParamSpec(name=name, axes=(None, None), std=0.1)}

def units(config):
    return [
        UnitSpec(name="embed", build=lambda: nn.Embedding(300, 32), params=matrix("e")),
        UnitSpec(name="gain", build=Gain, params={"gain": ParamSpec(name="gain", axes=(), std=None)}),
        UnitSpec(name="head", build=lambda: nn.Linear(32, 300, bias=False), params=matrix("h")),
    ]
"""


def _disk(*args, **rest):
    raise OSError(5, "Input/output error")


def _cuda(self):
    yield from ()
    raise RuntimeError("CUDA error: planted")


# the rank that fails, what does, and what all ranks say
FAILURES = {
    "a rank's pieces": (
        1,
        (Engine, "pieces", _cuda),
        "rank 1: the checkpoint cannot be written, and older ones are untouched: RuntimeError: CUDA err",
    ),
    "a rank's disk": (
        1,
        (os, "pwrite", _disk),
        "rank 1: the checkpoint cannot be written, and older ones are untouched: {root}/checkpoints/step-000012.par",
    ),
    "the trace": (0, (Path, "replace", _disk), "{root}/trace.json cannot be written: Input/output error; check "),
    "old checkpoints": (
        0,
        (checkpoint_dirs, "_delete", _disk),
        "{root}/checkpoints/step-000010 cannot be deleted: Input/out",
    ),
}


def _save(rank, world, run, root, corpus):
    unknown = PeakRate(flops_per_token=None, peak_flops=None)
    trainer = CorpusTrainer(World(rank, world, Device("cpu")), run, RunFolder(root=Path(root)), Path(corpus), unknown)
    trainer.save(Position(step=10, samples=40))
    heard = []
    for number, (failing, (where, name, wrong), _) in enumerate(FAILURES.values()):
        with ExitStack() as stack:
            if rank == failing:
                stack.enter_context(mock.patch.object(where, name, wrong))
            try:
                (said,) = trainer.save(Position(step=11 + number)).problems
            except Fault as fault:
                said = str(fault)
        heard.append(said)
    before = [piece.values.clone() for piece in trainer._engine.pieces()]
    for piece in trainer._engine.pieces():
        piece.values.zero_()
    assert trainer.load(checkpoint_at(Path(root) / "checkpoints", 10)) == Position(step=10, samples=40)
    assert all((a == p.values).all() for a, p in zip(before, trainer._engine.pieces(), strict=True))
    trainer.close()
    return heard


@pytest.mark.multiproc
def test_a_save_with_a_scalar_and_what_breaks_around_it(pool, tmp_path):
    for name, text in (("good.txt", runs.TEXT), ("mine.py", SOURCE)):
        (tmp_path / name).write_text(text, encoding="utf-8")
    model = ModelConfig(source=str(tmp_path / "mine.py"), layers=1, width=32, heads=2, vocab=300)
    config = replace(runs.config(plan={"dp": 2, "zero": 3}), model=model)
    config = replace(config, state=replace(config.state, keep=2))
    prepare(replace(config.data, corpus=(str(tmp_path / "good.txt"),)), 300, tmp_path / "data")
    heard = pool.run(2, _save, resolve_config(config), str(tmp_path), str(tmp_path / "data"), timeout_s=60)
    assert heard[0] == heard[1]
    for said, (_, _, expected) in zip(heard[0], FAILURES.values(), strict=True):
        assert said.startswith(expected.format(root=tmp_path))
    places = checkpoints(tmp_path / "checkpoints")
    assert [place.name for place in places] == ["step-000010", "step-000013", "step-000014"]
    assert load_file(places[0] / "model.safetensors")["gain"].shape == ()
    assert load_file(places[0] / "optimizer.safetensors")["exp_avg.gain"].shape == ()
