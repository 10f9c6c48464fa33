"""A tuned run goes on from memory as a trained one does, when a rank is stopped or hangs."""

import pytest

import hurting
import runs
import tuned
from superstep.cli.main import main
from superstep.cli.train import fault_in_rank
from superstep.run import launch_ranks

pytestmark = pytest.mark.multiproc

FLAGS = ["recipe.toml", "--numerics.exact", "true", "--train.steps", "12", "--train.eval-every", "30", "--plan.dp", "2",
         "--state.save-every", "30"]  # fmt: skip
HURTS = [("stopped", "rank 1", 3), ("hung", "rank 0", 7)]


def _losses(run):
    return [(line["step"], line["loss"], line["grad_norm"]) for line in runs.events(run, "step")]


@pytest.mark.long
def test_sft_goes_on_bit_by_bit_without_a_rank_that_is_stopped_or_hangs(tmp_path, monkeypatch):
    tuned.make_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch_ranks, "rank", fault_in_rank.rank)
    assert main(["tune", "sft", *FLAGS, "--state.dir", "whole"]) == 0
    hurter = hurting.Hurter(tmp_path / "hurt", HURTS)
    hurter.start()
    assert main(["tune", "sft", *FLAGS, "--state.snapshot-every", "1", "--state.dir", "hurt"]) == 0
    hurter.join()
    assert [what for what, _ in hurter.done] == HURTS
    lost = [line["lost"] for line in hurting.resumed(tmp_path / "hurt")]
    assert ["was stopped" in lost[0], " hangs: " in lost[1]] == [True, True], lost
    assert _losses(tmp_path / "hurt") == _losses(tmp_path / "whole")
