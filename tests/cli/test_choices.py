"""An automatic choice that the user would perhaps not have made is told in one line, with what would change it."""

import json
import shlex
from dataclasses import replace

import pytest

import runs
import tuned
from model_folder import write_folder
from superstep.cli import choices
from superstep.cli.arguments import train
from superstep.cli.choices import describe_changed_layout, idle_places
from superstep.cli.main import main
from superstep.cli.train import train as train_verb
from superstep.plan.config import RunConfig
from superstep.plan.model.sizes.lookup import shape_of
from superstep.plan.resolution.resolve import resolve
from superstep.run.prepare_job import passes_of_a_step
from superstep.tune.config import TuneConfig
from superstep.tune.initial_model import start_from
from superstep.tune.rl.config import RlConfig, RlRecipe
from superstep.tune.rl.initial_policy import with_start


def run_of(**sections):
    return resolve(RunConfig(**{name: replace(getattr(RunConfig(), name), **keys) for name, keys in sections.items()}))


def write_base(folder, max_tokens):
    """A model that was made for so many positions."""
    config = write_folder(folder) / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": max_tokens}))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("", None),
        ("--train.batch-sequences 12", None),
        ("--plan.dp 1", None),
        (
            "--train.batch-sequences 7",
            "plan.dp = 1 (not 2), plan.microbatch = 7 (not 4): train.batch_sequences = 7 does not split over plan.dp = "
            "2; set plan.dp to one of [1, 7], or train.batch_sequences to a multiple of 2.",
        ),
    ],
)
def test_a_layout_that_makes_way_for_a_flag_is_told(flags, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = train.read(shlex.split(flags))
    assert describe_changed_layout(asked.config, asked.resolved(resolve), resolve) == words


class Enough(Exception):
    """The test has seen what it is about."""


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            "--train.batch-sequences 7",
            "plan.dp = 1 (not 2), plan.microbatch = 7 (not 4): train.batch_sequences = 7 does",
        ),
        ("--plan.dp 1", ""),
        ("RUN --train.batch-sequences 7 --plan.device cpu", "1 rank computes, on 1 of 4 cores; train.batch_sequences"),
    ],
)
def test_train_says_which_layout_it_has_chosen_before_it_prepares_anything(flags, said, tmp_path, monkeypatch, capsys):
    def stop(run, tokens, console, launcher):
        raise Enough

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(choices, "cores", lambda: 4)
    monkeypatch.setattr(train_verb, "prepare_job", stop)
    (tmp_path / "run.toml").write_text('[model]\nname = "demo"\n')
    with pytest.raises(Enough):
        train_verb.main(shlex.split(flags.replace("RUN", "run.toml")))
    printed = capsys.readouterr().out
    assert printed.startswith(said)
    assert printed.count("\n") == (1 if said else 0), printed
    assert list(tmp_path.iterdir()) == [tmp_path / "run.toml"]


@pytest.mark.parametrize(
    ("batch_sequences", "dp", "cores", "words"),
    [
        (16, 2, 2, None),
        (16, 8, 8, None),
        (16, 2, 8, "2 ranks compute, on 2 of 8 cores; --plan.dp 8 takes 8."),
        (7, 1, 8, "1 rank computes, on 1 of 8 cores; --plan.dp 7 takes 7."),
        (
            7,
            1,
            4,
            "1 rank computes, on 1 of 4 cores; train.batch_sequences = 7 does not split over more ranks; "
            "a multiple of 4 does, with --plan.dp 4.",
        ),
    ],
)
def test_cores_that_an_automatic_dp_leaves_idle_are_told(batch_sequences, dp, cores, words):
    run = run_of(train={"batch_sequences": batch_sequences}, plan={"dp": dp, "microbatch": 1})
    assert idle_places(run, cores, "cores") == words


def test_ranks_of_other_axes_count_as_well():
    run = run_of(plan={"dp": 1, "pp": 2})
    assert idle_places(run, 3, "cores") is None
    assert idle_places(run, 8, "GPUs") == "2 ranks compute, on 2 of 8 GPUs; --plan.dp 4 takes 8."


