"""Every measured figure has its file, command, machine and day; and what is said of strangers was measured."""

import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest

from figures_blocks import FIGURES, PEERS, SERVERS, TRAINERS, command
from superstep.cost.closed.uncertainty import UNSEEN_PEAKS, UNSEEN_STEPS

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_file_of_results_is_on_the_page_and_every_row_has_its_file():
    assert sorted(FIGURES) == sorted(path.name for path in RESULTS.glob("*.json"))


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_has_a_command_whose_options_are_there_that_writes_its_file_and_a_day(name):
    module, *options = shlex.split(command(name).partition(" && ")[0])[2:]
    source = Path(importlib.util.find_spec(module).origin).read_text(encoding="utf-8")
    flags = [option for option in options if option.startswith("--")]
    assert [flag for flag in flags if f'"{flag}"' not in source] == []
    if "--json" in flags:
        assert options[options.index("--json") + 1] == f"bench/results/{name}"
    else:
        stem = name.removesuffix(".json")
        assert stem == f"{module.partition('.')[2]}-{option(name, '--vocab', '4096')}" or stem in source
    assert re.fullmatch(r"2026-\d\d-\d\d", FIGURES[name].date)


def option(name, flag, default):
    """What a file's command says behind an option."""
    words = shlex.split(command(name))
    return words[words.index(flag) + 1] if flag in words else default


@pytest.mark.parametrize("name", [name for name in FIGURES if name.startswith(("train_vs_peers", "exact_cost"))])
def test_a_command_has_the_settings_that_its_file_was_made_with(name):
    workload = json.loads((RESULTS / name).read_text(encoding="utf-8"))["workload"]
    if "pairs" in workload:
        assert option(name, "--pairs", "12") == str(workload["pairs"])
    else:
        assert option(name, "--vocab", "4096") == str(workload["vocab"])
        assert option(name, "--steps", "5") == str(workload["steps"])


MEASURED = re.compile(r"^\s*\|.*\d|\d tokens/s|\d MiB|\d%|\b\d\.\d\d\b")
SOURCE = re.compile(
    r"2026-\d\d-\d\d.*`(?:python -m bench|superstep)\.?|`(?:python -m bench|superstep).*2026-\d\d-\d\d", re.DOTALL
)


def paragraphs_of_figures():
    """Each paragraph or table of the README's performance that has a figure, with the paragraph behind it."""
    section = README.partition("## Performance")[2].partition("\n## ")[0]
    parts = [part for part in re.sub(r"<!-- .*? -->\n?", "", section).split("\n\n") if part.strip()]
    behind = dict(zip(parts, [*parts[1:], ""], strict=True))
    return [(part, behind[part]) for part in parts if MEASURED.search(part) and not part.lstrip().startswith("- ")]


@pytest.mark.parametrize(("part", "behind"), paragraphs_of_figures(), ids=lambda part: " ".join(part.split())[:40])
def test_a_figure_of_the_readme_has_its_day_machine_and_command_beside_it(part, behind):
    beside = next((text for text in (part, behind) if SOURCE.search(text)), "")
    assert re.search(r"cores|published tables", beside), f"no command, machine and day beside: {part}"


def test_the_readme_has_all_that_it_measured_and_the_settings_of_all_peers_beside_it():
    assert len(paragraphs_of_figures()) >= 5
    assert [name for name in (*TRAINERS, *SERVERS) if PEERS[name] not in README] == []
    shown = README.partition("This is what a shorter one prints")[2].partition("```")[0]
    assert re.search(r"`superstep\s+train.*cores.*2026-\d\d-\d\d", shown, re.DOTALL)


@pytest.mark.parametrize("name", sorted(set(re.findall(r"bench/results/([\w.-]+\.json)", README))))
def test_a_file_that_the_readme_names_is_there(name):
    assert name in FIGURES


@pytest.mark.parametrize("page", [README, (ROOT / "docs" / "explanation" / "tune.md").read_text(encoding="utf-8")])
def test_wherever_a_replay_of_rewards_is_said_to_be_to_the_bit_exact_mode_is_its_condition(page):
    said = [found.start() for found in re.finditer(r"replay\w*\b[^.|]{0,20} to the bit", " ".join(page.split()))]
    assert said
    for place in said:
        assert re.search(r"exact", " ".join(page.split())[place - 60 : place]), "only exact mode does that"


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
