"""A run directory that is moved or removed in mid-run: the state is saved, and nothing is made under the old name."""

import shutil
import threading
import time
from pathlib import Path

import pytest

import runs
from superstep.cli.main import main
from superstep.observe.jsonl import last_line, read
from superstep.state.folders import checkpoints, step_of
from superstep.state.verify import Alone
from superstep.train.folder_watch import FolderWatch
from superstep.train.run_folder import RunFolder
from superstep.train.saving import write_trace


def train(*flags):
    return main(["train", "run.toml", "--state.save_every", "100000", "--train.eval_every", "100000", *flags])


def once_it_trains(do):
    """Does something to the run directory once it has done a step."""

    def wait():
        metrics = Path("run/metrics.jsonl")
        while not metrics.is_file() or last_line(metrics).get("event") != "step":
            time.sleep(0.01)
        do()

    found = threading.Thread(target=wait, daemon=True)
    found.start()
    return found


@pytest.fixture
def place(tmp_path, monkeypatch):
    runs.make_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def resumed(name):
    """The steps that a run takes which goes on from the one checkpoint in a folder."""
    (checkpoint,) = checkpoints(Path(name, "checkpoints"))
    step = step_of(checkpoint)
    assert train("--state.dir", name, "--state.existing", "resume", "--train.steps", str(step + 2)) == 0
    return [told["step"] for told in read(Path(name, "metrics.jsonl")) if told["event"] == "step"], step


def test_a_run_whose_folder_is_moved_is_saved_in_its_new_place(place, capfd):
    thread = once_it_trains(lambda: Path("run").rename("moved"))
    assert train("--train.steps", "100000") == 1
    thread.join()
    said = capfd.readouterr().err
    assert f"'{place}/run' was moved to {place}/moved; the state is saved there." in said
    assert f"--state.dir {place}/moved --state.existing resume" in said
    assert not Path("run").exists()
    steps, step = resumed("moved")
    assert steps == list(range(1, step + 3)), "one file tells of every step, once"


def test_a_run_whose_folder_is_removed_is_saved_beside(place, capfd):
    Path("run.rescued").mkdir()  # of another time: left alone
    thread = once_it_trains(lambda: shutil.rmtree("run"))
    assert train("--train.steps", "100000") == 1
    thread.join()
    said = capfd.readouterr().err
    assert f"the state is saved in {place}/run.rescued-2." in said
    assert not Path("run").exists()
    assert not any(Path("run.rescued").iterdir())
    steps, step = resumed("run.rescued-2")
    assert steps == [step + 1, step + 2]


def test_another_folder_under_the_old_name_is_left_alone(place):
    def take_its_name():
        Path("run").rename("moved")
        Path("run").mkdir()

    thread = once_it_trains(take_its_name)
    assert train("--train.steps", "100000") == 1
    thread.join()
    assert not any(Path("run").iterdir())
    assert checkpoints(Path("moved/checkpoints"))


def test_a_trace_makes_no_folder_under_the_old_name(tmp_path):
    folder = RunFolder(root=tmp_path / "run")
    write_trace(Alone(), folder, "{}")
    assert not folder.root.exists()


def test_a_link_that_leads_to_the_same_folder_is_the_same_place(tmp_path):
    (tmp_path / "run").mkdir()
    with FolderWatch(RunFolder(root=tmp_path / "run"), {}, "train") as watch:
        (tmp_path / "run").rename(tmp_path / "disk")
        (tmp_path / "run").symlink_to(tmp_path / "disk")
        assert watch.look() is None
