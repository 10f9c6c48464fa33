"""Snapshots: a run goes on from memory when ranks are killed, as if they had not been, and saves beside training."""

import json
import multiprocessing
import os
import re

import pytest

import hurting
import runs
from superstep.cli.main import main
from superstep.cli.train import fault_in_rank
from superstep.observe.doctor.failure_file import read_box
from superstep.run import launch_ranks
from superstep.state.checkpoint import read_position
from superstep.state.checkpoint_dirs import checkpoints
from superstep.state.verify import verify

pytestmark = pytest.mark.multiproc

FLAGS = ["run.toml", "--numerics.exact", "true", "--train.steps", "18", "--train.eval-every", "4",
         "--state.save-every", "5", "--state.keep", "9"]  # fmt: skip
LAYOUT = ["--plan.dp", "2", "--plan.zero", "1"]
HURT = [*FLAGS, *LAYOUT, "--state.snapshot-every", "1", "--state.dir", "hurt"]


def _losses(run):
    return [(line["step"], line["loss"], line["grad_norm"]) for line in runs.events(run, "step")]


HURTS = [("killed", "rank 1", 3), ("stopped", "rank 0", 8), ("hung", "rank 1", 13)]
SAID = {
    "killed": "the process was killed by SIGKILL",
    "stopped": r"its process \d+ was stopped \(SIGSTOP",
    "hung": r"its process \d+ hangs: it has held the GIL for",
}


@pytest.mark.long
def test_ranks_that_are_killed_stopped_or_hung_are_recovered_bit_by_bit(tmp_path, monkeypatch, capfd):
    """And checkpoints come from memory meanwhile, as validation runs."""
    runs.make_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch_ranks, "rank", fault_in_rank.rank)
    assert main(["train", *FLAGS, *LAYOUT, "--state.dir", "whole"]) == 0
    before = set(multiprocessing.active_children())
    hurter = hurting.Hurter(tmp_path / "hurt", HURTS)
    hurter.start()
    assert main(["train", *HURT]) == 0
    hurter.join()
    said = capfd.readouterr().out
    assert [what for what, _ in hurter.done] == HURTS, said
    assert "recovered after step" in said
    assert _losses(tmp_path / "hurt") == _losses(tmp_path / "whole")
    lost = hurting.resumed(tmp_path / "hurt")
    host = re.escape(os.uname().nodename)
    for (how, name, step), line in zip(HURTS, lost, strict=True):
        assert re.match(rf"{name}, host {host}, step \d+(, instruction [a-z][^:]*)?: {SAID[how]}", line["lost"]), line
        assert line["step"] >= step - 1, "at most one step is lost"
        assert line["path"] == ""
    assert any("instruction" in line["lost"] for line in lost)
    box = read_box(tmp_path / "hurt" / "fault.json")
    assert box.fault == lost[-1]["lost"].partition(" superstep doctor ")[0], "of the last one it is still known"
    assert "superstep doctor hurt shows what every rank did (hurt/fault.json)" in lost[-1]["lost"]
    hung = next(rank for rank in box.ranks if rank.rank == 1)
    assert {rank.rank for rank in box.ranks} == {0, 1}
    assert all(rank.notes and rank.follows for rank in box.ranks)
    assert f"step {hung.step}" in box.fault
    assert set(multiprocessing.active_children()) <= before
    for name in ("whole", "hurt"):
        places = checkpoints(tmp_path / name / "checkpoints")
        assert [read_position(place).step for place in places] == [5, 10, 15, 18]
    for one, other in zip(*(checkpoints(tmp_path / name / "checkpoints") for name in ("whole", "hurt")), strict=True):
        verify(other)
        manifests = [json.loads((place / "manifest.json").read_text()) for place in (one, other)]
        assert manifests[0]["tensors"] == manifests[1]["tensors"]
        assert manifests[0]["position"] == manifests[1]["position"]
    assert [line["step"] for line in runs.events(tmp_path / "hurt", "saved")] == [5, 10, 15, 18]
