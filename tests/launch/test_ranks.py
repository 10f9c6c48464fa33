"""Launched ranks: rank 0's value, or the first cause in one line, and nobody left."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing import util
from pathlib import Path
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist

from ranks import ranks_below
from superstep.comm.objects import gather
from superstep.errors import ConfigError, DataError, Fault, SuperstepError, UserError
from superstep.launch import temporary_folders
from superstep.launch.failure import RankFailure, trouble_of
from superstep.launch.ranks import RankWorld, launch, launch_parties


def _meet(world):
    total = torch.ones(1)
    dist.all_reduce(total)


def _well(world, factor):
    print("rank", world.rank, file=sys.stderr)
    _meet(world)
    return [rank * factor for rank in gather(world.rank, int)], torch.get_num_threads(), os.getpid()


def _wrong(world):
    if world.rank == 1:
        time.sleep(0.2)
        raise RuntimeError("a planted fault")
    _meet(world)


def _user(world):
    _meet(world)
    if world.rank == 1:
        raise DataError("data.corpus: planted.")
    _meet(world)


def _killed(world):
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    _meet(world)


def _stopped(world, which):
    if world.rank == which:
        os.kill(os.getpid(), signal.SIGSTOP)
    _meet(world)


def _slow(world):
    """No rank has anything to say for a while, and one computes without a break."""
    deadline = time.monotonic() + 1.5
    while world.rank == 1 and time.monotonic() < deadline:
        pass
    _meet(world)
    return "met"


def _silent(world):
    if world.rank == 1:
        os.write(2, b"Traceback (most recent call last):\n  a cause in some library\n\n")
        os._exit(3)
    time.sleep(600)


def _place(world):
    print(f"rank {world.rank}\n", end="", flush=True)  # in one piece, whether or not Python keeps a buffer
    _meet(world)  # who leaves before the other has connected breaks its connection
    return os.environ.get("OF_THE_LAUNCHER"), Path.cwd(), os.getppid()


def _meeting(world, wanted):
    """Waits for a party, or is one that is waited for and killed."""
    if not wanted:
        world.store.put("there", b"")
        return gather(world.rank, int)
    while world.store.get("there") is None:
        time.sleep(0.01)
    if wanted == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
    return None


def _stuck(world, folder):
    (Path(folder) / str(world.rank)).write_text(str(os.getpid()))
    time.sleep(600)


@pytest.fixture
def nothing_left(tmp_path, monkeypatch):
    """Fails the test if a process of ours or a file in the temporary folder or in shared memory outlives it."""
    shared = Path("/dev/shm")
    util.get_temp_dir()  # of the seed, which lives as long as this process
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = set(shared.iterdir()) if shared.is_dir() else set()
    children = _ranks()
    yield
    assert not _ranks() - children
    assert not list(tmp_path.iterdir())
    ours = {path for path in set(shared.iterdir()) - before if "superstep" in path.name} if shared.is_dir() else set()
    assert not ours


def _ranks():
    """The ranks that this process has started."""
    return set(ranks_below(psutil.Process()))


@pytest.mark.multiproc
@pytest.mark.usefixtures("nothing_left")
class TestLaunch:
    def test_rank_0s_value_comes_back_and_no_noise(self, capfd):
        values, threads, pid = launch(2, _well, 10)
        assert (values, threads) == ([0, 10], 1)
        assert pid != os.getpid()
        assert capfd.readouterr() == ("", "")

    def test_one_rank_runs_right_here(self):
        assert launch(1, _well, 3)[2] == os.getpid()

    def test_the_first_cause_is_told_and_not_what_followed(self, capfd):
        with pytest.raises(Fault, match=r"^rank 1: RuntimeError: a planted fault\n(?s:.*)in _wrong"):
            launch(2, _wrong)
        assert capfd.readouterr() == ("", "")

    def test_a_users_mistake_stays_one(self):
        with pytest.raises(UserError, match=r"^data\.corpus: planted\.$"):
            launch(2, _user)

    def test_a_killed_rank_is_named_with_its_signal(self, capfd):
        start = time.monotonic()
        with pytest.raises(Fault, match=r"^rank 1: the process was killed by SIGKILL, as .* memory runs out\.$"):
            launch(2, _killed)
        assert time.monotonic() - start < 40
        assert capfd.readouterr() == ("", "")

    @pytest.mark.parametrize("which", [0, 1])
    def test_a_stopped_rank_is_named_long_before_a_collective_is_late(self, which, capfd):
        start = time.monotonic()
        with pytest.raises(Fault, match=rf"^rank {which}: its process \d+ was stopped \(SIGSTOP, or Ctrl-Z\) and did"):
            launch(2, _stopped, which)
        assert time.monotonic() - start < 40
        assert capfd.readouterr() == ("", "")

    def test_a_slow_rank_is_no_stopped_one(self):
        assert launch(2, _slow) == "met"

    def test_a_rank_that_ends_silently_is_named_with_its_last_line(self):
        match = r"^rank 1: the process ended with exit status 3 before.* was: a cause in some library$"
        with pytest.raises(Fault, match=match):
            launch(2, _silent)

    def test_parties_are_worlds_of_their_own_and_end_together(self):
        def party(name, size, wanted):
            return RankWorld(name=name, size=size, worker=_meeting, args=(wanted,))

        assert launch_parties("cpu", [party("trainer", 1, ""), party("sampler 0", 2, "")]) == [0]
        parties = [party("trainer", 1, ""), party("sampler 0", 1, "is there"), party("sampler 1", 1, "killed")]
        with pytest.raises(Fault, match=r"^sampler 1, rank 0: the process was killed by SIGKILL"):
            launch_parties("cpu", parties)

    def test_a_rank_has_its_launchers_place_though_the_seed_is_older(self, capfd, tmp_path, monkeypatch):
        _, _, seed = launch(2, _place)
        # A whole job may be told to stop: the seed leaves that to those who run.
        os.kill(seed, signal.SIGTERM)
        monkeypatch.setenv("OF_THE_LAUNCHER", "now")
        monkeypatch.chdir(tmp_path)
        capfd.readouterr()
        assert launch(2, _place) == ("now", tmp_path, seed)
        assert sorted(capfd.readouterr().out.split()) == ["0", "1", "rank", "rank"]


LAUNCHER = """
import sys
sys.path[:0] = {paths!r}
from superstep.launch.fork_server import begin
if __name__ == "__main__":
    begin("test_ranks")
