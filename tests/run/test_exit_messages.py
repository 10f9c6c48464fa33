"""After a fault: the newest checkpoint and the command that goes on, of training and of tune rl alike."""

from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

import runs
import saved
from superstep.cli.main import main, report
from superstep.cli.tune import rl
from superstep.errors import Fault, UserError
from superstep.launch.failure import trouble_of
from superstep.launch.hosts.events import Cause, RunOver
from superstep.launch.hosts.follow_orders import cause_of
from superstep.launch.hosts.messages import FROM_LEAD
from superstep.run import exit_messages, launch_ranks
from superstep.run.console import Silent
from superstep.run.hosts import multi_host
from superstep.run.rl import launch_rl
from superstep.state import checkpoint
from superstep.train.run_folder.folder_watch import RunFolderMoved
from superstep.train.run_folder.run_paths import RunFolder

FLAGS = ["train", "run.toml", "--state.dir", "my run", "--train.steps", "4", "--state.save-every", "2"]


def _breaks(*args, **rest):
    raise Fault("the connection is gone.", rank=1)


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    runs.make_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_a_fault_names_the_newest_checkpoint_and_the_command_that_goes_on(monkeypatch, capsys):
    assert main(FLAGS) == 0
    capsys.readouterr()
    monkeypatch.setattr(launch_ranks, "launch_on", _breaks)
    assert main([*FLAGS, "--state.existing", "resume", "--train.steps", "6"]) == 1
    said = capsys.readouterr().err
    assert said == (
        "superstep: fault: rank 1: the connection is gone. The newest checkpoint is my run/checkpoints/step-000004; "
        "resume with: superstep train --state.dir 'my run' --state.existing resume\n"
    )


def test_a_fault_before_a_checkpoint_and_one_before_the_run_had_begun(place):
    folder = RunFolder(root=place / "run")
    fault = Fault("it broke")
    assert exit_messages.end_by_signal(fault, folder, Silent()) is None
    assert str(fault) == "it broke", "the run had not begun"
    folder.root.mkdir()
    folder.config.touch()
    exit_messages.end_by_signal(fault, folder, Silent())
    assert "it broke. The run has no checkpoint yet; start it again with: superstep train --state.dir " in str(fault)
    mistake = UserError("no such field")
    exit_messages.end_by_signal(mistake, folder, Silent())
    assert str(mistake) == "no such field"


def test_reinforcement_learning_says_the_same(place, monkeypatch, capsys):
    folder = RunFolder(root=place / "rl")
    folder.root.mkdir()
    folder.config.touch()
    saved.write(folder.checkpoints, 3)
    monkeypatch.setattr(rl, "prepare_rl_job", lambda *_, **__: nullcontext(SimpleNamespace(folder=folder)))
    monkeypatch.setattr(launch_rl, "_launch", _breaks)
    assert report(lambda: rl.run(lambda: SimpleNamespace(recipe=None))) == 1
    said = capsys.readouterr().err
    assert (
        f"The newest checkpoint is {folder.checkpoints}/step-000003; resume with: superstep tune rl --state.dir" in said
    )


def test_older_checkpoints_are_spoken_of_where_there_are_some(place, monkeypatch):
    monkeypatch.setattr(checkpoint.RankSave, "hashes", lambda self: 1 / 0)
    with pytest.raises(Fault) as first:
        saved.write(place / "c", 1)
    assert str(first.value).endswith("the checkpoint cannot be written: ZeroDivisionError: division by zero")
    monkeypatch.undo()
    saved.write(place / "c", 1)
    monkeypatch.setattr(checkpoint.RankSave, "hashes", lambda self: 1 / 0)
    with pytest.raises(Fault, match="cannot be written, and older ones are untouched: ZeroDivisionError"):
        saved.write(place / "c", 2)


def test_each_host_is_told_its_own_command_where_the_folder_was_moved(place):
    (place / "moved").mkdir()
    saved.write(place / "moved/checkpoints", 3)
    fault = RunFolderMoved(place / "run", place / "moved", is_removed=False).fault(3)
    cause = cause_of(trouble_of(0, fault), "0 (first)")
    told = FROM_LEAD.decode(FROM_LEAD.encode(RunOver(cause)))
    for host in range(2):
        verb = f"train --hosts 2 --host {host} --meet 10.0.0.1:29400"
        here = SimpleNamespace(job=SimpleNamespace(folder=RunFolder(root=place / "run")), verb=verb, console=Silent())
        with pytest.raises(Fault) as ended:
            multi_host._ending(told, here)
        assert str(ended.value).endswith(
            f"was moved to {place}/moved; the state is saved there. The newest checkpoint is {place}/moved/checkpoints/"
            f"step-000003; resume with: superstep {verb} --state.dir {place}/moved --state.existing resume"
        )


@dataclass(frozen=True)
class Held:
    """What host 0 has prepared."""

    folder: RunFolder


class Lead:
    """Host 0's, that keeps what it tells the other hosts at the end."""

    orders = handle_event = None

    def __init__(self, *args, **rest):
        self.closed_with = None

    def begin(self):
        """Nobody comes."""

    def close(self, over):
        type(self).closed_with = over


@pytest.mark.parametrize("is_raised", [False, True], ids=["told", "raised"])
def test_other_hosts_are_not_told_the_command_of_host_0(is_raised, place, monkeypatch):
    folder = RunFolder(root=place / "run")
    folder.root.mkdir()
    folder.config.touch()
    state = SimpleNamespace(snapshot_every=None)
    meet = SimpleNamespace(count=2, number=0, meet=("10.0.0.1", 29400), secret=b"", patience_s=1.0, without_s=1.0)
    here = SimpleNamespace(
        hosts=meet,
        kind=SimpleNamespace(prepare=lambda: nullcontext(Held(folder))),
        resolved=SimpleNamespace(config=SimpleNamespace(state=state)),
        plans={2: None},
        address="10.0.0.1",
        hello=lambda port: None,
        keeper=None,
        verb="train --hosts 2 --host 0",
        name="0 (first)",
        console=Silent(),
    )
    monkeypatch.setattr(multi_host, "Coordinator", Lead)
    monkeypatch.setattr(
        multi_host, "attend", _breaks if is_raised else lambda *args: RunOver(Cause("rank 1: it broke."))
    )
    with pytest.raises(Fault, match="start it again with: superstep train --hosts 2 --host 0"):
        multi_host._lead(here)
    assert Lead.closed_with.cause.text == (
        "host 0: rank 1: the connection is gone." if is_raised else "rank 1: it broke."
    )
