"""An adapter learns the answers of conversations: a recipe with [lora]."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

import runs
from superstep.cli.main import main
from superstep.model.files.peft_adapter import FILE
from superstep.train.weights.base_file import read_base


@pytest.mark.long
def test_a_recipe_tunes_an_adapter(tmp_path, monkeypatch, capsys):
    runs.make_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["train", "run.toml"]) == 0
    before = runs.files(tmp_path / "run/checkpoints/step-000006")
    lines = [{"prompt": f"fox number {n % 7} ", "completion": "jumps"} for n in range(40)]
    Path("toy.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    flags = {
        "--start": "run",
        "--data.corpus": "toy.jsonl",
        "--data.sequence-tokens": "64",
        "--train.steps": "4",
        "--train.batch-sequences": "2",
        "--train.warmup-steps": "1",
        "--train.eval-every": "2",
        "--train.lr": "1e-2",
        "--state.save-every": "2",
        "--lora.rank": "2",
        "--observe.peak-flops": "1e12",
    }
    argv = ["tune", "sft", *(word for pair in flags.items() for word in pair)]
    assert main(argv) == 0, capsys.readouterr().err
    last = tmp_path / "runs/tuned/checkpoints/step-000004"
    assert any(values.any() for name, values in load_file(last / FILE).items() if "lora_B" in name)
    assert read_base(last).folder == tmp_path / "run/checkpoints/step-000006"
    assert runs.files(tmp_path / "run/checkpoints/step-000006") == before
    saved = (last / FILE).read_bytes()
    (last / FILE).unlink()
    for file in list(last.iterdir()):
        file.unlink()
    last.rmdir()
    assert main([*argv, "--state.existing", "resume"]) == 0, capsys.readouterr().err
    assert (last / FILE).read_bytes() == saved, "it goes on to the same bits"
    assert main(["tune", "merge", "runs/tuned", "--out", "merged"]) == 0, capsys.readouterr().err
    assert (tmp_path / "merged/model.safetensors").exists()
