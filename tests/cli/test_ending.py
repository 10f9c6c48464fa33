"""After a fault: the newest checkpoint and the command that goes on, of training and of tune rl alike."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

import runs
import saved
from superstep.cli.main import main, reported
from superstep.cli.train import ending, job
from superstep.cli.tune import reinforce
from superstep.errors import Fault, UserError
from superstep.state import checkpoint
from superstep.train.run_folder import RunFolder

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
    monkeypatch.setattr(job, "launch_on", _breaks)
    assert main([*FLAGS, "--state.existing", "resume", "--train.steps", "6"]) == 1
    said = capsys.readouterr().err
    assert said == (
        "superstep: fault: rank 1: the connection is gone. The newest checkpoint is my run/checkpoints/step-000004; go "
        "on with: superstep train --state.dir 'my run' --state.existing resume\n"
    )


def test_a_fault_before_a_checkpoint_and_one_before_the_run_had_begun(place):
    folder = RunFolder(root=place / "run")
    fault = Fault("it broke")
    assert ending.ended(fault, folder) is None
    assert str(fault) == "it broke", "the run had not begun"
    folder.root.mkdir()
    folder.config.touch()
    ending.ended(fault, folder)
    assert "it broke. The run has no checkpoint yet; begin again with: superstep train --state.dir " in str(fault)
    mistake = UserError("no such field")
    ending.ended(mistake, folder)
    assert str(mistake) == "no such field"


def test_reinforcement_learning_says_the_same(place, monkeypatch, capsys):
    folder = RunFolder(root=place / "rl")
    folder.root.mkdir()
    folder.config.touch()
    saved.write(folder.checkpoints, 3)
    monkeypatch.setattr(reinforce, "_prepared", lambda recipe: nullcontext(SimpleNamespace(folder=folder)))
    monkeypatch.setattr(reinforce, "_launched", _breaks)
    assert reported(lambda: reinforce.run(None)) == 1
    said = capsys.readouterr().err
    assert (
        f"The newest checkpoint is {folder.checkpoints}/step-000003; go on with: superstep tune rl --state.dir" in said
    )


def test_older_checkpoints_are_spoken_of_where_there_are_some(place, monkeypatch):
    monkeypatch.setattr(checkpoint._Saving, "hashes", lambda self: 1 / 0)
    with pytest.raises(Fault) as first:
        saved.write(place / "c", 1)
    assert str(first.value).endswith("the checkpoint cannot be written: ZeroDivisionError: division by zero")
    monkeypatch.undo()
    saved.write(place / "c", 1)
    monkeypatch.setattr(checkpoint._Saving, "hashes", lambda self: 1 / 0)
    with pytest.raises(Fault, match="cannot be written, and older ones are untouched: ZeroDivisionError"):
        saved.write(place / "c", 2)
