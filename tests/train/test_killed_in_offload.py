"""A rank that is killed while its activations are on their way to a disk: the run goes on with the same bits."""

from pathlib import Path

import pytest

import killed_in_offload
import runs
from superstep.cli.main import main
from superstep.run import launch_ranks

pytestmark = pytest.mark.multiproc

FLAGS = ["run.toml", "--model.layers", "6", "--numerics.exact", "true", "--plan.dp", "2", "--plan.microbatch", "1"]


@pytest.mark.long
def test_a_kill_in_an_offload_changes_no_bit(tmp_path, monkeypatch):
    runs.make_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["train", *FLAGS, "--state.dir", "whole"]) == 0
    monkeypatch.setattr(launch_ranks, "rank", killed_in_offload.rank)
    hurt = [*FLAGS, "--plan.activations", "disk", "--state.snapshot-every", "1", "--state.dir", "hurt"]
    assert main(["train", *hurt]) == 0
    assert Path("hurt", killed_in_offload.MARK).exists()
    (lost,) = [line for line in runs.events(Path("hurt"), "resumed") if line["lost"]]
    assert "SIGKILL" in lost["lost"]
    assert lost["step"] >= 1
    losses = [[(line["step"], line["loss"], line["grad_norm"]) for line in runs.events(Path(run), "step")]
              for run in ("whole", "hurt")]  # fmt: skip
    assert losses[0] == losses[1]
    weights = [Path(run, "checkpoints", "step-000006", "model.safetensors").read_bytes() for run in ("whole", "hurt")]
    assert weights[0] == weights[1]
