"""A step that is not as steps are is not taken; the run computes what one does that is told to leave its data out."""

import json
import math
import random
import re
from pathlib import Path

import pytest

import runs
from superstep.cli.main import main
from superstep.engine.optimizer import Optimizer
from superstep.state.checkpoint_dirs import checkpoints
from superstep.state.verify import verify

FLAGS = [
    "train",
    "run.toml",
    "--train.lr",
    "1e-2",
    "--train.seed",
    "8",
    "--train.eval-every",
    "90",
    "--state.keep",
    "99",
]
RULES = ["--rollback.window-steps", "10", "--rollback.back-steps", "0", "--rollback.skip-batches", "1"]
SPIKE = 31
"""The step whose batch has what was never seen."""


@pytest.fixture(autouse=True)
def corpus(tmp_path, monkeypatch):
    """A text that is learnt in thirty steps, and in it a line like no other."""
    runs.make_files(tmp_path)
    draw = random.Random(1)
    lines = runs.text(2000).splitlines(keepends=True)
    lines[300:300] = ["".join(draw.choice("qzxjkvwyQZXJ#@%&*()[]{}<>?/|~^0123456789") for _ in range(100)) + "\n"]
    (tmp_path / "good.txt").write_text("".join(lines), encoding="utf-8")
    monkeypatch.chdir(tmp_path)


def _train(name, *flags, steps=48, status=0, save_every="90"):
    found = main([*FLAGS, "--train.steps", str(steps), "--state.save-every", save_every, "--state.dir", name, *flags])
    assert found == status
    return Path(name)


def _told_to_skip(run, *flags, steps=48):
    """A run that is told from its start what another has left out."""
    skips = [line["skip"] for line in runs.events(run, "rolled_back")]
    assert all(skips)
    told = Path("told.toml")
    told.write_text(Path("run.toml").read_text().replace("warmup_steps", f"skip = {json.dumps(skips)}\nwarmup_steps"))
    flags = [*FLAGS[2:], *flags, "--train.steps", str(steps), "--state.save-every", "90", "--state.dir", f"{run}-told"]
    assert main(["train", "told.toml", *flags]) == 0
    return Path(f"{run}-told")


def _course(run):
    return [(line["step"], line["loss"], line["grad_norm"]) for line in runs.events(run, "step")]


def _tensors(run):
    newest = checkpoints(run / "checkpoints")[-1]
    verify(newest)
    found = json.loads((newest / "manifest.json").read_text())
    return found["tensors"], found["position"]


def _same(run, other):
    assert _course(run) == _course(other)
    assert _tensors(run) == _tensors(other)


def test_a_spike_is_left_out_and_the_run_is_one_that_was_told_to(capsys):
    run = _train("spiked", *RULES)
    first, *_ = runs.events(run, "rolled_back")
    assert (first["refused"], first["step"], first["skip"]) == (SPIKE, SPIKE - 1, f"{SPIKE - 1}:1")
    assert first["loss"] > 1.9 > 1 > max(line["loss"] for line in runs.events(run, "step") if 24 < line["step"] < SPIKE)
    assert "standard deviations above" in first["why"]
    assert [line["step"] for line in runs.events(run, "step")] == list(range(1, 49))
    _same(run, _told_to_skip(run))
    said = capsys.readouterr().out
    assert f"step {SPIKE} was refused: its loss of" in said
    assert f"rolled back to after step {SPIKE - 1}; 1 batches are skipped" in said
    # Without the table the step is taken, as every other.
    assert runs.events(_train("taken"), "step")[SPIKE - 1]["loss"] == first["loss"]


def test_it_goes_back_to_an_older_checkpoint_and_what_came_after_is_moved_aside():
    back = ["--rollback.back-steps", "5", "--rollback.skip-batches", "9"]
    run = _train("far", *RULES, *back, save_every="4")
    (event,) = runs.events(run, "rolled_back")
    assert (event["refused"], event["step"], event["skip"]) == (SPIKE, 24, "25:9")
    assert event["source"].endswith("step-000024")
    assert (run / "checkpoints" / "step-000028.rolled-back").is_dir(), "a state of the steps that went wrong"
    assert [line["step"] for line in runs.events(run, "saved")] == list(range(4, 49, 4))
    _same(run, _told_to_skip(run))


