"""Every measured figure has its file, command, machine and day; and what is said of strangers was measured."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from figures_blocks import FIGURES
from superstep.cost.closed.uncertainty import UNSEEN_PEAKS, UNSEEN_STEPS

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_file_of_results_is_on_the_page_and_every_row_has_its_file():
    assert sorted(FIGURES) == sorted(path.name for path in RESULTS.glob("*.json"))


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_has_a_command_that_is_there_and_a_day(name):
    figure = FIGURES[name]
    assert importlib.util.find_spec(figure.command) is not None
    assert re.fullmatch(r"2026-\d\d-\d\d", figure.date)


@pytest.mark.parametrize("name", sorted(set(re.findall(r"bench/results/([\w.-]+\.json)", README))))
def test_a_file_that_the_readme_names_is_there(name):
    assert name in FIGURES


def test_what_is_said_of_rows_that_nothing_was_learned_from_was_measured():
    found = json.loads((RESULTS / "published_unseen.json").read_text(encoding="utf-8"))
    assert round(found["steps"]["inside"], 2) == UNSEEN_STEPS
    assert round(found["peaks"]["inside"], 2) == UNSEEN_PEAKS
    said = (
        f"errs by {found['steps']['median']:.1%} ({found['steps']['p90']:.1%}), its 80% ranges hold {UNSEEN_STEPS:.0%} "
        f"of the steps and {UNSEEN_PEAKS:.0%} of the peaks, and {found['fits']['right']:.0%} of "
        f"{found['fits']['rows']} layouts"
    )
    assert said in " ".join(README.split())
