"""A checkpoint of another run is not gone on from: the field is named with both values, and a way to go on."""

import json
import shutil

import pytest

import runs
from superstep.cli.main import main
from superstep.state.checkpoint_dirs import checkpoints
from superstep.state.manifest import read_manifest

FLAGS = ["train", "run.toml", "--train.steps", "4", "--state.save-every", "2"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A run, and others that differ from it in one thing each."""
    folder = tmp_path_factory.mktemp("other-run")
    runs.make_files(folder)
    with pytest.MonkeyPatch.context() as here:
        here.chdir(folder)
        assert main([*FLAGS, "--state.dir", "mine"]) == 0
        assert main([*FLAGS, "--state.dir", "seed", "--train.seed", "77"]) == 0
    return folder


def _taken(place, other):
    """A copy of the run with the newest checkpoint of another in the place of its own."""
    shutil.rmtree(place / "copy", ignore_errors=True)
    shutil.copytree(place / "mine", place / "copy")
    for own in checkpoints(place / "copy" / "checkpoints"):
        shutil.rmtree(own)
    newest = checkpoints(place / other / "checkpoints")[-1]
    shutil.copytree(newest, place / "copy" / "checkpoints" / newest.name)


RESUME_COPY = [*FLAGS, "--state.dir", "copy", "--state.existing", "resume", "--train.steps"]


@pytest.mark.parametrize("steps", ["4", "6"], ids=["complete", "to go on"])
def test_another_seed_is_refused(place, monkeypatch, capsys, steps):
    monkeypatch.chdir(place)
    _taken(place, "seed")
    before = (place / "copy" / "metrics.jsonl").read_bytes()
    assert main([*RESUME_COPY, steps]) == 2
    said = capsys.readouterr().err
    assert "copy/checkpoints/step-000004 is of another run: there train.seed = 77, and here " in said
    assert "begin a new run with its weights by --model.weights and --state.existing new" in said
    assert (place / "copy" / "metrics.jsonl").read_bytes() == before


def test_other_tokens_of_the_same_size_are_refused(place, monkeypatch, capsys):
    """All that corpus.json and the tokenizer tell may be the same."""
    monkeypatch.chdir(place)
    _taken(place, "mine")
    tokens = place / "copy" / "data" / "train.tokens"
    data = bytearray(tokens.read_bytes())
    data[:200], data[200:400] = data[200:400], data[:200]
    tokens.write_bytes(data)
    assert main([*RESUME_COPY, "6"]) == 2
    assert "is of another run: there the tokens of data.corpus = " in capsys.readouterr().err


def test_the_own_checkpoint_says_whose_it_is_and_is_gone_on_from(place, monkeypatch):
    monkeypatch.chdir(place)
    _taken(place, "mine")
    (newest,) = checkpoints(place / "copy" / "checkpoints")
    told = json.loads((newest / "run.json").read_text())
    assert {"train.seed", "model.layers", "model.width", "the tokens of data.corpus"} <= set(told)
    assert "run.json" in read_manifest(newest).beside
    assert main([*RESUME_COPY, "6"]) == 0
