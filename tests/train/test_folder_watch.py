"""A run directory that is moved or removed in mid-run: the state is saved, and nothing is made under the old name."""

import re
import shutil
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

import runs
import saved
from superstep.cli.main import main
from superstep.comm.device import Device
from superstep.engine.flat.snapshots import FlushResult
from superstep.engine.instruction_timer import HostRecorder
from superstep.engine.torch_profiler import Profiler
from superstep.errors import DiskFault, Fault
from superstep.monitor.status_page import NoHeartbeats
from superstep.observe.events import Saved, Warned
from superstep.observe.jsonl import JsonLines, last_line, read
from superstep.observe.tensorboard import TensorBoard
from superstep.serve.files.weights import open_unfinished
from superstep.state.checkpoint_dirs import checkpoints, step_of
from superstep.state.manifest import Position
from superstep.state.verify import SingleProcess
from superstep.train.run_folder.after_checkpoint import WrittenCheckpoint, write_trace
from superstep.train.run_folder.folder_watch import FolderWatch
from superstep.train.run_folder.run_paths import RunFolder, write_whole
from superstep.train.save_schedule import SaveSchedule
from superstep.train.saving import report_flushed, save
from superstep.train.trainer import Trainer
from superstep.tune.rl.rollout_log import NAME, SNAPSHOTS, RolloutLog


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


def test_nothing_that_writes_makes_a_folder_under_the_old_name(tmp_path):
    folder = RunFolder(root=tmp_path / "run")
    assert "see that the folder is there" in write_trace(SingleProcess(), folder, "{}")[0]
    writes = {
        "a file": lambda: write_whole(folder.report, ""),
        "metrics": lambda: JsonLines(folder.metrics),
        "curves": lambda: TensorBoard(folder.tensorboard),
        "rollouts": lambda: RolloutLog(folder.root / NAME),
        "a profile": lambda: profiled(folder.profiles),
    }
    for what, write in writes.items():
        with pytest.raises(DiskFault, match="see that the folder is there"):
            write()
        assert not folder.root.exists(), what
    with pytest.raises(FileNotFoundError), open_unfinished(folder.root / SNAPSHOTS):
        pass
    assert not folder.root.exists()


def profiled(folder):
    with Profiler((1,), folder, 0, Device("cpu"), ()).watching(1, HostRecorder()):
        pass


def test_a_checkpoint_from_a_snapshot_is_told_of_where_it_is(tmp_path):
    old, new = (RunFolder(root=tmp_path / name) for name in ("run", "moved"))
    trainer = SimpleNamespace(saves=SaveSchedule(1, 3), folder=new, _began_in=old)
    trainer.find_flushed = partial(Trainer.find_flushed, trainer)
    told = []
    flushed = FlushResult(step=3, bytes=1, seconds=1.0, is_on_disk=True, problems="")
    report_flushed(trainer, told.append, flushed)
    assert isinstance(told[-1], Warned), "it went with the folder that was removed"
    for folder in (old, new):
        folder.root.mkdir()
        saved.write(folder.checkpoints, 3)
        report_flushed(trainer, told.append, flushed)
        assert told[-1].path == str(folder.checkpoints / "step-000003")


def test_a_run_whose_snapshots_do_not_come_to_the_disk_ends_once_the_newest_checkpoint_is_too_old(tmp_path):
    folder = RunFolder(root=tmp_path / "run")
    trainer = SimpleNamespace(saves=SaveSchedule(2, 3), folder=folder, _began_in=folder)
    trainer.find_flushed = partial(Trainer.find_flushed, trainer)
    folder.root.mkdir()
    told = []

    def tell(step, problems, **how):
        flushed = FlushResult(step=step, bytes=1, seconds=1.0, is_on_disk=not problems, problems=problems)
        report_flushed(trainer, told.append, flushed, **how)

    full = "run/checkpoints cannot be written: No space left on device."
    tell(2, full)
    saved.write(folder.checkpoints, 4)
    tell(4, "")
    for step in (6, 8):
        tell(step, full)
    assert [(event.step, type(event)) for event in told] == [(2, Warned), (4, Saved), (6, Warned), (8, Warned)]
    tell(10, full, is_over=True)
    with pytest.raises(DiskFault, match="No space left on device") as fault:
        tell(10, full)
    assert fault.value.step == 10


def test_each_try_of_a_save_looks_where_the_folder_is(tmp_path, monkeypatch):
    """Between two tries the folder is moved, and another one made under its name."""
    old = RunFolder(root=tmp_path / "run")
    old.root.mkdir()
    monkeypatch.setattr("superstep.train.save_schedule.PAUSES_S", (0.0,))
    trainer = SimpleNamespace(
        saves=SaveSchedule(1, 3), folder=old, peers=SingleProcess(), heart=NoHeartbeats(), retry_step_s=lambda: None
    )
    trainer.follow_folder = partial(Trainer.follow_folder, trainer)

    def write(position):
        if not (tmp_path / "moved").exists():
            old.root.rename(tmp_path / "moved")
            old.root.mkdir()
            raise DiskFault("the disk is full.")
        return WrittenCheckpoint(saved.write(trainer.folder.checkpoints, position.step), 1, ())

    trainer.save, told = write, []
    with FolderWatch(old, {}) as trainer.watch, pytest.raises(Fault, match="was moved to"):
        save(trainer, Position(step=3), told.append, is_last=True)
    assert not any(old.root.iterdir())
    assert [path.name for path in checkpoints(tmp_path / "moved" / "checkpoints")] == ["step-000003"]


@pytest.mark.multiproc
def test_a_run_with_snapshots_whose_folder_is_removed_has_none_under_the_old_name(place, capfd):
    thread = once_it_trains(remove)
    flags = ("--plan.dp", "2", "--state.snapshot_every", "1", "--state.save_every", "1")
    assert train("--train.steps", "100000", *flags) == 1
    thread.join()
    out, said = capfd.readouterr()
    assert f"the state is saved in {place}/run.rescued." in said
    assert not Path("run").exists()
    (checkpoint,) = checkpoints(Path("run.rescued/checkpoints"))
    assert re.findall(r"saved \S*run\.rescued/checkpoints/(\S+)", out) == [checkpoint.name]


def remove():
    """Remove the run directory, which others write to meanwhile."""
    while Path("run").exists():
        shutil.rmtree("run", ignore_errors=True)


def test_a_link_that_leads_to_the_same_folder_is_the_same_place(tmp_path):
    (tmp_path / "run").mkdir()
    with FolderWatch(RunFolder(root=tmp_path / "run"), {}) as watch:
        (tmp_path / "run").rename(tmp_path / "disk")
        (tmp_path / "run").symlink_to(tmp_path / "disk")
        assert watch.look() is None
