"""The recipe of a GAN: both phases are proven, and a run goes on after a kill and after a stop with the same bits."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

import hurting
from digits import write_digits
from superstep.cli.main import main
from superstep.cli.train import fault_in_rank
from superstep.run import launch_ranks
from superstep.state.checkpoint_dirs import checkpoints

pytestmark = pytest.mark.multiproc

RECIPES = Path(__file__).parents[2] / "recipes"
FLAGS = ["recipes/gan.toml", "--train.batch-sequences", "32", "--plan.microbatch", "16", "--numerics.exact", "true",
         "--train.steps", "9", "--train.eval-every", "9", "--state.save-every", "4", "--state.keep", "9"]  # fmt: skip
HURTS = [("killed", "rank 1", 5)]


@pytest.fixture
def here(tmp_path, monkeypatch):
    write_digits(tmp_path / "runs" / "digits")
    (tmp_path / "recipes").symlink_to(RECIPES)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _tensors(run: Path):
    """Every tensor of the run's newest checkpoint."""
    (newest, *_) = sorted(checkpoints(run / "checkpoints"), reverse=True)
    return {n: x for name in ("model", "optimizer") for n, x in load_file(newest / f"{name}.safetensors").items()}


def test_both_nets_and_their_optimizers_go_on_after_a_kill_and_a_stop_with_the_same_bits(here, monkeypatch, capfd):
    assert main(["train", *FLAGS, "--state.dir", "whole"]) == 0
    whole = _tensors(here / "whole")
    assert all(whole[f"exp_avg.{name}"].any() for name in ("0.0.weight", "1.0.weight", "3.0.weight", "4.1.weight"))
    lines = [json.loads(line) for line in Path("whole/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    started = lines[0]
    assert started["predicted_step_s"] > 0
    assert started["predicted_memory_bytes"] > 0
    (first, *_) = (line for line in lines if line["event"] == "measures")
    assert first["names"] == ["loss judge", "loss fool"]
    monkeypatch.setattr(launch_ranks, "rank", fault_in_rank.rank)
    hurter = hurting.Hurter(here / "hurt", HURTS)
    hurter.start()
    assert main(["train", *FLAGS, "--state.snapshot-every", "1", "--state.dir", "hurt"]) == 0
    hurter.join()
    assert [what for what, _ in hurter.done] == HURTS, capfd.readouterr().out
    shutil.copytree("whole", "resumed")
    for later in sorted(checkpoints(here / "resumed" / "checkpoints"))[1:]:
        shutil.rmtree(later)
    assert main(["train", *FLAGS, "--plan.dp", "1", "--state.dir", "resumed", "--state.existing", "resume"]) == 0
    for run in ("hurt", "resumed"):
        tensors = _tensors(here / run)
        assert {name for name, x in whole.items() if not x.equal(tensors[name])} == set(), run


def test_both_phases_are_predicted(here, capfd):
    assert main(["view", FLAGS[0], "--text"]) == 0
    out = capfd.readouterr().out
    assert out.index("phase judge") < out.index("phase fool")
    assert main(["view", FLAGS[0], "--memory"]) == 0


@pytest.mark.parametrize("exact", [[], ["--exact"]], ids=["tolerance", "exact"])
def test_the_recipe_is_proven(here, capfd, exact):
    assert main(["prove", *FLAGS[:5], *exact]) == 0
    assert "PROVEN" in capfd.readouterr().out
