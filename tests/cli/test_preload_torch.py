"""What is begun before a verb imports torch."""

import pytest

import model_folder
from superstep.cli.before_torch.preload_torch import begin
from superstep.errors import UserError
from superstep.launch import fork_server


@pytest.fixture
def begun(monkeypatch, tmp_path):
    """The modules whose ranks something was begun for."""
    found = []
    monkeypatch.setattr(fork_server, "begin", found.append)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    return found


@pytest.mark.parametrize(
    ("verb", "argv", "wanted"),
    [
        ("train", ["--plan.dp", "2"], ["superstep.cli.train.train"]),
        ("train", ["--plan.dp", "None", "--plan.tp", "2"], ["superstep.cli.train.train"]),
        ("train", ["--plan.dp", "1"], []),
        ("train", ["--plan.dp", "None"], []),
        ("prove", ["--plan.tp", "2"], ["superstep.cli.prove.prove"]),
        ("prove", ["--plan.dp", "1", "--world", "4", "--all"], ["superstep.cli.prove.prove"]),
        ("prove", ["--plan.dp", "1"], []),
        ("serve", ["start"], ["superstep.serve.processes.worker"]),
    ],
)
def test_it_is_begun_where_ranks_will_be(begun, tmp_path, verb, argv, wanted):
    model_folder.write_folder(tmp_path / "start")
    begin(verb, argv)
    assert begun == wanted


def test_torchrun_has_begun_its_ranks(begun, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    begin("train", ["--plan.dp", "2"])
    assert begun == []


@pytest.mark.parametrize(("verb", "argv"), [("train", ["--plan.dq", "2"]), ("serve", ["nowhere"])])
def test_what_is_wrong_begins_nothing(begun, verb, argv):
    with pytest.raises(UserError, match=r"dq|nowhere"):
        begin(verb, argv)
    assert begun == []