import test_ranks
from superstep.launch.ranks import launch
if __name__ == "__main__":
    launch(2, test_ranks._stuck, {folder!r})
"""


@pytest.mark.multiproc
@pytest.mark.parametrize(
    "name", ["t", pytest.param("t" * 100, marks=pytest.mark.long)], ids=["of a seed", "no room for a seed's socket"]
)
def test_ranks_end_with_a_launcher_that_was_killed(name, tmp_path, short_folder):
    temporary = short_folder / name
    temporary.mkdir()
    (tmp_path / "script.py").write_text(LAUNCHER.format(paths=sys.path, folder=str(tmp_path)))
    environment = os.environ | {"TMPDIR": str(temporary)}
    launcher = subprocess.Popen([sys.executable, str(tmp_path / "script.py")], env=environment)
    marks = [tmp_path / "0", tmp_path / "1"]
    _until(lambda: all(mark.exists() and mark.read_text() for mark in marks), 60)
    launcher.kill()
    launcher.wait()
    ranks = [int(mark.read_text()) for mark in marks]
    _until(lambda: not any(map(psutil.pid_exists, ranks)), 10)
    # torch makes a folder for its compiler there when it is imported.
    assert [path.name for path in temporary.iterdir() if not path.name.startswith("torchinductor")] == []


@pytest.mark.multiproc
def test_what_a_killed_launch_leaves_goes_with_the_next(tmp_path, short_folder):
    (tmp_path / "script.py").write_text(LAUNCHER.format(paths=sys.path, folder=str(tmp_path)))
    launcher = subprocess.Popen(
        [sys.executable, str(tmp_path / "script.py")],
        env=os.environ | {"TMPDIR": str(short_folder)},
        start_new_session=True,
    )
    marks = [tmp_path / "0", tmp_path / "1"]
    _until(lambda: all(mark.exists() and mark.read_text() for mark in marks), 60)
    os.killpg(launcher.pid, signal.SIGKILL)  # the launcher, its seed and its ranks
    launcher.wait()
    left = {path.name for path in short_folder.iterdir() if path.name.startswith(temporary_folders.PREFIXES)}
    assert {name.partition("-")[0] for name in left} == {"superstep", "pymp"}
    for other in ("superstep-launch-of-nobody", "pymp-of-others"):
        (short_folder / other).mkdir()
    lives = Path(tempfile.mkdtemp(prefix="superstep-launch-", dir=short_folder))
    handle = temporary_folders.own(lives)
    with mock.patch.object(tempfile, "tempdir", str(short_folder)):
        launch(2, _meet)
    os.close(handle)
    found = {path.name for path in short_folder.iterdir()}
    assert not left & found
    assert {"superstep-launch-of-nobody", "pymp-of-others", lives.name} <= found


def test_folders_of_other_users_and_links_are_left(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for place in ("outside", "superstep-theirs"):
        (tmp_path / place).mkdir()
        os.close(temporary_folders.own(tmp_path / place))
    (tmp_path / "superstep-link").symlink_to(tmp_path / "outside")
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000)
    temporary_folders.remove_left_folders()
    assert (tmp_path / "superstep-theirs").is_dir()
    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    temporary_folders.remove_left_folders()
    assert not (tmp_path / "superstep-theirs").exists()
    assert (tmp_path / "outside").is_dir()


@pytest.mark.long
@pytest.mark.multiproc
def test_a_script_without_a_guard_is_told_of_it(tmp_path):
    (tmp_path / "script.py").write_text("from superstep.launch.ranks import launch\nlaunch(2, print)\n")
    done = subprocess.run([sys.executable, str(tmp_path / "script.py")], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "does so below if __name__ == '__main__'" in done.stderr.splitlines()[-1]


def _until(is_so, seconds):
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.05)


# Which of several reports is the cause.


def _lost():
    return RuntimeError("[third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234")


def _during(cause, error):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("earlier", "later", "told"),
    [
        (_lost(), ConfigError("the cause"), "the cause"),
        (_lost(), Fault("the cause", step=3), "rank 1, step 3: the cause"),
        (_lost(), RuntimeError("the cause"), "rank 1: RuntimeError: the cause"),
        (_during(_lost(), Fault("follows", rank=0, step=3)), Fault("the cause", rank=1), "rank 1: the cause"),
        (
            _during(_lost(), Fault("follows", rank=0, step=3)),
            _during(RuntimeError("out of memory"), Fault("out of memory", rank=1, step=3, instruction="forward u0 m0")),
            "rank 1, step 3, instruction forward u0 m0: out of memory",
        ),
        (Fault("the cause", rank=0), RuntimeError("follows"), "rank 0: the cause"),
        (OSError(28, "No space left on device"), ValueError("follows"), "rank 0: OSError: [Errno 28] No space left"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_the_cause_comes_before_what_follows_from_it(earlier, later, told):
    reports = [trouble_of(0, earlier), trouble_of(1, later)]
    reports[1] = RankFailure(at_s=reports[0].at_s + 1, order=reports[1].order, error=reports[1].error)
    first = min(reports, key=lambda trouble: (trouble.order, trouble.at_s))
    assert isinstance(first.error, SuperstepError)
    assert str(first.error).startswith(told)


def test_a_gpu_without_memory_is_one_line():
    trouble = trouble_of(
        1, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8 bytes.\nException raised from")
    )
    assert str(trouble.error) == "rank 1: CUDA out of memory. Tried to allocate 8 bytes."
