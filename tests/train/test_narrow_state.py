"""Moments in 8 bits go on to the same bits after a restart, and under no other format unless they are converted."""

from __future__ import annotations

import torch
from safetensors.torch import load_file

import runs
from superstep.cli.main import main
from superstep.state.checkpoint_dirs import checkpoints

TRAIN = [
    "train",
    "run.toml",
    "--plan.dp",
    "1",
    "--model.ffn",
    "256",
    "--train.min-lr-ratio",
    "1",
    "--state.save-every",
    "2",
    "--train.steps",
]
NARROW = ["--train.moments", "8bit"]


def moments(folder):
    return load_file(checkpoints(folder / "checkpoints")[-1] / "optimizer.safetensors")


def test_a_run_goes_on_with_its_own_moments_and_converts_others_if_it_is_to(tmp_path, monkeypatch, capsys):
    runs.make_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    resume = ["--state.dir", "cut", "--state.existing", "resume"]
    assert main([*TRAIN, "4", *NARROW, "--state.dir", "whole"]) == 0
    assert main([*TRAIN, "2", *NARROW, "--state.dir", "cut"]) == 0
    assert main([*TRAIN, "4", *NARROW, *resume]) == 0
    whole, cut = (moments(tmp_path / name) for name in ("whole", "cut"))
    assert {tensor.dtype for tensor in whole.values()} == {torch.uint8, torch.float32}
    assert whole.keys() == cut.keys()
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    capsys.readouterr()
    assert main([*TRAIN, "6", *resume]) == 2
    error = capsys.readouterr().err
    assert "has train.moments = 8bit, and here it is fp32" in error
    assert "--state.convert" in error
    assert main([*TRAIN, "6", *resume, "--state.convert"]) == 0
    assert {tensor.dtype for tensor in moments(tmp_path / "cut").values()} == {torch.float32}
    assert main([*TRAIN, "8", *NARROW, *resume, "--state.convert"]) == 0
    assert moments(tmp_path / "cut").keys() == whole.keys()
