"""A run on two ranks, ended from outside: one line, the right exit status, nobody left, the terminal given back."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import psutil
import pytest

import runs
import small_launcher
from join_ranks import join_ranks
from longer import longer
from ranks import ranks_below
from superstep.cli.main import main
from superstep.state.checkpoint import read_position
from superstep.state.checkpoint_dirs import checkpoints

pytestmark = pytest.mark.multiproc

COMMAND = [sys.executable, small_launcher.__file__, "train", "run.toml", "--plan.dp", "2"]
KILLED = "superstep: fault: rank 0: the process was killed by SIGKILL, as the system does where memory runs out."
GO_ON = (
    "The newest checkpoint is run/checkpoints/{newest}; resume with: superstep train --state.dir run --state.existing "
    "resume"
)
LONG = ["--train.steps", "100000", "--state.save-every", "5"]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder to work in."""
    runs.make_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def environment(place, short_folder):
    """That of a command, with a temporary folder of its own, which is empty again at the end."""
    theirs = os.environ | {"TMPDIR": str(short_folder), "TERM": "xterm-256color"}
    # Most users have none, and what is left in a buffer then breaks later.
    theirs.pop("PYTHONUNBUFFERED", None)
    yield theirs
    # torch keeps a cache there, of its own accord.
    assert not [path for path in short_folder.iterdir() if not path.name.startswith("torchinductor")]


class Terminal:
    """The command on a terminal of its own."""

    def __init__(self, command, environment):
        self.pid, self.stream = pty.fork()
        if self.pid == 0:
            # A shell's background job, as this suite may be, has its children ignore Ctrl-C.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.execve(command[0], command, environment)
        self.screen = b""
        self.family = []

    def wait_for(self, is_so, seconds=60):
        deadline = time.monotonic() + seconds
        while not is_so():
            assert time.monotonic() < deadline, self.screen[-2000:].decode()
            if select.select([self.stream], [], [], 0.05)[0]:
                self.read()

    def read(self):
        try:
            data = os.read(self.stream, 1 << 16)
        except OSError:  # Linux's word for the end of a terminal
            data = b""
        self.screen += data
        return data

    def ranks(self):
        self.family = psutil.Process(self.pid).children(recursive=True)
        return ranks_below(psutil.Process(self.pid))

    def end(self):
        """The exit status, and the last line on the screen; nothing that it started is left."""
        start = time.monotonic()
        while not select.select([self.stream], [], [], 0.05)[0] or self.read():
            if time.monotonic() - start > 60:
                os.kill(self.pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self.stream)
        assert time.monotonic() - start < 15
        _, alive = psutil.wait_procs(self.family, timeout=5)
        assert not alive
        assert b"Traceback" not in self.screen
        assert self.screen.rfind(b"\x1b[?25h") > self.screen.rfind(b"\x1b[?25l"), "the cursor is hidden"
        return status, self.screen.decode().rpartition("\x1b[?25h")[2]


ENDINGS = {
    "rank 0 is killed": (
        lambda terminal, ranks: ranks[0].kill(),
        1,
        f"{KILLED} superstep doctor run shows what every rank did (run/fault.json). {GO_ON}\r\n",
    ),
    "Ctrl-C": (
        lambda terminal, ranks: os.write(terminal.stream, b"\x03"),
        130,
        f"superstep: interrupted. {GO_ON}\r\n",
    ),
    "SIGTERM": (
        lambda terminal, ranks: os.kill(terminal.pid, signal.SIGTERM),
        143,
        f"superstep: stopped by SIGTERM. {GO_ON}\r\n",
    ),
    "SIGTERM to a rank": (
        lambda terminal, ranks: ranks[1].send_signal(signal.SIGTERM),
        143,
        f"superstep: stopped by SIGTERM. {GO_ON}\r\n",
    ),
}


