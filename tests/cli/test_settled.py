"""What nobody has set stands in nobody's way, and is not complained of as if somebody had."""

import pytest

from superstep.cli.arguments import prove, train
from superstep.errors import ConfigError
from superstep.plan.config_io import write_config
from superstep.plan.resolution.resolve import resolve

# Flags without a file, and what becomes of the demo's dp = 2, zero = 2 and microbatch = 4.
DEMOS = {
    "": (2, 2, 4),
    "--train.steps 7": (2, 2, 4),
    "--train.batch-sequences 4": (2, 2, 2),
    "--train.batch-sequences 12": (2, 2, 6),
    "--train.batch-sequences 3": (1, 2, 3),
    "--plan.dp 1": (1, 2, 4),
    "--plan.dp 8": (8, 2, 2),
    "--plan.pp 2": (2, 2, 4),
    "--plan.pp 2 --plan.schedule interleaved --plan.chunks 2": (2, 2, 4),
    "--plan.zero 3": (2, 3, 4),
    "--plan.microbatch 2": (2, 2, 2),
}


@pytest.mark.parametrize("flags", DEMOS)
def test_a_demo_with_flags_keeps_what_goes_with_them(flags, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for read in (train.read, lambda argv: train.TrainArgs(*prove.read(argv), is_demo=True)):
        plan = read(flags.split()).resolved(resolve).plan
        assert (plan.mesh.dp, plan.zero, plan.microbatch) == DEMOS[flags]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 16])
def test_torchruns_ranks_are_all_taken(ranks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = train.read(["--train.batch-sequences", "48"])
    plan = asked.resolved(lambda config: resolve(config, ranks)).plan
    assert plan.mesh.world == ranks
    assert plan.zero == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--plan.microbatch 3", "plan.microbatch = 3 does not divide"),
        ("--plan.tp 3", "plan.tp = 3"),
        ("--plan.dp 3", "train.batch_sequences = 16 (the default) does not split over plan.dp = 3; set plan.dp to one"),
        ("--plan.dp 3 --train.batch-sequences 17", "train.batch_sequences = 17 does not split over plan.dp = 3"),
        ("--plan.cp 3", "data.sequence_tokens = 256 (the default) must be a multiple of 6"),
        ("--plan.replicas 2 --plan.zero 0", "plan.replicas = 2"),
    ],
)
def test_a_complaint_is_of_what_was_set(flags, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        train.read(flags.split()).resolved(resolve)
    assert message in str(caught.value)
    for name, value in (("plan.microbatch", 4), ("plan.zero", 2), ("plan.dp", 2)):
        assert f"{name} = {value}" not in str(caught.value)


def test_a_run_that_goes_on_may_change_its_layout(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/demo").mkdir(parents=True)
    first = train.read(["--plan.pp", "2", "--plan.dp", "1"]).resolved(resolve).config
    assert (first.plan.schedule, first.plan.microbatch) == ("1f1b", 4)
    (tmp_path / "runs/demo/run.toml").write_text(write_config(first))
    resume = ["--state.existing", "resume"]
    plan = train.read([*resume, "--plan.chunks", "2"]).resolved(resolve).plan
    assert (plan.mesh.pp, plan.schedule, plan.microbatch) == (2, "interleaved", 4)
    plan = train.read([*resume, "--train.batch-sequences", "10"]).resolved(resolve).plan
    assert (plan.mesh.pp, plan.schedule, plan.microbatch) == (2, "1f1b", 1)
    # What a file says the user has written.
    with pytest.raises(ConfigError, match=r"plan\.microbatch = 4 does not divide"):
        train.read(["runs/demo/run.toml", "--train.batch-sequences", "10"]).resolved(resolve)
