"""`superstep train` on one rank: what a run leaves, how it goes on, and what stays untouched where it cannot."""

import errno
import json
import math
import os
import re
import resource
import shutil
from contextlib import contextmanager
from unittest import mock

import pytest

import runs
from superstep.cli.main import main
from superstep.data.token_stream import TokenStream
from superstep.engine.executor import Executor
from superstep.errors import Fault
from superstep.observe.trace import load_trace
from superstep.plan.config_io import read_config, write_config
from superstep.plan.resolution.resolve import resolve
from superstep.program.compile import compile_step
from superstep.program.text import read_program
from superstep.run.reports import sinks
from superstep.state.checkpoint import read_position
from superstep.state.checkpoint_dirs import checkpoints
from superstep.train import save_schedule
from superstep.train.run_folder.run_paths import write_whole

LEARNING = ["--train.steps", "60", "--train.lr", "1e-2", "--state.save-every", "25"]


def _train(*flags):
    return main(["train", "run.toml", *flags])


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """A folder with a run of 60 steps, to be looked at only."""
    folder = tmp_path_factory.mktemp("learned")
    runs.make_files(folder)
    with contextmanager(_inside)(folder):
        assert _train(*LEARNING) == 0
    return folder


def _inside(folder):
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield folder
    finally:
        os.chdir(before)


def test_chosen_steps_are_profiled_below_their_instructions(place, capsys):
    assert _train("--train.steps", "3", "--profile", "2", "--state.save-every", "3") == 0
    assert "ui.perfetto.dev" in capsys.readouterr().out
    (trace,) = (place / "run" / "profiles").iterdir()
    assert trace.name == "step-000002-rank-0.json"
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e.get("ph") == "X"]
    instructions = (place / "run" / "program.txt").read_text().splitlines()
    ranges = {e["name"]: e for e in events if e.get("cat") == "user_annotation"}
    forward = ranges["forward u1 m0 keep=all"]
    assert any(forward["name"] in line for line in instructions)
    within = [e for e in events if forward["ts"] <= e["ts"] <= forward["ts"] + forward["dur"]]
    assert any(e["name"].startswith(("aten::", "superstep::")) for e in within)
    assert any(name.startswith("step") for name in ranges)