@pytest.mark.parametrize("name", longer(ENDINGS, lambda name: name != "SIGTERM"))
def test_a_run_that_is_ended_ends_cleanly(name, place, environment):
    end, wanted, said = ENDINGS[name]
    terminal = Terminal([*COMMAND, *LONG], environment)
    terminal.wait_for(lambda: (place / "run/checkpoints/step-000005/manifest.json").exists())
    ranks = terminal.ranks()
    assert len(ranks) == 2
    end(terminal, ranks)
    status, line = terminal.end()
    where = r"rank 0(, host \S+, step \d+(, instruction \w[^:]*)?):"
    assert ("killed" in name) == (re.search(where, line) is not None), "where it was is told too"
    line = re.sub(where, "rank 0:", line)
    newest = checkpoints(place / "run" / "checkpoints")[-1]
    assert (status, line) == (wanted, said.format(newest=newest.name))
    assert (place / "run" / "report.html").is_file()
    # What was whole is whole: one rank goes on from there.
    step = read_position(newest).step
    if "SIGTERM" in name:
        assert runs.events(place / "run", "stopped")[-1]["step"] == step
        assert step == runs.events(place / "run", "step")[-1]["step"], "the last step is saved"
        return
    assert main(["train", "run.toml", "--state.existing", "resume", "--train.steps", str(step + 1)]) == 0
    assert [line["step"] for line in runs.events(place / "run", "step")] == list(range(1, step + 2))


def test_a_rank_that_dies_at_its_start_leaves_no_run(place, environment):
    command = subprocess.Popen(COMMAND, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    ranks = []
    while len(ranks) < 2:
        assert command.poll() is None
        ranks = ranks_below(psutil.Process(command.pid))
        time.sleep(0.01)
    family = psutil.Process(command.pid).children(recursive=True)
    ranks[0].kill()
    start = time.monotonic()
    _, said = command.communicate(timeout=30)
    assert time.monotonic() - start < 15
    assert (command.returncode, said) == (1, f"{KILLED}\n")
    assert not psutil.wait_procs(family, timeout=5)[1]
    assert [path.name for path in (place / "run").iterdir()] == ["data"], "the next start is not refused"


def test_the_output_may_be_closed(environment):
    """As `superstep train | head -1` does."""
    command = subprocess.Popen(
        [*COMMAND, *LONG, "--plan.dp", "1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    assert command.stdout.readline().startswith("Preparing the text")
    command.stdout.close()
    said = command.stderr.read()
    assert command.wait(timeout=30) == 1
    assert said.count("\n") == 1
    assert "standard output cannot be written: the program that reads it has ended" in said


@pytest.mark.parametrize("argv", [["--help"], ["train", "--help"]], ids=str)
def test_nobody_need_read_the_help(argv, environment):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "superstep", *argv]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, env=environment)
    os.close(writer)
    assert done.stderr == ""
    assert done.returncode in (0, 1)


# torchrun.

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.long
def test_torchruns_ranks_join_and_stop_together(tmp_path, monkeypatch):
    # torchrun leaves folders of its own in the temporary folder.
    runs.make_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    whole = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    train = [*TORCHRUN, "-m", "superstep", "train", "run.toml"]
    command = subprocess.Popen([*train, "--plan.dp", "None", *LONG], **whole)
    while not (tmp_path / "run/checkpoints/step-000005/manifest.json").exists():
        assert command.poll() is None
        time.sleep(0.05)
    command.terminate()
    out, said = command.communicate(timeout=120)
    newest = checkpoints(tmp_path / "run" / "checkpoints")[-1].name
    lines = [line for line in said.splitlines() if line.startswith("superstep:")]
    go_on = (
        f"The newest checkpoint is run/checkpoints/{newest}; start the same command again with --state.existing resume."
    )
    assert "2 ranks" in out
    assert lines == [f"superstep: stopped by SIGTERM. {go_on}"]
    last = int(newest.removeprefix("step-"))
    assert runs.events(tmp_path / "run", "stopped")[-1]["step"] == last
    assert [line["step"] for line in runs.events(tmp_path / "run", "step")] == list(range(1, last + 1))


def test_ranks_that_join_are_refused_together(tmp_path, monkeypatch):
    runs.make_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["train", "run.toml", "--train.steps", "1"]) == 0
    before = runs.files(tmp_path / "run")
    statuses, said = join_ranks(tmp_path, ["train", "run.toml", "--plan.dp", "2"])
    assert statuses == [2, 2]
    assert said.count("\n") == 1, said
    assert said.startswith("superstep: state.dir = 'run' already holds a run. ")
    assert runs.files(tmp_path / "run") == before
