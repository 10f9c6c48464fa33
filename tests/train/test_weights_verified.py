"""Who samples, serves or starts from the newest checkpoint of a run sees that its weights are what was written."""

import pytest

import runs
from superstep.cli.main import main
from superstep.errors import StateError
from superstep.serve.build_engine import open_engine
from superstep.serve.config import ServeConfig
from superstep.state.checkpoint_dirs import checkpoints
from superstep.state.verify import verify_weights


@pytest.fixture
def newest(tmp_path, monkeypatch):
    runs.make_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["train", "run.toml"]) == 0
    return checkpoints(tmp_path / "run/checkpoints")[-1]


def _flip(path):
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def test_a_flipped_bit_of_the_weights_is_not_sampled_served_or_started_from(newest, capsys):
    serve = ServeConfig(requests=1)
    tuned = ["train", "run.toml", "--state.dir", "tuned", "--model.weights", "run"]
    tuned += ["--data.tokenizer", str(newest / "tokenizer.json")]
    assert main(["sample", "run", "the quick"]) == 0
    open_engine(newest, serve)
    assert main([*tuned, "--train.steps", "1"]) == 0
    _flip(newest / "optimizer.safetensors")  # which none of them reads
    assert main(["sample", "run", "the quick"]) == 0
    _flip(newest / "model.safetensors")
    capsys.readouterr()
    assert main(["sample", "run", "the quick"]) == 2
    assert "in model.safetensors has other bits than were written; delete it" in capsys.readouterr().err
    with pytest.raises(StateError, match="has other bits than were written"):
        open_engine(newest, serve)
    assert main([*tuned, "--state.existing", "new"]) == 2
    assert "in model.safetensors has other bits than were written" in capsys.readouterr().err
    (newest / "manifest.json").unlink()
    verify_weights(newest)  # as other tools write it: there is nothing to hold it against


def test_what_a_glance_shows_is_told_before_anything_is_loaded(newest, capsys):
    with (newest / "model.safetensors").open("ab") as file:
        file.truncate(1000)
    for words in (["sample", "run", "the quick"], ["serve", "run"]):
        assert main(words) == 2
        assert "model.safetensors has 1000 bytes, not the" in capsys.readouterr().err
