"""A command line becomes a run, or one line that says what is wrong with it."""

import math

import pytest

from superstep.cli.flags.options import DEMO, Bounds, read_flags
from superstep.cli.main import main
from superstep.errors import ConfigError
from superstep.plan.config import RunConfig


def read(*argv):
    return read_flags(RunConfig(), argv, prog="superstep train [run.toml]", description="")


@pytest.mark.parametrize(
    ("argv", "section", "field", "value"),
    [
        (["--plan.tp", "2"], "plan", "tp", 2),
        (["--plan.tp=2"], "plan", "tp", 2),
        (["--plan.microbatch-group", "4"], "plan", "microbatch_group", 4),
        (["--plan.microbatch_group", "4"], "plan", "microbatch_group", 4),
        (["--plan.dp", "None"], "plan", "dp", None),
        (["--plan.schedule", "None"], "plan", "schedule", None),
        (["--plan.schedule", "gpipe"], "plan", "schedule", "gpipe"),
        (["--data.packed", "False"], "data", "packed", False),
        (["--data.packed", "true"], "data", "packed", True),
        (["--data.corpus", "a.txt", "b c.txt"], "data", "corpus", ("a.txt", "b c.txt")),
        (["--data.corpus"], "data", "corpus", ()),
        (["--plan.stages", "1", "3"], "plan", "stages", (1, 3)),
        (["--plan.stages", "[1,3]"], "plan", "stages", (1, 3)),
        (["--plan.stages", "[1,", "3]"], "plan", "stages", (1, 3)),
        (["--data.corpus=['a.txt', \"b.txt\"]"], "data", "corpus", ("a.txt", "b.txt")),
        (["--data.cache", "x=y"], "data", "cache", "x=y"),
        (["--train.lr", "-1"], "train", "lr", -1.0),
        (["--train.lr", "1e-4", "--train.lr", "2e-4"], "train", "lr", 2e-4),
        (["--train.steps", "7"], "train", "steps", 7),
    ],
)
def test_a_flag_sets_its_field(argv, section, field, value):
    config = read(*argv)
    assert getattr(getattr(config, section), field) == value
    assert type(getattr(getattr(config, section), field)) is type(value)


def test_an_entry_of_an_absent_table_is_its_first():
    config = read("--phases.lr.judge", "4e-4", "--phases.lr.draw=1e-3", "--phases.beta1.judge", "0.5")
    assert config.phases.lr == (("draw", 1e-3), ("judge", 4e-4))
    assert config.phases.beta1 == (("judge", 0.5),)


