"""What follows a demo follows it once: neither a stopped one nor one that goes on beyond its end is proven again."""

from dataclasses import replace
from pathlib import Path

import pytest

from superstep.cli.train import train
from superstep.plan.config import RunConfig, TrainConfig
from superstep.plan.config_io import write_config
from superstep.run import launch_ranks, prepare_job
from superstep.state.manifest import Position
from superstep.train.run_folder import run_directory
from superstep.train.run_folder.run_paths import RunFolder


@pytest.mark.parametrize(
    ("done", "was_to_do", "is_stopped", "wanted"),
    [
        (None, 0, False, (0, ["proof"])),
        (None, 0, True, (143, [])),
        (30, 60, False, (0, ["proof"])),
        (60, 60, False, (0, [])),
    ],
    ids=["anew", "stopped", "goes on", "goes on beyond its end"],
)
def test_a_demo_is_proven_at_its_end(done, was_to_do, is_stopped, wanted, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    folder = RunFolder(root=tmp_path / "run")
    if done is not None:
        folder.root.mkdir()
        before = RunConfig(train=TrainConfig(steps=was_to_do))
        folder.config.write_text(write_config(replace(before, state=replace(before.state, dir="run"))))
    proofs = []
    monkeypatch.setattr(
        run_directory, "choose", lambda run: (run, folder, None if done is None else Path("checkpoint"))
    )
    monkeypatch.setattr(prepare_job, "newest", lambda checkpoints: Path("checkpoint"))
    monkeypatch.setattr(prepare_job, "read_position", lambda path: Position(step=done))
    monkeypatch.setattr(train, "tokens_of", lambda run, folder, checkpoint: tmp_path)
    monkeypatch.setattr(prepare_job, "_say_passes", lambda run, corpus, console: None)  # there is no text
    monkeypatch.setattr(launch_ranks, "launch_on", lambda device, world, rank, job, console: is_stopped)
    monkeypatch.setattr(train, "after_demo", lambda job: proofs.append("proof") or 0)
    flags = ["--state.dir", "run", "--state.existing", "resume", "--train.steps", "90"]
    assert (train.main(flags), proofs) == wanted
    assert ("no state to resume from" in capsys.readouterr().err) is is_stopped
