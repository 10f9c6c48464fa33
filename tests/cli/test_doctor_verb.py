"""superstep doctor and superstep trace, of a run that trains in this process and then fails."""

from __future__ import annotations

import errno
import json
import os
import threading
import time

import pytest

import runs
from superstep.cli.main import main
from superstep.errors import Fault, disk_fault
from superstep.observe.append_file import AppendFile
from superstep.train.run_folder.run_lock import hold, note_preparing, owner
from superstep.train.run_folder.run_paths import RunFolder
from superstep.train.throughput import ThroughputMeter

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux"),
]

STEPS = 12


@pytest.fixture
def place(tmp_path, monkeypatch):
    runs.make_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


def test_a_run_is_told_of_while_it_trains_and_after_it_has_failed(place, monkeypatch, capsys):
    is_enough = threading.Event()
    statuses = []

    def took(self, step_s):
        self._steps_s.append(step_s)
        if is_enough.is_set():
            raise Fault("that was enough.", rank=0)

    monkeypatch.setattr(ThroughputMeter, "took", took)
    flags = ["run.toml", "--train.steps", "100000", "--train.eval-every", "50000", "--state.save-every", "50000"]
    training = threading.Thread(target=lambda: statuses.append(main(["train", *flags])))
    training.start()
    try:
        metrics, until_s = place / "run" / "metrics.jsonl", time.monotonic() + 120
        while not (metrics.exists() and len(runs.events(place / "run", "step")) >= STEPS):
            assert time.monotonic() < until_s
            assert training.is_alive(), capsys.readouterr()
            time.sleep(0.05)
        capsys.readouterr()
        assert main(["doctor", "run"]) == 0
        said = capsys.readouterr().out
        assert "no problem was detected" in said
        assert "where the time of the last" in said
        assert main(["doctor", "run", "--json"]) == 0
        told = json.loads(_json(capsys.readouterr().out))
        assert told["is_healthy"]
        (rank,) = told["ranks"]
        assert rank["process"] == os.getpid()
        assert rank["has_moved"]
        assert any("executor.py" in call or "loop.py" in call for calls in rank["stacks"] for call in calls)
        assert main(["trace", "run"]) == 0
        live = json.loads((place / "run" / "trace.json").read_text())["step"]
        assert live >= STEPS
    finally:
        is_enough.set()
        training.join(60)
    assert statuses == [1]
    failed = capsys.readouterr()
    assert "superstep doctor run shows what every rank did (run/fault.json)" in failed.err
    assert main(["doctor", "run", "--page"]) == 1
    assert "that was enough." in (place / "run" / "doctor.html").read_text()
    assert "1. rank 0: that was enough." in capsys.readouterr().out
    assert main(["trace", "run", "--steps", "3", "--out", "three.json"]) == 0
    assert json.loads((place / "run" / "trace.json").read_text())["step"] >= live
    slices = [e for e in json.loads((place / "three.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert len({e["args"]["run"] for e in slices}) == 3


def test_a_full_disk_is_told_from_what_a_run_does_wrong(place, monkeypatch, capsys):
    append = AppendFile.append

    def full(self, piece, *, step=-1):
        if step == 4:
            raise disk_fault(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), self.path, step=step)
        append(self, piece, step=step)

    monkeypatch.setattr(AppendFile, "append", full)
    assert main(["train", "run.toml"]) == 1
    capsys.readouterr()
    assert main(["doctor", "run", "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)["findings"]
    assert (found["kind"], found["step"]) == ("disk", 4)
    # It is told where there is no room for its page too.
    (place / "run" / "doctor.html").mkdir()
    assert main(["doctor", "run", "--page"]) == 1
    assert "No space left on device" in capsys.readouterr().out
    assert "No space left on device" in found["what"]
    monkeypatch.setattr(AppendFile, "append", append)
    # What is gone on with and ends as it should is healthy again.
    assert main(["train", "run.toml", "--state.existing", "resume"]) == 0
    assert not (place / "run" / "fault.json").exists()
    assert main(["doctor", "run"]) == 0
    assert "ended normally" in capsys.readouterr().out
    assert main(["doctor", "run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["is_healthy"]


def test_mistakes_are_a_line_that_says_what_would_work(place, capsys):
    for line, said in (
        ("doctor", "no run is given; name its folder: superstep doctor runs/demo"),
        ("doctor none", "'none' is not a run directory"),
        ("trace", "no run is given; name its folder: superstep trace runs/demo"),
        ("trace none", "'none' is not a run directory"),
        ("trace none --steps 0", "--steps = 0 must be at least 1"),
        ("trace none --steps few", "--steps = 'few' is not valid; it must be a whole number."),
        ("trace none other", "'other' belongs to no flag"),
        ("doctor --json none", "What is named without a flag comes before all flags."),
    ):
        assert main(line.split()) == 2
        assert said in capsys.readouterr().err
    (place / "old").mkdir()
    (place / "old" / "run.toml").write_text((place / "run.toml").read_text())
    (place / "old" / "program.txt").write_text("program zero=0 microbatches=1 placement=0 passes=\nrank 0\n")
    for verb in ("doctor", "trace"):
        assert main([verb, "old"]) == 2
        assert "does not train now on this host" in capsys.readouterr().err
    (place / "old" / "fault.json").write_text("{}")
    assert main(["doctor", "old"]) == 2
    assert "is not what a run leaves when it fails" in capsys.readouterr().err


def _json(said):
    """What was printed by the verb, between lines of the run that goes on."""
    return said[said.index("{\n") : said.rindex("\n}") + 2]


def test_a_run_that_prepares_its_text_is_told_with_its_progress(tmp_path, capsys):
    folder = RunFolder(root=tmp_path / "run")
    with hold(folder):
        assert main(["doctor", str(folder.root)]) == 0
        assert f"process {os.getpid()} prepares it: its ranks have not begun." in capsys.readouterr().out
        note_preparing(folder, "the text of a.txt; reading: 40% of 1.2 GiB")
        assert main(["doctor", str(folder.root)]) == 0
        told = f"{folder.root}: process {os.getpid()} prepares it: the text of a.txt; reading: 40% of 1.2 GiB.\n"
        assert capsys.readouterr().out == told
        assert main(["doctor", str(folder.root), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["is_healthy"]
    assert main(["doctor", str(folder.root)]) == 2, "nobody does so any more"


def test_a_run_has_its_owner_while_it_notes_how_far_it_is(tmp_path):
    folder, is_over = RunFolder(root=tmp_path / "run"), threading.Event()

    def note():
        while not is_over.is_set():
            note_preparing(folder, "reading: 40%")
            note_preparing(folder, "reading: 41%")

    with hold(folder):
        note_preparing(folder, "reading: 39%")
        noting = threading.Thread(target=note)
        noting.start()
        try:
            found = {owner(folder) for _ in range(2000)}
        finally:
            is_over.set()
            noting.join()
    assert found == {os.getpid()}
