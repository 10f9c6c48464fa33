"""superstep plan RUN.toml --encoder: the places of an encoder, the fastest first, and what is refused."""

import re

import pytest

from picture_samples import write_pictures
from superstep.cli.main import main
from superstep.planner.ranking.rank_encoders import read_pictures

PP = "--plan.pp", "2", "--plan.dp", "1", "--plan.zero", "0"


@pytest.fixture
def here(tmp_path, monkeypatch):
    write_pictures(tmp_path)
    monkeypatch.chdir(tmp_path)


def test_the_three_places_are_ranked_by_their_steps(here, capfd):
    assert main(["plan", "run.toml", "--encoder", *PP]) == 0
    out = capfd.readouterr().out
    assert "pixels of a sample: 0 (10%), 12 (50%), 16 (90%); packed rows are 54% full of them" in out
    names = re.findall(r"^(front|spread|bubbles) ", out, re.MULTILINE)
    assert sorted(names) == ["bubbles", "front", "spread"]
    assert out.splitlines()[-1] == f"fastest: --plan.encoder {names[0]}"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--encoder"], "no run is given"),
        (["recipes.toml", "--encoder"], "recipes.toml"),
        (["run.toml", "--encoder", "--plan.encoder", "behind"], "plan.encoder"),
        (["run.toml", "--encoder", "--model.source", "", "--data.source", ""], "model"),
    ],
)
def test_wrong_input_ends_in_one_line(here, capfd, words, says):
    assert main(["plan", *words]) == 2
    err = capfd.readouterr().err
    assert re.fullmatch(r"superstep: [^\n]+\n", err)
    assert says in err


def test_the_spread_of_pictures_is_that_of_the_data():
    pictures = read_pictures("pixels", [0, 4, 4, 8, 12, 12, 16, 16, 16, 16, 32], rows=3, capacity=64)
    assert pictures.quantiles == (4, 12, 16)
    assert pictures.filled == pytest.approx(136 / 192)
