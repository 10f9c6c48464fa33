"""What is said while tokens are made."""

import io

import pyarrow
import pytest
from pyarrow import parquet

import runs
from superstep.cli.main import main
from superstep.cli.prepare_progress import LOG_S, REDRAW_S, ProgressLine, prepare_with_progress
from superstep.data.preparation import prepare as module
from superstep.data.preparation.prepare import PrepareProgress
from superstep.errors import Fault
from superstep.plan.config import DataConfig
from superstep.run.exit_messages import how_to_go_on
from superstep.train.run_folder.run_paths import RunFolder


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


READING = [PrepareProgress("reading", done << 20, 100 << 20) for done in range(1, 101)]
TRAINING = PrepareProgress("training a tokenizer", 0, 100 << 20)


def test_a_log_has_a_line_now_and_then_and_one_for_what_takes_long(clock):
    stream = io.StringIO()
    line = ProgressLine(stream, clock)
    for progress in READING:
        clock.now += LOG_S / 40
        line.show(progress)
    line.show(TRAINING)
    line.close()
    assert stream.getvalue() == ("  reading: 40% of 100 MiB\n  reading: 80% of 100 MiB\n  training a tokenizer ...\n")


def test_a_terminal_has_one_line_that_redraws_itself(clock, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    line = ProgressLine(stream, clock)
    for progress in READING:
        clock.now += REDRAW_S / 50
        line.show(progress)
    line.close()
    drawn = ["  reading: 1% of 100 MiB", "  reading: 51% of 100 MiB"]
    assert stream.getvalue() == "".join(f"\r\x1b[K{text}" for text in drawn) + "\r\x1b[K"


def test_a_report_counts_what_was_passed_over(tmp_path):
    text = "the cat sat on the mat.\n" * 40
    parquet.write_table(pyarrow.table({"text": [text, None, text]}), tmp_path / "a.parquet")
    data = DataConfig(corpus=(str(tmp_path / "a.parquet"),), sequence_tokens=8, validation_fraction=0.2)
    stream = io.StringIO()
    manifest = prepare_with_progress(data, 300, tmp_path / "data", stream).manifest
    assert manifest.null_records == 1
    first, *_, last = stream.getvalue().splitlines()
    assert first == f"Preparing the text of {tmp_path}/a.parquet in {tmp_path}/data ..."
    assert last.endswith("1.88 KiB of text; 1 record with null text skipped")


def test_one_long_line_is_told_of_megabyte_by_megabyte(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "BLOCK_CHARS", 1 << 14)
    monkeypatch.setattr(module, "PASSAGE_CHARS", 1 << 14)
    path = tmp_path / "line.txt"
    path.write_text("lorem ipsum dolor " * 110_000)
    told = []
    data = DataConfig(corpus=(str(path),), sequence_tokens=8)
    module.prepare(data, 300, tmp_path / "data", told.append)
    for stage in ("reading", "encoding"):
        seen = [progress.done_bytes for progress in told if progress.stage == stage]
        assert len(seen) > 100
        assert seen == sorted(seen)
        assert seen[-1] == path.stat().st_size == told[0].total_bytes
    assert [progress.stage for progress in told if not progress.done_bytes] == ["training a tokenizer"]


def test_output_that_nobody_reads_is_one_fault_and_leaves_nothing(tmp_path, monkeypatch):
    class Closed(io.StringIO):
        def write(self, text):
            if text.startswith("Preparing"):
                return 0
            raise BrokenPipeError

    path = tmp_path / "a.txt"
    path.write_text("the cat sat on the mat.\n" * 40)
    data = DataConfig(corpus=(str(path),), sequence_tokens=8, validation_fraction=0.2)
    with pytest.raises(Fault, match=r"^standard output cannot be written: the program that reads it has ended\."):
        prepare_with_progress(data, 300, tmp_path / "data", Closed())
    assert not (tmp_path / "data").exists()


def test_a_new_run_leaves_the_tokens_that_another_named(tmp_path, monkeypatch, capsys):
    config = runs.make_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    module.prepare(config.data, 300, tmp_path / "tokens")
    before = runs.files(tmp_path)
    assert main(["train", "run.toml", "--data.cache", "tokens", "--model.vocab", "290"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("superstep: data.cache = 'tokens' holds the tokens of other settings (model.vocab = 300")
    assert said.err.count("\n") == 1
    assert runs.files(tmp_path) == before


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [(KeyboardInterrupt(), 130, "interrupted"), (SystemExit(143), 143, "ended by SIGTERM")],
    ids=["Ctrl-C", "SIGTERM"],
)
def test_a_preparation_that_is_ended_says_so(error, status, said, tmp_path, monkeypatch, capsys):
    def build(*_):
        raise error

    runs.make_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module._Preparation, "build", build)
    with pytest.raises(SystemExit) as end:
        main(["train", "run.toml"])
    assert end.value.code == status
    wanted = f"superstep: {said}. The run had not begun: there is no state to resume from.\n"
    assert capsys.readouterr().err == wanted


def test_a_run_of_torchrun_goes_on_with_its_own_command(tmp_path):
    runs.make_files(tmp_path)
    folder = RunFolder(root=tmp_path)
    folder.config.touch()
    assert "start it again with: superstep train --state.dir" in how_to_go_on(folder)
    said = how_to_go_on(folder, is_of_torchrun=True)
    assert said.endswith("; start the same command again with --state.existing resume.")


def test_what_is_shown_is_noted_for_those_who_ask_from_outside(clock):
    noted = []
    line = ProgressLine(Terminal(), clock, noted.append)
    for progress in READING[:3]:
        clock.now += REDRAW_S
        line.show(progress)
    assert noted[-1] == "reading: 3% of 100 MiB"
