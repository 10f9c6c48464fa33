"""`superstep checkpoint`: what a run has on disk, whether it is whole, and its weights for other loaders."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file

import runs
from superstep.cli.main import main
from superstep.model.files.hf import open_weights


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of 4 steps with checkpoints of the 2nd and the 4th."""
    folder = tmp_path_factory.mktemp("trained")
    runs.make_files(folder)
    old = os.getcwd()
    os.chdir(folder)
    try:
        assert main(["train", "run.toml", "--train.steps", "4", "--state.save-every", "2"]) == 0
    finally:
        os.chdir(old)
    return folder


@pytest.fixture
def run(trained, tmp_path, monkeypatch):
    """A copy of it to work on."""
    shutil.copytree(trained, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here" / "run"


def _flip(path, at=-5):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_list_glances_and_verify_reads_every_byte(run, capsys):
    assert main(["checkpoint", "list", "run"]) == 0
    assert main(["checkpoint", "verify", "run"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[:2] for line in said] == [
        ["step-000002", "complete at a quick look"], ["step-000004", "complete at a quick look"],
        ["step-000002", "whole"], ["step-000004", "whole"],
    ]  # fmt: skip
    _flip(run / "checkpoints/step-000004/model.safetensors")
    (run / "checkpoints/step-000006.partial").mkdir()
    (run / "checkpoints/step-000005.damaged").mkdir()
    assert main(["checkpoint", "list", "run"]) == 0, "a glance does not read tensors"
    assert "damaged:" not in capsys.readouterr().out
    assert main(["checkpoint", "verify", "run"]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("step-000002  whole  step 2, 256 tokens seen; ")
    assert "step-000004 is damaged: model.norm.weight in model.safetensors has other bits" in said[1]
    assert said[2].startswith("step-000005.damaged  no checkpoint: damaged, skipped")
    assert said[3].startswith("step-000006.partial  no checkpoint: being written, or left by a crash")
    assert main(["checkpoint", "verify", "run/checkpoints/step-000002"]) == 0
    (run / "checkpoints/step-000004/manifest.json").write_text("")
    assert main(["checkpoint", "verify", "run/checkpoints/step-000004"]) == 1


def test_an_export_in_shards_has_the_weights_and_loads_in_transformers(run, capsys):
    transformers = pytest.importorskip("transformers")
    stored = load_file(run / "checkpoints/step-000004/model.safetensors")
    for dtype, kind in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        assert main(["checkpoint", "export", "run", "--out", dtype, "--dtype", dtype, "--shard-gib", "3e-5"]) == 0
        assert capsys.readouterr().out.startswith(f"{dtype}: the weights of run/checkpoints/step-000004 in {dtype}")
        found = open_weights(run.parent / dtype)
        assert set(found) == set(stored)
        assert all(torch.equal(found[name][:], stored[name].to(kind)) for name in stored)
        files = sorted(path.name for path in (run.parent / dtype).iterdir())
        assert "model-00001-of-" in " ".join(files)
        assert not {"corpus.json", "manifest.json", "optimizer.safetensors"} & set(files)
        index = json.loads((run.parent / dtype / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(x.numel() * kind.itemsize for x in stored.values())
        theirs = transformers.AutoModelForCausalLM.from_pretrained(run.parent / dtype, dtype="auto")
        assert theirs.dtype == kind
        assert torch.equal(theirs.model.norm.weight, stored["model.norm.weight"].to(kind))
    assert main(["checkpoint", "export", "run/checkpoints/step-000002", "--out", "whole"]) == 0
    assert (run.parent / "whole/model.safetensors").is_file()
    assert not (run.parent / "whole/model.safetensors.index.json").exists()


def test_an_export_of_other_positions_than_rope_is_refused(run, capsys):
    assert main(["train", "run.toml", "--train.steps", "1", "--model.positions", "t5", "--state.dir", "other"]) == 0
    capsys.readouterr()
    assert main(["checkpoint", "export", "other", "--out", "out"]) == 2
    assert "model.positions = 't5', and Hugging Face's format has no such attention" in capsys.readouterr().err


WRONG = {
    "nothing": ([], "name one of list, verify, export"),
    "a word": (["lst", "run"], "has no action 'lst'; did you mean 'list'?"),
    "no path": (["list"], "exactly one run or checkpoint is needed: superstep checkpoint list runs/demo."),
    "no such path": (["verify", "gone"], "'gone' is not there"),
    "no run": (["list", "run/data"], "'run/data' is neither a run nor a checkpoint"),
    "a flag": (["list", "run", "--out", "x"], "superstep checkpoint list has no flag --out"),
    "no out": (["export", "run"], "name a folder to create"),
    "out is there": (["export", "run", "--out", "run"], "--out = 'run' is there already"),
    "a dtype": (["export", "run", "--out", "x", "--dtype", "fp8"], "dtype"),
    "a shard": (["export", "run", "--out", "x", "--shard-gib", "0"], "--shard-gib = 0.0 must be above 0"),
    "a flipped bit": (
        ["export", "run/checkpoints/step-000002", "--out", "x"],
        "model.norm.weight in model.safetensors has other bits",
    ),
}


def test_what_cannot_be_done_is_one_line_and_leaves_nothing(run, capsys):
    _flip(run / "checkpoints/step-000002/model.safetensors")
    before = runs.files(run.parent)
    for name, (words, message) in WRONG.items():
        assert main(["checkpoint", *words]) == 2, name
        said = capsys.readouterr().err
        assert said.startswith("superstep: "), name
        assert said.count("\n") == 1, name
        assert message in said, name
        assert runs.files(run.parent) == before, name
    assert not (run.parent / "x").exists()
    assert main(["checkpoint", "export", "run", "--out", "/proc/x"]) == 1
    assert "fault: --out = '/proc/x.unfinished' cannot be written" in capsys.readouterr().err