def test_a_step_that_is_several_passes_over_the_data_is_told():
    assert passes_of_a_step(16, 16) is None
    assert passes_of_a_step(16, 4) == (
        "a step of 16 sequences reads the 4 of the data 4 times; with train.batch_sequences = 4 it reads them once."
    )
    assert "reads the 2,000 of the data 1.5 times" in passes_of_a_step(3000, 2000)


def test_a_run_says_what_was_chosen_for_it(tmp_path, monkeypatch, capsys):
    runs.make_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "few.txt").write_text((tmp_path / "good.txt").read_text()[:6000])
    flags = ["--data.corpus", "few.txt", "--train.steps", "1", "--train.batch-sequences", "64", "--plan.dp", "1"]
    assert main(["train", "run.toml", *flags, "--data.validation-fraction", "0.1"]) == 0
    said = capsys.readouterr().out
    assert said.count("a step of 64 sequences reads the ") == 1


@pytest.mark.parametrize(("max_tokens", "tokens"), [(512, 512), (4096, 1024)])
def test_a_recipes_sequences_are_no_longer_than_its_model_was_made_for(tmp_path, monkeypatch, max_tokens, tokens):
    monkeypatch.chdir(tmp_path)
    write_base(tmp_path / "base", max_tokens)
    start = str(tmp_path / "base")
    run = start_from(TuneConfig(start=start))
    assert shape_of(run.model).max_tokens == max_tokens
    assert run.data.sequence_tokens == tokens
    named = replace(TuneConfig(start=start), data=replace(run.data, sequence_tokens=96))
    assert start_from(named).data.sequence_tokens == 96
    config, _ = with_start(RlRecipe(), RlConfig(environment="tasks.py"), start)
    assert config.data.sequence_tokens == min(max_tokens, 512)


def test_sequences_that_follow_the_model_are_told(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_base(tmp_path / "base", 512)
    tuned.write_records(tmp_path / "chats.jsonl", [tuned.conversation(k) for k in range(8)])
    flags = ["--start", "base", "--data.corpus", "chats.jsonl", "--train.steps", "1", "--plan.dp", "1"]
    assert main(["tune", "sft", *flags]) == 0
    said = capsys.readouterr().out
    assert "data.sequence_tokens = 512 (not 1024): the model was made for no more.\n" in said
    assert "a step of 16 sequences reads the " in said
    resume = ["tune", "sft", "--state.existing", "resume", "--train.steps"]
    assert main([*resume, "2", *flags[:4], "--plan.dp", "1"]) == 0
    # Recipes once had the usual length written into them, and runs of such a model the model's.
    recipe = tmp_path / "runs" / "tuned" / "recipe.toml"
    assert "sequence_tokens" not in recipe.read_text()
    recipe.write_text(recipe.read_text().replace("[data]\n", "[data]\nsequence_tokens = 1024\n"))
    capsys.readouterr()
    assert main([*resume, "3"]) == 2
    assert capsys.readouterr().err == (
        "superstep: data.sequence_tokens = 1024 is longer than model.name = 'base/config.json' supports; set "
        "data.sequence_tokens to 512 or less.\n"
    )
    assert main([*resume, "3", "--data.sequence-tokens", "512"]) == 0
    assert main([*resume, "3"]) == 0, "and its recipe has the run's length from then on"


@pytest.mark.parametrize(("kind", "usual"), [("sft", 1024), ("dpo", 1024), ("rl", 512)])
def test_a_length_that_the_user_wrote_is_refused_where_the_model_was_made_for_less(
    kind, usual, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    write_base(tmp_path / "base", 256)
    recipe = f'start = "base"\n[data]\nsequence_tokens = {usual}\n'
    (tmp_path / "recipe.toml").write_text(recipe + ('[rl]\nenvironment = "tasks.py"\n' if kind == "rl" else ""))
    written = ["recipe.toml"]
    flagged = ["--start", "base", *(["--rl.environment", "tasks.py"] if kind == "rl" else [])]
    for asked, tokens in ((written, usual), ([*flagged, "--data.sequence-tokens", "600"], 600)):
        assert main(["tune", kind, *asked]) == 2
        (said,) = capsys.readouterr().err.splitlines()
        assert f"data.sequence_tokens = {tokens} is longer" in said
        assert "set data.sequence_tokens to 256 or less" in said
        assert not (tmp_path / "runs").exists()
