"""Every shipped recipe reads, resolves and compiles to a checked program, and says what it shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from digits import write_digits
from emoji import write_emoji
from prompts import write_prompts
from superstep.cli.flags.options import DEMO
from superstep.cost.program.memory.memory import rank_bytes
from superstep.errors import ConfigError
from superstep.plan.config_io import read_config, write_config
from superstep.plan.resolution.resolve import resolve
from superstep.program.compile import compile_evaluation, compile_step
from superstep.program.instructions import Backward, Fetch, Forward, Step
from superstep.program.text import read_program, write_program
from superstep.train.weights.model import resolve_config
from words import write_words

FOLDER = Path(__file__).parents[1] / "recipes"
RECIPES = sorted(FOLDER.glob("*.toml"))
WORLD = {
    "alexnet": 2,
    "bench": 2,
    "captioner": 2,
    "audio_language": 2,
    "audio_transcripts": 2,
    "breadth_first_zero3": 4,
    "demo": 2,
    "denseformer": 2,
    "dp_zero3": 2,
    "exact": 2,
    "flow": 2,
    "gan": 2,
    "lenet": 2,
    "llama3-8b": 64,
    "long_context": 4,
    "own_model": 2,
    "moe": 2,
    "pipeline_interleaved": 2,
    "qwen3-0.6b": 1,
    "resnet101": 1,
    "resnet18": 2,
    "tensor_parallel": 2,
    "vision_language": 2,
    "word2vec": 2,
    "word2vec_cbow": 2,
    "word2vec_tree": 2,
}
"""Ranks that a recipe launches by itself."""


@pytest.fixture(autouse=True)
def _root(monkeypatch, tmp_path):
    """Paths in a recipe start at the repository; here at a folder with the recipes, and digits and prompts to read."""
    (tmp_path / "recipes").symlink_to(FOLDER)
    write_digits(tmp_path / "runs" / "digits")
    write_emoji(tmp_path / "runs" / "emoji")
    write_prompts(tmp_path / "runs" / "prompts")
    write_words(tmp_path / "runs" / "gcide")
    monkeypatch.chdir(tmp_path)


def recipe(name):
    return resolve_config(read_config(FOLDER / f"{name}.toml"))


def test_every_recipe_has_its_number_of_ranks():
    assert {path.stem: recipe(path.stem).plan.mesh.world for path in RECIPES} == WORLD


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_compiles_and_gives_every_rank_work(path):
    run = resolve_config(read_config(path))
    program = compile_step(run.plan)
    assert program.pp == run.plan.mesh.pp
    for instructions in program.ranks:
        kinds = [type(i) for i in instructions]
        assert kinds.count(Forward) == kinds.count(Backward) > 0
        assert kinds[-1] is Step
    forwards = {(i.unit, i.microbatch) for rank in program.ranks for i in rank if isinstance(i, Forward)}
    assert len(forwards) == len(run.plan.units) * run.plan.microbatches
    assert read_program(write_program(program)) == program
    assert all(compile_evaluation(run.plan).ranks)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_survives_being_written_as_a_run_writes_it(path, tmp_path):
    config = resolve_config(read_config(path)).config
    (tmp_path / "run.toml").write_text(write_config(config), encoding="utf-8")
    assert read_config(tmp_path / "run.toml") == config


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_says_what_it_shows_and_has_a_run_directory_of_its_own(path):
    assert path.read_text(encoding="utf-8").startswith("# ")
    assert read_config(path).state.dir == f"runs/{path.stem}"


def test_the_demo_as_a_file_is_the_demo():
    assert read_config(FOLDER / "demo.toml") == DEMO


def test_breadth_first_fetches_a_block_once_for_all_microbatches_of_a_pass():
    run = recipe("breadth_first_zero3")
    fetches = [i.unit for i in compile_step(run.plan).ranks[0] if isinstance(i, Fetch)]
    assert run.plan.microbatches > 2
    # Once for all forwards and once for all backwards, whatever the number of microbatches.
    assert all(1 <= fetches.count(unit) <= 2 for unit in fetches)


def test_the_plan_for_64_gpus_leaves_half_of_80_gb_for_what_is_not_predicted():
    run = recipe("llama3-8b")
    assert max(rank.bytes for rank in rank_bytes(run, compile_step(run.plan))) < 40e9


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_the_small_qwen_takes_the_ranks_that_were_launched(world):
    assert resolve(read_config(FOLDER / "qwen3-0.6b.toml"), world).plan.mesh.dp == world


def test_the_demo_refuses_a_number_of_ranks_that_it_has_not():
    with pytest.raises(ConfigError, match=r"plan\.dp"):
        resolve(read_config(FOLDER / "demo.toml"), 3)