@pytest.mark.parametrize(
    ("flags", "told"), [(["4"], "steps from 1 to train.steps = 3"), (["0"], "not a step"), (["x"], "'x'")]
)
def test_a_step_that_is_none_is_not_profiled(place, capsys, flags, told):
    assert _train("--train.steps", "3", "--profile", *flags) == 2
    said = capsys.readouterr().err
    assert "observe.profile" in said
    assert told in said
    assert not (place / "run").exists()


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder to work in, with run.toml and its text."""
    runs.make_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def trained(place, learned):
    """The same, with a copy of the run of 60 steps."""
    shutil.copytree(learned / "run", place / "run")
    return place / "run"


def _error(capsys):
    """The one line on stderr."""
    said = capsys.readouterr().err
    assert said.count("\n") == 1, said
    assert said.startswith("superstep: "), said
    return said


# What a run leaves.


def test_every_step_has_its_figures(learned):
    steps = runs.events(learned / "run", "step")
    assert [line["step"] for line in steps] == list(range(1, 61))
    for line in steps:
        assert {"loss", "lr", "grad_norm", "tokens_per_s", "step_s", "data_s", "mfu"} <= line.keys()
        assert all(math.isfinite(value) for key, value in line.items() if key not in ("event", "counts"))
        assert line["counts"] == "tokens"
        assert line["tokens"] == 4 * 32
        assert line["tokens_per_s"] == pytest.approx(line["tokens"] / line["step_s"])
        assert 0 <= line["data_s"] <= line["step_s"]
        assert 0 < line["mfu"] < 1
    assert steps[-1]["tokens_seen"] == 60 * 4 * 32


def test_the_model_learns_the_text(learned):
    started = runs.events(learned / "run", "started")[0]
    losses = [line["loss"] for line in runs.events(learned / "run", "evaluated")]
    assert losses[0] > losses[-1]
    assert losses[-1] < 0.3 * started["unigram_entropy"]


def test_the_files_of_a_run_read_back(learned):
    run = learned / "run"
    config = read_config(run / "run.toml")
    assert write_config(config) == (run / "run.toml").read_text(encoding="utf-8")
    asked = read_config(learned / "run.toml")
    assert config.model == asked.model
    assert config.train.steps == 60
    plan = resolve(config).plan
    assert config == resolve(config).config, "every automatic field is filled in"
    program = read_program((run / "program.txt").read_text(encoding="utf-8"))
    assert program == compile_step(plan)
    trace = load_trace(run / "trace.json", program)
    assert trace.step == 60
    assert trace.timeline.step_s > 0
    assert [path.name for path in checkpoints(run / "checkpoints")] == ["step-000050", "step-000060"]
    assert not list(run.rglob("*.partial"))


def test_tensorboard_has_the_same_losses(learned):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = accumulator.EventAccumulator(str(learned / "run" / "tensorboard")).Reload()
    points = [(point.step, point.value) for point in found.Scalars("train/loss")]
    assert points == [(line["step"], pytest.approx(line["loss"])) for line in runs.events(learned / "run", "step")]


def test_a_run_is_drawn_and_continued_as_text(learned, capsys):
    assert main(["view", str(learned / "run"), "--width", "80"]) == 0
    assert "step 60 of" in capsys.readouterr().out
    assert main(["sample", str(learned / "run"), "the quick brown", "--tokens", "12", "--temperature", "0"]) == 0
    assert "the quick brown fox number" in capsys.readouterr().out
    assert main(["sample", str(learned / "run"), "the quick brown", "--tokens", "1000", "--temperature", "0"]) == 0
    said = capsys.readouterr()
    assert re.fullmatch(r"--tokens = 1000 is more than the context .* at most \d+\.\n", said.err)
    assert said.out.startswith("the quick brown fox number")


# Going on.


def test_a_resumed_run_is_the_run_that_never_stopped(place):
    batches = []
    inner = TokenStream.batch

    def batch(self, sample, rows):
        if self._is_shuffled:
            batches.append(sample)
        return inner(self, sample, rows)

    # The rate of a step depends on the steps of the whole run, unless it is held.
    steady = ["--train.min-lr-ratio", "1"]
    assert _train("--state.dir", "whole", *steady) == 0
    with mock.patch.object(TokenStream, "batch", batch):
        assert _train("--state.dir", "parts", *steady, "--train.steps", "3") == 0
        assert _train("--state.dir", "parts", *steady, "--state.existing", "resume") == 0
    assert batches == [0, 4, 8, 12, 16, 20], "every sample once, in order"
    whole, parts = (runs.events(place / name, "step") for name in ("whole", "parts"))
    kept = ("step", "loss", "grad_norm", "lr", "tokens", "tokens_seen")
    assert [[line[key] for key in kept] for line in parts] == [[line[key] for key in kept] for line in whole]
    last = [checkpoints(place / name / "checkpoints")[-1] for name in ("whole", "parts")]
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (last[0] / name).read_bytes() == (last[1] / name).read_bytes()
    assert read_position(last[0]) == read_position(last[1])


def test_a_run_that_died_before_its_first_checkpoint_begins_again(place, capsys):
    inner = Executor.run

    def dying(self, context):
        result = inner(self, context)
        if len(runs.events(place / "run", "step")) == 2:
            raise RuntimeError("planted")
        return result

    with mock.patch.object(Executor, "run", dying):
        assert _train() == 1
    assert not checkpoints(place / "run" / "checkpoints")
    assert _train() == 2, "it is a run, and is not overwritten"
    assert _train("--state.existing", "resume") == 0
    assert "started again" in capsys.readouterr().out
    assert [line["step"] for line in runs.events(place / "run", "step")] == [1, 2, 3, 4, 5, 6]


def test_a_complete_run_is_left_as_it_is(trained, capsys):
    before = runs.files(trained)
    assert _train(*LEARNING, "--state.existing", "resume") == 0
    assert "complete at step 60; raise --train.steps" in capsys.readouterr().out
    assert runs.files(trained) == before


def test_new_begins_beside(trained, capsys):
    before = runs.files(trained)
    assert _train("--state.existing", "new") == 0
    assert runs.files(trained) == before
    assert len(runs.events(trained.with_name("run-2"), "step")) == 6
    assert read_config(trained.with_name("run-2") / "run.toml").state.dir == "run-2"


def test_a_run_goes_on_without_its_text(trained, place):
    (place / "good.txt").unlink()
    assert _train(*LEARNING, "--state.existing", "resume", "--train.steps", "61") == 0
    assert read_position(checkpoints(trained / "checkpoints")[-1]).samples == 61 * 4


def test_what_a_crash_left_of_a_checkpoint_is_in_nobodys_way(trained):
    # A checkpoint is deleted manifest first: a crash can leave the rest, and the run can come by that step again.
    (trained / "checkpoints/step-000060/manifest.json").unlink()
    assert _train(*LEARNING, "--state.existing", "resume") == 0
    assert [line["step"] for line in runs.events(trained, "step")] == list(range(1, 61))
    assert read_position(trained / "checkpoints/step-000060").step == 60


def test_a_proof_leaves_a_runs_tokens_alone(trained, place):
    before = runs.files(trained)
    (place / "other.txt").write_text("another text altogether, of other words. " * 500, encoding="utf-8")
    proof = ["prove", "run.toml", "--train.batch-sequences", "1", "--steps", "1"]
    assert main([*proof, "--data.corpus", "other.txt"]) == 0
    assert main(proof) == 0
    assert runs.files(trained) == before


# What cannot be done is refused, and nothing is touched.


def _other_text(run):
    (run.parent / "good.txt").write_text("another text altogether, of other words. " * 500, encoding="utf-8")
    shutil.rmtree(run / "data")


REFUSALS = {
    "a run": ([], lambda run: None, "already holds a run. Resume it with --state.existing resume"),
    "another model": (["resume", "--model.layers", "3"], lambda run: None, "model.layers = 3, and the run in"),
    "other data": (["resume", "--data.sequence-tokens", "16"], lambda run: None, "data.sequence_tokens = 16, and"),
    "another seed": (["resume", "--train.seed", "1"], lambda run: None, "train.seed = 1, and the run in"),
    "a plan that does not fit": (["resume", "--plan.dp", "3"], lambda run: None, "set plan.dp to one of [1, 2, 4]"),
    "an older checkpoint": (
        ["resume", "--train.steps", "70"],
        lambda run: (run / "checkpoints/step-000060/manifest.json").write_text('{"format": 1}'),
        "step-000060 is a checkpoint of the older format 1",
    ),
    "a damaged run.toml": (
        ["resume", "--train.steps", "70"],
        lambda run: (run / "run.toml").write_text("[model"),
        "run.toml is not TOML",
    ),
    "other tokens": (["resume", "--train.steps", "70"], _other_text, "are not those that"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_run_that_cannot_go_on_is_refused_untouched(name, trained, capsys):
    flags, damage, message = REFUSALS[name]
    damage(trained)
    before = {path: data for path, data in runs.files(trained).items() if not path.startswith("data/")}
    existing = ["--state.existing", *flags] if flags else []
    assert _train(*LEARNING, *existing) == 2
    assert message in _error(capsys)
    after = {path: data for path, data in runs.files(trained).items() if not path.startswith("data/")}
    assert after == before


def _taken(place):
    (place / "there").write_text("a file")
    return "there"


def _foreign(place):
    (place / "there").mkdir()
    (place / "there" / "thesis.txt").write_text("mine")
    return "there"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_taken, "is a file; name a folder"),
        (lambda place: _taken(place) + "/run", "cannot be created: Not a directory"),
        (_foreign, "holds files but no run"),
        (lambda place: "", "is not a path"),
        (lambda place: "/proc/run", "cannot be created"),
    ],
    ids=["a file", "below a file", "foreign files", "empty", "unwritable"],
)
@pytest.mark.parametrize("existing", ["refuse", "resume", "new"])
def test_a_place_that_cannot_hold_a_run_is_refused(make, message, existing, place, capsys):
    there = make(place)
    before = runs.files(place)
    assert _train("--state.dir", there, "--state.existing", existing) == 2
    assert message in _error(capsys)
    assert runs.files(place) == before


CORPORA = {
    "missing": ("bad.txt", lambda path: None, "does not exist"),
    "empty": ("bad.txt", lambda path: path.write_bytes(b""), "holds no text"),
    "not UTF-8": ("bad.txt", lambda path: path.write_bytes(b"hello \xff\xfe" * 100), "is not UTF-8 at byte 6"),
    "too short": ("bad.txt", lambda path: path.write_text("a few words"), "lower data.sequence_tokens"),
    "binary": ("bad.txt", lambda path: path.write_bytes(b"abc\0def" * 100), "is binary"),
    "an empty folder": ("bad", lambda path: path.mkdir(), "holds no text"),
    "broken JSONL": ("bad.jsonl", lambda path: path.write_text('{"text": '), "'bad.jsonl:1' is not JSON"),
    "a pipe": ("bad", os.mkfifo, "is neither a file nor a folder"),
}


@pytest.mark.parametrize("name", CORPORA)
def test_a_bad_corpus_leaves_nothing_behind(name, place, capsys):
    corpus, make, message = CORPORA[name]
    make(place / corpus)
    before = runs.files(place), sorted(place.iterdir())
    assert _train("--data.corpus", corpus, "--state.dir", "deep/er/run") == 2
    assert message in _error(capsys)
    assert (runs.files(place), sorted(place.iterdir())) == before
    assert _train("--state.dir", "deep/er/run") == 0, "the next start is not blocked"


# What breaks on the way is one fault, and what was whole stays whole.


@contextmanager
def _files_of_at_most(size):
    """No file may grow beyond ``size`` bytes: a full disk, as far as a writer can tell."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_fills_at_a_checkpoint_costs_nothing_older(trained, monkeypatch, capsys):
    before = runs.files(trained / "checkpoints")
    monkeypatch.setattr(save_schedule, "PAUSES_S", (0.0,))
    with _files_of_at_most(100_000):
        assert _train(*LEARNING, "--state.existing", "resume", "--train.steps", "70") == 1
    assert "fault: rank 0: the checkpoint cannot be written" in _error(capsys)
    assert [line["step"] for line in runs.events(trained, "warning")] == [70]
    assert runs.files(trained / "checkpoints") == before
    assert _train(*LEARNING, "--state.existing", "resume", "--train.steps", "70") == 0
    assert [line["step"] for line in runs.events(trained, "step")] == list(range(1, 71))


