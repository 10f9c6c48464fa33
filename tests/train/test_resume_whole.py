"""A run goes on from the newest checkpoint that is whole, keeps one that is, and lets no other process in."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from unittest import mock

import pytest

import runs
from superstep.cli.main import main
from superstep.errors import StateError
from superstep.state import verify as verifying
from superstep.state.checkpoint_dirs import checkpoints
from superstep.train import save_schedule
from superstep.train.run_folder import run_lock as holding
from superstep.train.run_folder.run_lock import hold, hold_shared
from superstep.train.run_folder.run_paths import RunFolder

FLAGS = ["run.toml", "--state.save-every", "2", "--state.keep", "3", "--train.min-lr-ratio", "1"]
RESUME = [*FLAGS, "--state.existing", "resume", "--train.steps", "8"]


@pytest.fixture(scope="module")
def before(tmp_path_factory):
    """A run of 6 steps with checkpoints of the 2nd, 4th and 6th."""
    folder = tmp_path_factory.mktemp("before")
    runs.make_files(folder)
    old = os.getcwd()
    os.chdir(folder)
    try:
        assert main(["train", *FLAGS]) == 0
    finally:
        os.chdir(old)
    return folder


@pytest.fixture
def run(before, tmp_path, monkeypatch):
    """A copy of it, to be damaged."""
    shutil.copytree(before, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here" / "run"


def _flip(run, name):
    path = run / "checkpoints" / name
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def test_a_run_goes_on_from_the_newest_checkpoint_that_is_whole(run, capsys):
    whole = [line["loss"] for line in runs.events(run, "step")]
    _flip(run, "step-000006/manifest.json")  # seen at a glance
    _flip(run, "step-000004/optimizer.safetensors")  # seen when every byte is read
    assert main(["train", *RESUME]) == 0
    said = capsys.readouterr().out
    assert "passed over: run/checkpoints/step-000006 is damaged: manifest.json" in said
    assert "passed over: run/checkpoints/step-000004 is damaged: exp_avg_sq.model.norm.weight in optimizer" in said
    assert "it is now step-000004.damaged" in said
    assert "resumed after step 2 from run/checkpoints/step-000002" in said
    (resumed,) = runs.events(run, "resumed")
    assert resumed["step"] == 2
    assert len(resumed["passed_over"]) == 2
    assert [line["loss"] for line in runs.events(run, "step")][:6] == whole, "the steps in between are done again"
    left = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert left == [
        "step-000004", "step-000004.damaged", "step-000006", "step-000006.damaged", "step-000008",
    ]  # fmt: skip


DAMAGE = {
    "a lost file": ("step-000006 is damaged: model.safetensors cannot be read", lambda at: at.unlink()),
    "a torn file": ("model.safetensors has 1000 bytes, not the", lambda at: os.truncate(at, 1000)),
    "a torn manifest": (
        "is damaged: manifest.json",
        lambda at: at.with_name("manifest.json").write_text('{"format": 2}'),
    ),
    "no manifest's JSON": ("is no checkpoint", lambda at: at.with_name("manifest.json").write_text("")),
}


def test_where_no_checkpoint_is_whole_nothing_is_touched(run, capsys):
    for folder in checkpoints(run / "checkpoints")[:-1]:
        shutil.rmtree(folder)
    kept = run.with_name("kept")
    shutil.copytree(run, kept)
    for name, (message, damage) in DAMAGE.items():
        damage(run / "checkpoints/step-000006/model.safetensors")
        files = runs.files(run)
        assert main(["train", *RESUME]) == 2, name
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert message in said, name
        assert "no older checkpoint of the run is whole" in said
        assert runs.files(run) == files
        shutil.rmtree(run)
        shutil.copytree(kept, run)


def test_retention_keeps_the_last_whole_checkpoint(run, monkeypatch, capsys):
    """The disk loses a bit of each checkpoint just after it was written: the older one stays, and the run stops."""
    shutil.rmtree(run / "checkpoints/step-000002")
    shutil.rmtree(run / "checkpoints/step-000004")
    inner = verifying.is_crowded
    monkeypatch.setattr(save_schedule, "PAUSES_S", ())

    def lossy(root, keep):
        _flip(run, f"{checkpoints(root)[-1].name}/model.safetensors")
        return inner(root, keep)

    with mock.patch.object(verifying, "is_crowded", lossy):
        assert main(["train", *RESUME, "--state.keep", "1"]) == 1
    said = capsys.readouterr().err
    assert "a checkpoint that has just been written is not whole, and is moved aside; older ones are untouched" in said
    assert [path.name for path in checkpoints(run / "checkpoints")] == ["step-000006"]
    assert (run / "checkpoints/step-000008.damaged").is_dir()
    assert main(["train", *RESUME, "--state.keep", "1"]) == 0
    assert [path.name for path in checkpoints(run / "checkpoints")] == ["step-000008"]


# Two runs on one directory.

HOLDER = """
import sys, time
from pathlib import Path
from superstep.train.run_folder.run_lock import hold
from superstep.train.run_folder.run_paths import RunFolder
with hold(RunFolder(root=Path(sys.argv[1]))):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_directory_in_use_names_its_owner_and_a_dead_one_keeps_nothing(run, capsys):
    owner = subprocess.Popen([sys.executable, "-c", HOLDER, str(run)], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout.readline() == "held\n"
        files = runs.files(run)
        assert main(["train", *RESUME]) == 2
        said = capsys.readouterr().err
        assert f"state.dir = 'run' is in use by process {owner.pid} on " in said
        assert said.count("\n") == 1
        assert runs.files(run) == files
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
    assert json.loads((run / "run.lock").read_text())["pid"] == owner.pid, "a killed process cleans nothing up"
    with hold(RunFolder(root=run)):
        assert json.loads((run / "run.lock").read_text())["pid"] == os.getpid()
    assert not (run / "run.lock").exists()


def test_ranks_that_outlive_their_launcher_are_waited_for(tmp_path):
    folder = RunFolder(root=tmp_path)
    folder.lock.write_text('{"pid": 7, "host": "h", "since": "then"}')  # their launcher was killed
    is_over, held = threading.Event(), threading.Event()

    def rank():
        with hold_shared(folder):
            held.set()
            is_over.wait(30)

    thread = threading.Thread(target=rank)
    thread.start()
    assert held.wait(30)
    with (
        mock.patch.object(holding, "LEAVING_S", 0.1),
        pytest.raises(StateError, match="in use by remaining ranks of process 7 on h, since then"),
        hold(folder),
    ):
        pass
    threading.Timer(0.2, is_over.set).start()
    began_s = time.monotonic()
    with hold(folder):
        assert time.monotonic() - began_s >= 0.1
        handle = os.open(tmp_path, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(handle)
    thread.join()


def _as_nobody(work):
    """What ``work`` says of a StateError, in a process of another user's."""
    ours, theirs = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            os.setgid(65534)
            os.setuid(65534)
            work()
        except StateError as error:
            os.write(theirs, str(error).encode())
        finally:
            os._exit(0)
    os.close(theirs)
    with open(ours, encoding="utf-8") as told:
        said = told.read()
    os.waitpid(process, 0)
    return said


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_what_another_user_may_not_read_or_write_is_one_line(run):
    for folder in (run, *run.parents):
        if folder.stat().st_uid == 0 and str(folder) != "/":
            folder.chmod(0o755)
    place = run / "checkpoints/step-000006"

    def enter():
        with hold(RunFolder(root=run)):
            pass

    assert _as_nobody(enter) == f"state.dir = '{run}' cannot be written; grant access or name another --state.dir."
    (place / "model.safetensors").chmod(0o600)
    assert _as_nobody(lambda: verifying.verify(place)).endswith(
        "model.safetensors cannot be read (Permission denied); grant access."
    )
    (place / "manifest.json").chmod(0o600)
    said = _as_nobody(lambda: verifying.newest(place.parent))
    assert said == f"{place}/manifest.json cannot be read (Permission denied); grant access.", (
        "it is not taken for damage"
    )
    assert verifying.newest(place.parent) == place


def test_foreign_weights_with_an_absurd_header_are_one_line(run, capsys):
    (run.parent / "theirs").mkdir()
    weights = run.parent / "theirs/model.safetensors"
    for header in (b"\xff" * 7 + b"\x7f", (10**9).to_bytes(8, "little"), b""):
        weights.write_bytes(header + b'{"a":1}')
        begin = ["--model.weights", "theirs", "--data.tokenizer", "run/checkpoints/step-000006/tokenizer.json"]
        assert main(["train", *FLAGS, "--state.dir", "other", *begin]) == 2
        said = capsys.readouterr().err
        assert said.startswith("superstep: theirs is damaged: "), said
        assert said.count("\n") == 1
        assert not (run.parent / "other").exists()