def test_the_same_data_again_and_again_ends_the_run_with_nothing_saved_of_it(capsys):
    replay = ["--rollback.skip-batches", "0", "--rollback.repeats", "2"]
    run = _train("again", *RULES, *replay, status=1, save_every="3")
    assert [line["skip"] for line in runs.events(run, "rolled_back")] == ["", ""]
    assert "the run has rolled back 2 times without progress" in capsys.readouterr().err
    assert [line["step"] for line in runs.events(run, "step")] == list(range(1, SPIKE))
    assert checkpoints(run / "checkpoints")[-1].name == "step-000030"


def test_a_run_that_was_stopped_still_knows_what_its_steps_were_and_what_it_leaves_out():
    same_rate = ["--train.min-lr-ratio", "1"]  # whatever the last step is
    rules = [*RULES, "--rollback.skip-batches", "3", *same_rate]
    run = _train("parts", *rules, steps=SPIKE - 1)
    _train("parts", *rules, "--state.existing", "resume", steps=SPIKE)
    # Gone on with from before the data was left out, by its last checkpoint but one.
    newest = checkpoints(run / "checkpoints")[-1]
    newest.rename(newest.with_name("elsewhere"))
    _train("parts", *rules, "--state.existing", "resume")
    (event,) = runs.events(run, "rolled_back")
    assert event["refused"] == SPIKE
    _same(run, _told_to_skip(run, *same_rate))


@pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
def test_what_is_no_number_is_never_taken(exact, monkeypatch):
    sums = Optimizer.sums
    calls = []

    def broken(self, told, excess, *rest):
        calls.append(None)
        if len(calls) == 4:  # too early for any rule on spikes
            if exact:
                excess.note("a gradient has a term of nan")
            for unit in self._units[:1]:
                unit.buffers.gradient_shard.fill_(0 if exact else math.nan)
        return sums(self, told, excess, *rest)

    flags = ["--numerics.exact", "true"] if exact else []
    with monkeypatch.context() as planted:
        planted.setattr(Optimizer, "sums", broken)
        run = _train("broken", *RULES, "--rollback.skip-batches", "2", *flags, steps=8)
    (event,) = runs.events(run, "rolled_back")
    assert (event["refused"], event["step"], event["skip"], event["grad_norm"]) == (4, 3, "3:2", None)
    assert re.search("nan", event["why"])
    _same(run, _told_to_skip(run, *flags, steps=8))


@pytest.mark.long
@pytest.mark.multiproc
def test_ranks_go_back_to_their_memory_together():
    exact = ["--numerics.exact", "true", "--plan.microbatch", "2"]
    ranks = ["--plan.dp", "2", "--plan.zero", "1", "--state.snapshot-every", "4"]
    back = ["--rollback.back-steps", "2", "--rollback.skip-batches", "8"]
    run = _train("ranks", *RULES, *exact, *ranks, *back, save_every="29")
    (event,) = runs.events(run, "rolled_back")
    assert (event["refused"], event["step"], event["skip"], event["source"]) == (SPIKE, 28, "28:8", "memory")
    assert [line["step"] for line in runs.events(run, "saved")] == [29, 48]
    assert (run / "checkpoints" / "step-000029.rolled-back").is_dir()
    _same(run, _told_to_skip(run, *exact))


def test_rules_that_cannot_be_kept_are_refused(capsys):
    for flags, said in (
        (["--train.skip", "40"], "train.skip = '40' is not STEP:BATCHES"),
        (["--rollback.loss-sigmas", "0"], "rollback.loss_sigmas = 0.0 must be above 0"),
        (["--rollback.back-steps", "9", "--rollback.skip-batches", "9"], "set rollback.skip_batches to 10 or more"),
        (["--rollback.repeats", "0"], "rollback.repeats = 0 must be at least 1"),
    ):
        assert main(["train", "run.toml", *flags]) == 2
        assert said in capsys.readouterr().err
