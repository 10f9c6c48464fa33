"""Snapshots: a run goes on from memory when ranks are killed, as if they had not been, and saves beside training."""

import json
import multiprocessing
import os
import signal
import threading
import time

import pytest

import runs
from superstep.cli.main import main
from superstep.state.checkpoint import read_position
from superstep.state.folders import checkpoints
from superstep.state.verify import verify

pytestmark = [pytest.mark.usefixtures("small_measure"), pytest.mark.multiproc]

FLAGS = ["run.toml", "--numerics.exact", "true", "--train.steps", "16", "--train.eval-every", "30",
         "--state.save-every", "5", "--state.keep", "9"]  # fmt: skip
LAYOUT = ["--plan.dp", "2", "--plan.zero", "1"]
HURT = [*FLAGS, *LAYOUT, "--state.snapshot-every", "1", "--state.dir", "hurt"]


class Killer(threading.Thread):
    """Kills a rank by SIGKILL once the run's metrics say that so many steps are done."""

    def __init__(self, run, kills):
        super().__init__(daemon=True)
        self._metrics, self._kills = run / "metrics.jsonl", list(kills)
        self.done = []

    def run(self):
        deadline_s = time.monotonic() + 120
        while self._kills and time.monotonic() < deadline_s:
            time.sleep(0.005)
            name, step = self._kills[0]
            ranks = {process.name: process.pid for process in multiprocessing.active_children()}
            if name in ranks and self._steps() >= step:
                os.kill(ranks[name], signal.SIGKILL)
                self.done.append(self._kills.pop(0))

    def _steps(self):
        try:
            lines = self._metrics.read_text().splitlines()
        except OSError:
            return 0
        return sum('"event": "step"' in line for line in lines)


def _losses(run):
    return [(line["step"], line["loss"], line["grad_norm"]) for line in runs.events(run, "step")]


def test_killed_ranks_are_recovered_bit_by_bit_and_checkpoints_come_from_memory(tmp_path, monkeypatch, capfd):
    runs.make_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["train", *FLAGS, *LAYOUT, "--state.dir", "whole"]) == 0
    before = set(multiprocessing.active_children())
    killer = Killer(tmp_path / "hurt", [("rank 1", 4), ("rank 0", 9)])
    killer.start()
    assert main(["train", *HURT]) == 0
    killer.join()
    said = capfd.readouterr().out
    assert killer.done == [("rank 1", 4), ("rank 0", 9)], said
    assert "lost rank 1: the process was killed by SIGKILL" in said
    assert "recovered after step" in said
    assert _losses(tmp_path / "hurt") == _losses(tmp_path / "whole")
    lost = [line for line in runs.events(tmp_path / "hurt", "resumed") if line["lost"]]
    assert [line["path"] for line in lost] == ["", ""]
    assert lost[0]["step"] >= 3, "at most one step is lost"
    assert set(multiprocessing.active_children()) <= before
    for name in ("whole", "hurt"):
        places = checkpoints(tmp_path / name / "checkpoints")
        assert [read_position(place).step for place in places] == [5, 10, 15, 16]
    for one, other in zip(*(checkpoints(tmp_path / name / "checkpoints") for name in ("whole", "hurt")), strict=True):
        verify(other)
        manifests = [json.loads((place / "manifest.json").read_text()) for place in (one, other)]
        assert manifests[0]["tensors"] == manifests[1]["tensors"]
        assert manifests[0]["position"] == manifests[1]["position"]
    assert [line["step"] for line in runs.events(tmp_path / "hurt", "saved")] == [5, 10, 15, 16]