def test_a_disk_that_fills_under_the_metrics_is_one_fault(trained, monkeypatch, capsys):
    monkeypatch.setattr(sinks, "WAITING_BYTES", 2000)
    with _files_of_at_most((trained / "metrics.jsonl").stat().st_size + 1200):
        assert _train(*LEARNING, "--state.existing", "resume", "--train.steps", "70") == 1
    first, last = capsys.readouterr().err.splitlines()
    assert first.endswith(
        "metrics.jsonl cannot be written: File too large; make room on its disk. Its lines wait in memory."
    )
    assert "fault: step 6" in last
    assert "metrics.jsonl cannot be written" in last
    assert _train(*LEARNING, "--state.existing", "resume", "--train.steps", "62") == 0
    assert [line["step"] for line in runs.events(trained, "step")] == list(range(1, 63))


def test_a_disk_that_fails_for_a_while_costs_no_step(place, monkeypatch, capsys):
    """Two saves fail; the run trains on, saves again as soon as it may, and ends as if nothing had been."""
    inner, left = os.posix_fallocate, [2]

    def full(handle, offset, length):
        if left[0]:
            left[0] -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        inner(handle, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(save_schedule, "AGAIN_S", 0.0)
    assert _train("--train.steps", "12", "--state.save-every", "6") == 0
    first, second = runs.events(place / "run", "warning")
    assert (first["step"], second["step"]) == (6, 7)
    assert "step-000006.partial cannot be written: No space left on device; make room" in first["text"]
    assert first["text"].endswith("Training continues and saves again after step 7.")
    assert f"warning: {first['text']}" in capsys.readouterr().out
    assert [line["step"] for line in runs.events(place / "run", "saved")] == [8, 12]
    assert [line["step"] for line in runs.events(place / "run", "step")] == list(range(1, 13))


def test_a_disk_that_never_takes_a_checkpoint_ends_the_run_where_it_is_too_old(place, monkeypatch, capsys):
    broken = mock.Mock(side_effect=OSError(errno.EIO, "Input/output error"))
    monkeypatch.setattr(os, "posix_fallocate", broken)
    monkeypatch.setattr(save_schedule, "AGAIN_S", 1e9)
    monkeypatch.setattr(save_schedule, "PAUSES_S", (0.0,))
    assert _train("--train.steps", "12", "--state.save-every", "2", "--state.save-patience", "3") == 1
    assert "Input/output error; check the disk that it is on." in _error(capsys).splitlines()[-1]
    assert [line["step"] for line in runs.events(place / "run", "warning")] == [2, 4, 6]
    assert [line["step"] for line in runs.events(place / "run", "step")] == list(range(1, 7))
    assert not checkpoints(place / "run" / "checkpoints")


def test_a_fault_names_rank_step_and_instruction(place, capsys):
    inner = Executor._issue
    seen = []

    def issue(self, instruction):
        seen.append(str(instruction))
        if sum("Step" in text for text in seen) == 3 and "Backward" in seen[-1]:
            raise RuntimeError("planted\nwith more lines")
        return inner(self, instruction)

    with mock.patch.object(Executor, "_issue", issue):
        assert _train() == 1
    message = _error(capsys)
    assert "fault: rank 0, step 4, instruction backward u3 m0: planted. superstep doctor run shows" in message
    assert message.count("\n") == 1
    assert [read_position(path).step for path in checkpoints(place / "run" / "checkpoints")] == [3]


def test_a_run_that_diverges_stops_before_it_is_saved(place, capsys):
    assert _train("--train.lr", "1e30", "--state.save-every", "1") == 1
    message = _error(capsys)
    assert "training has diverged" in message
    saved = [read_position(path).step for path in checkpoints(place / "run" / "checkpoints")]
    assert saved == [line["step"] for line in runs.events(place / "run", "saved")][-2:]
    assert f"step {saved[-1] + 1}: loss" in message


def test_interrupted_says_so(place, capsys):
    with mock.patch.object(Executor, "run", side_effect=KeyboardInterrupt):
        assert _train() == 130
    told = "interrupted. The run has no checkpoint yet; start it again with: superstep train --state.dir run"
    assert _error(capsys) == f"superstep: {told} --state.existing resume\n"


def test_a_closed_output_is_one_fault(place, capsys):
    with mock.patch("superstep.cli.train.display.print", side_effect=BrokenPipeError, create=True):
        assert _train() == 1
    assert "standard output cannot be written: the program that reads it has ended" in _error(capsys)


def test_a_file_of_the_run_is_never_half_written(tmp_path):
    path = tmp_path / "trace.json"
    write_whole(path, "whole")
    with _files_of_at_most(3), pytest.raises(Fault, match=r"trace\.json cannot be written"):
        write_whole(path, "longer than the disk")
    assert runs.files(tmp_path) == {"trace.json": b"whole"}
