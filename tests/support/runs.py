"""Runs small enough to be trained within a test: a text that repeats itself, and a model that learns it in a second."""

import json
import shutil
from pathlib import Path

from superstep.cli.main import main
from superstep.plan.config import DataConfig, ModelConfig, PlanConfig, RunConfig, StateConfig, TrainConfig
from superstep.plan.config_io import read_config


def text(lines: int) -> str:
    """So many that repeat themselves every seven."""
    return "".join(f"the quick brown fox number {i % 7} jumps over the lazy dog.\n" for i in range(lines))


TEXT = text(1000)

TOML = """
[model]
name = "demo"
layers = 2
width = 32
heads = 2
kv_heads = 2
head_dim = 16
ffn = 64
vocab = 300

[data]
corpus = ["good.txt"]
sequence_tokens = 32

[train]
steps = 6
batch_sequences = 4
warmup_steps = 1
eval_every = 3
eval_batches = 1

[plan]
dp = 1

[state]
dir = "run"
save_every = 3

[observe]
peak_flops = 1e12
"""
"""One rank, which runs in the process of the test. Its paths are relative: a test works in the folder of its files."""


def make_files(folder: Path) -> RunConfig:
    """Write run.toml and good.txt; the run that they describe."""
    (folder / "run.toml").write_text(TOML, encoding="utf-8")
    (folder / "good.txt").write_text(TEXT, encoding="utf-8")
    return read_config(folder / "run.toml")


def files(folder: Path) -> dict[str, bytes]:
    """What lies below a folder: every file's bytes."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def events(folder: Path, kind: str) -> list[dict]:
    """A run's metrics of one kind, in order."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line["event"] == kind]


def config(*, layers: int = 2, plan: dict | None = None, train: dict | None = None) -> RunConfig:
    """The run of ``TOML``, with other fields."""
    model = {"name": "demo", "layers": layers, "width": 32, "heads": 2, "kv_heads": 2, "head_dim": 16, "ffn": 64}
    return RunConfig(
        model=ModelConfig(**model, vocab=300),
        data=DataConfig(corpus=("good.txt",), sequence_tokens=32),
        train=TrainConfig(**{"steps": 6, "batch_sequences": 4, "warmup_steps": 1, "eval_batches": 1} | (train or {})),
        plan=PlanConfig(**(plan or {"dp": 1})),
        state=StateConfig(dir="run", save_every=3),
    )


def resume_killed() -> None:
    """Resume a copy of the run ``whole`` as if it had been killed after step 3: it ends with the same weights."""
    shutil.copytree("whole", "run")
    shutil.rmtree("run/checkpoints/step-000006")
    assert main(["train", "run.toml", "--state.existing", "resume"]) == 0
    last, wanted = (sorted(Path(folder, "checkpoints").iterdir())[-1] for folder in ("run", "whole"))
    assert (last / "model.safetensors").read_bytes() == (wanted / "model.safetensors").read_bytes()
