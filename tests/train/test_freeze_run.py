"""A run with frozen parameters goes on after a kill with the same bits, and its checkpoints are whole."""

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

import hurting
import runs
from superstep.cli.main import main
from superstep.cli.train import fault_in_rank
from superstep.run import launch_ranks
from superstep.state.checkpoint_dirs import checkpoints

pytestmark = pytest.mark.multiproc

FLAGS = ["run.toml", "--numerics.exact", "true", "--train.steps", "9", "--state.save-every", "4", "--state.keep", "9",
         "--plan.microbatch", "1", "--freeze.params", "model.embed*", "model.layers.0.*"]  # fmt: skip
LAYOUT = ["--plan.dp", "2", "--plan.zero", "1"]
HURTS = [("killed", "rank 1", 5)]


def _tensors(run: Path):
    """Every tensor of the run's newest checkpoint."""
    (newest, *_) = sorted(checkpoints(run / "checkpoints"), reverse=True)
    return {n: x for name in ("model", "optimizer") for n, x in load_file(newest / f"{name}.safetensors").items()}


def test_a_killed_rank_is_recovered_bit_by_bit_and_a_stopped_run_resumes(tmp_path, monkeypatch, capfd):
    runs.make_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["train", *FLAGS, *LAYOUT, "--state.dir", "whole"]) == 0
    whole = _tensors(tmp_path / "whole")
    assert "exp_avg.model.layers.1.mlp.up_proj.weight" in whole
    assert not {name for name in whole if name.startswith("exp_avg.model.layers.0.")}
    assert "model.layers.0.mlp.up_proj.weight" in whole
    monkeypatch.setattr(launch_ranks, "rank", fault_in_rank.rank)
    hurter = hurting.Hurter(tmp_path / "hurt", HURTS)
    hurter.start()
    assert main(["train", *FLAGS, *LAYOUT, "--state.snapshot-every", "1", "--state.dir", "hurt"]) == 0
    hurter.join()
    assert [what for what, _ in hurter.done] == HURTS, capfd.readouterr().out
    shutil.copytree("whole", "resumed")
    for later in sorted(checkpoints(tmp_path / "resumed" / "checkpoints"))[1:]:
        shutil.rmtree(later)
    assert main(["train", *FLAGS, "--plan.dp", "1", "--state.dir", "resumed", "--state.existing", "resume"]) == 0
    for run in ("hurt", "resumed"):
        tensors = _tensors(tmp_path / run)
        assert {name for name, x in whole.items() if not x.equal(tensors[name])} == set(), run