def test_what_no_flag_names_stays():
    assert read_flags(DEMO, [], prog="superstep train", description="") == DEMO
    longer = read_flags(DEMO, ["--train.steps", "7"], prog="superstep train", description="")
    assert longer.plan == DEMO.plan


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--plan.tp", "x"], "--plan.tp = 'x' is not valid; it must be a whole number."),
        (["--plan.dp", "1.5"], "--plan.dp = '1.5' is not valid; it must be a whole number."),
        (["--plan.dp="], "--plan.dp = '' is not valid; it must be a whole number."),
        (["--plan.tp"], "--plan.tp has no value; it must be a whole number."),
        (["--plan.tp", "--plan.pp", "2"], "--plan.tp has no value; it must be a whole number."),
        (["--train.lr", "much"], "--train.lr = 'much' is not valid; it must be a number."),
        (["--data.packed", "maybe"], "--data.packed = 'maybe' is not valid; it must be true or false."),
        (["--plan.recompute", "some"], "must be one of 'none', 'selective', 'full', 'auto'."),
        (["--lr", "3"], "unknown flag --lr; did you mean '--train.lr'?"),
        (["--train.step", "3"], "unknown flag --train.step; did you mean '--train.steps'?"),
        (["--zzz"], "unknown flag --zzz; superstep train --help lists them."),
        (["run.toml"], "'run.toml' belongs to no flag"),
        (["--plan.dp", "2", "run.toml"], "'run.toml' belongs to no flag"),
    ],
)
def test_a_wrong_flag_is_refused_with_the_mend(argv, message):
    with pytest.raises(ConfigError) as error:
        read(*argv)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("argv", "status", "message"),
    [
        ([], 2, ""),
        (["trian"], 2, "unknown verb 'trian'; did you mean 'train'?"),
        (["train", "nofile.toml"], 2, "nofile.toml cannot be read"),
        (["train", "a.txt"], 2, "'a.txt' is not a .toml file; name a run.toml, or train on the text of a file"),
        (["prove", "a.txt"], 2, "'a.txt' is not a .toml file"),
        (["view", "a.txt"], 2, "'a.txt' is not a .toml file"),
        (["train", "."], 2, ". cannot be read"),
        (["train", "--tp", "2"], 2, "did you mean '--plan.tp'?"),
        (["train", "--plan.tp", "3"], 2, "plan.tp"),
        (["train", "--plan.dp", "3"], 2, "set plan.dp to one of"),
        (["train", "--train.lr", "-1"], 2, "train.lr = -1.0 must be above 0."),
        (["prove", "nofile.toml"], 2, "nofile.toml cannot be read"),
        (["prove", "--steps", "0"], 2, "--steps = 0 must be at least 1."),
        (["prove", "--steps=x"], 2, "--steps = 'x' is not valid"),
        (["prove", "--all", "--world", "0"], 2, "--world = 0 must be at least 1."),
        (
            ["prove", "--world", "2"],
            2,
            "--world has an effect only with --all, the sweep of layouts; add --all, or leave --world out.",
        ),
        (
            ["prove", "--serve-tp", "2"],
            2,
            "--serve-tp has an effect only with --serve, the proof of a server; add --serve, or leave",
        ),
        (["prove", "--serve-logprobs", "9"], 2, "--serve-logprobs has an effect only with --serve"),
        (["prove", "--wrld", "2"], 2, "did you mean '--world'?"),
        (["view", "--width", "broad"], 2, "--width = 'broad' is not valid; it must be a whole number."),
        (["view", "--width", "-5"], 2, "--width = -5 must be at least 1."),
        (["view", "--width", "0"], 2, "--width = 0 must be at least 1."),
        (["sample"], 2, "a run and a prompt are needed"),
        (["sample", "runs/none"], 2, "'runs/none' does not exist; name the folder of a run, then a prompt"),
        (["sample", "."], 2, "a run and a prompt are needed"),
        (["sample", "runs/none", "def"], 2, "'runs/none' does not exist; name the folder of a run"),
        (["sample", ".", "def"], 2, "'.' is not a run directory"),
        (["sample", "runs/none", "def", "--temperature", "-1"], 2, "--temperature = -1.0 must be at least 0."),
        (["sample", "runs/none", "def", "--temperature", "nan"], 2, "--temperature = nan must be at least 0."),
        (["sample", "runs/none", "def", "--tokens", "0"], 2, "--tokens = 0 must be at least 1."),
        (["sample", "runs/none", ""], 2, "the prompt is empty"),
    ],
    ids=str,
)
def test_a_wrong_command_line_ends_with_one_line(argv, status, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if "a.txt" in argv:
        (tmp_path / "a.txt").touch()
    before = list(tmp_path.iterdir())
    assert main(argv) == status
    said = capsys.readouterr()
    assert message in said.err
    assert said.err.count("\n") == bool(message)
    assert said.err.startswith("superstep: " if message else "")
    assert ("usage" in said.out) is not bool(message)
    assert list(tmp_path.iterdir()) == before, "nothing is made for a command that cannot run"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[trian]\nsteps = 3", "unknown key 'trian'; did you mean 'train'?"),
        ("[train]\nstep = 3", "unknown key 'train.step'; did you mean 'steps'?"),
        ("[train]\nsteps = '3'", "train.steps = '3' is not valid; it must be a whole number."),
        ("train = 3", "train = 3 must be a table: write [train]."),
        ("[train\nsteps = 3", "is not TOML"),
        ("[train]\nlr = nan", "train.lr = nan must be"),
    ],
)
def test_a_wrong_file_ends_with_one_line(text, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(text, encoding="utf-8")
    assert main(["train", "run.toml"]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


@pytest.mark.parametrize("verb", ["train", "prove", "sample", "view"])
def test_help_names_every_flag_and_ends_well(verb, capsys):
    with pytest.raises(SystemExit) as end:
        main([verb, "--help"])
    assert not end.value.code
    said = capsys.readouterr()
    assert f"superstep {verb}" in said.out
    assert not said.err
    own = {"train": "--train.lr", "prove": "--world", "sample": "--temperature", "view": "--width"}
    assert own[verb] in said.out


@pytest.mark.parametrize(
    ("bounds", "told", "has", "lacks"),
    [
        (Bounds(least=1), "at least 1", (1, 1e9), (0, math.nan)),
        (Bounds(least=0, most=65535), "from 0 to 65535", (0, 65535), (-1, 65536)),
        (Bounds(above=0), "above 0", (0.1, math.inf), (0, math.nan)),
        (Bounds(above=0, most=1), "above 0 and at most 1", (0.1, 1), (0, 1.1)),
        (Bounds(above=0, is_finite=True), "above 0 and finite", (0.1, 1e300), (0, math.inf, math.nan)),
    ],
)
def test_bounds_hold_what_they_say(bounds, told, has, lacks):
    assert str(bounds) == told
    assert all(bounds.has(value) for value in has)
    assert not any(bounds.has(value) for value in lacks)


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["chat", "none", "--top-p", "0"], "--top-p = 0.0 must be above 0 and at most 1."),
        (["chat", "none", "--plan.tp", "0"], "plan.tp = 0 must be at least 1."),
        (["tune", "serve", "none", "--most-rank", "0"], "--most-rank = 0 must be at least 1."),
        (["tune", "serve", "none", "--alpha", "inf"], "--alpha = inf must be above 0 and finite."),
        (["grade", "check", "none", "--tasks", "1001"], "--tasks = 1001 must be from 1 to 1000."),
        (["plan", "demo", "--serve", "--memory", "inf"], "--memory = inf must be above 0 and finite."),
    ],
)
def test_a_number_outside_of_its_bounds_is_refused_with_them(argv, told, capsys):
    assert main(argv) == 2
    assert told in capsys.readouterr().err
