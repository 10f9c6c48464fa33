"""A run that trains an adapter beside a base in few bits: how it goes on, and both ways to merge it."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import runs
from superstep.cli.main import main
from superstep.kernels.packed.pack import pack, unpack_by_torch, whole_place
from superstep.model.files.hf import FILE
from superstep.model.files.peft_adapter import FILE as ADAPTER
from superstep.model.files.peft_adapter import linears_of, read_adapter
from superstep.plan.config import ModelConfig
from superstep.plan.model.sizes.lookup import shape_of

MODEL = Path("run/checkpoints/step-000006")
TUNED = Path("tuned/checkpoints/step-000006")
LORA = f"""
[model]
name = "{MODEL}/config.json"
weights = "run"

[data]
corpus = ["good.txt"]
tokenizer = "{MODEL}/tokenizer.json"
sequence_tokens = 32

[train]
steps = 6
batch_sequences = 4
warmup_steps = 1
eval_every = 6
eval_batches = 1
lr = 0.02

[lora]
rank = 3
targets = ["q_proj", "down_proj"]
base = "nf4"

[plan]
dp = 1

[state]
dir = "tuned"
save_every = 3
"""


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A folder with a run, `run`, and one that trained an adapter of it, `tuned`, beside weights in nf4."""
    folder, before = tmp_path_factory.mktemp("tuned"), Path.cwd()
    runs.make_files(folder)
    wide = runs.TOML.replace("width = 32", "width = 64").replace("head_dim = 16", "head_dim = 32")
    (folder / "run.toml").write_text(wide, encoding="utf-8")
    (folder / "lora.toml").write_text(LORA, encoding="utf-8")
    os.chdir(folder)
    try:
        assert main(["train", "run.toml"]) == 0
        assert main(["train", "lora.toml"]) == 0
    finally:
        os.chdir(before)
    return folder


def test_a_resumed_run_has_the_same_adapter(tuned, tmp_path, monkeypatch):
    shutil.copytree(tuned, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    before = load_file(TUNED / ADAPTER)
    shutil.rmtree(TUNED)
    # The base's folder is named by its absolute path, and is the first run's.
    assert main(["train", "lora.toml", "--state.existing", "resume"]) == 0
    after = load_file(TUNED / ADAPTER)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_adapter_is_merged_onto_what_is_named(tuned, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tuned)
    for onto in ("original", "quantized"):
        assert main(["tune", "merge", "tuned", "--out", str(tmp_path / onto), "--onto", onto]) == 0
        told = capsys.readouterr().out
        assert f"onto {onto} weights: training had them in nf4, which changes them by " in told
    linears = linears_of(shape_of(ModelConfig(name=str(MODEL / "config.json"))))
    base, adapter = load_file(MODEL / FILE), read_adapter(TUNED, linears)
    original, quantized = (load_file(tmp_path / onto / FILE) for onto in ("original", "quantized"))
    for linear, shape in linears.items():
        name = f"{linear}.weight"
        packed = unpack_by_torch(*pack(base[name], "nf4"), whole_place(*shape), "nf4", torch.float32)
        part = adapter.parts.get(linear)
        added = 0 if part is None else adapter.scale(linear) * part.b @ part.a
        torch.testing.assert_close(original[name], base[name] + added)
        torch.testing.assert_close(quantized[name], packed + added)
    others = [name for name in base if name.removesuffix(".weight") not in linears]
    assert all(torch.equal(base[name], quantized[name]) for name in others)


def test_a_base_that_is_not_quantized_is_not_merged_onto_as_if_it_were(tuned, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tuned)
    plain = tmp_path / "plain.toml"
    plain.write_text(LORA.replace('base = "nf4"', "").replace('dir = "tuned"', f'dir = "{tmp_path}/plain"'))
    assert main(["train", str(plain), "--train.steps", "3"]) == 0
    capsys.readouterr()
    assert main(["tune", "merge", str(tmp_path / "plain"), "--out", str(tmp_path / "x"), "--onto", "quantized"]) == 2
    assert "leave --onto out" in capsys.readouterr().err
