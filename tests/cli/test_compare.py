"""superstep compare: what differs between runs, in the terminal and on a page; and the report that training leaves."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest

import told_runs
from superstep.cli.main import main
from superstep.observe.doctor.failure_file import write_box
from superstep.observe.events import RunFinished
from superstep.observe.page.bundle_html import unpack
from superstep.plan.config import ModelConfig, RunConfig
from superstep.plan.config_io import write_config
from superstep.run.reports.report import ReportAtEnd, leave_report
from superstep.train.run_folder.run_paths import RunFolder

CONFIG = RunConfig(model=ModelConfig(name="tiny"))


def data_of(path):
    page = path.read_text(encoding="utf-8")
    return json.loads(page.partition('id="data">')[2].partition("</script>")[0])


def made(root, config, **told):
    root.mkdir(parents=True)
    (root / "run.toml").write_text(write_config(config), encoding="utf-8")
    text = "\n".join(json.dumps(line) for line in told_runs.lines(**told))
    (root / "metrics.jsonl").write_text(text + "\n", encoding="utf-8")
    return root


def spoil(run, number):
    """Change a byte of a line."""
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    lines[number - 1] = lines[number - 1].replace(b'"event":', b'"event"\xba', 1)
    (run / "metrics.jsonl").write_bytes(b"".join(lines))


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    other = replace(
        CONFIG, train=replace(CONFIG.train, lr=1e-4), state=replace(CONFIG.state, dir="elsewhere", existing="resume")
    )
    made(tmp_path / "one", CONFIG, steps=200)
    made(tmp_path / "same", CONFIG, steps=200)
    made(tmp_path / "other", other, steps=200, seed=2, worse=0.3)


@pytest.mark.parametrize("verb", [["compare", "one", "same"], ["view", "same", "--text"], ["doctor", "same"]])
def test_a_damaged_line_is_told_and_a_torn_last_one_is_not(runs, tmp_path, capsys, verb):
    with (tmp_path / "one" / "metrics.jsonl").open("ab") as file:
        file.write(b'{"event": "st')
    spoil(tmp_path / "same", 7)
    (tmp_path / "same" / "program.txt").write_text("")
    main(verb)
    said = capsys.readouterr().err.splitlines()
    assert "same/metrics.jsonl: line 7 cannot be read, and what it told is left out" in said[0]
    assert not any("one/metrics.jsonl" in line for line in said)


def test_a_damaged_line_is_told_on_the_page(runs, tmp_path):
    spoil(tmp_path / "one", 9)
    leave_report(RunFolder(root=tmp_path / "one"))
    (run,) = unpack(data_of(tmp_path / "one" / "report.html")["runs"])["runs"]
    step, kind, text = run["events"][0]
    assert (step, kind) == (0, "damaged")
    assert "line 9 cannot be read" in text


def test_what_differs_is_told_and_drawn(runs, tmp_path, capsys):
    assert main(["compare", "one", "same", "other"]) == 0
    out = capsys.readouterr().out
    same, other = out.split("one -> other")
    assert "all settings are the same" in same
    assert "state." not in out
    assert "the same losses to the bit" in same
    assert f"train.lr  {CONFIG.train.lr} -> 0.0001" in other
    assert "more than noise" in other
    assert "state.dir" not in out
    assert out.endswith("all curves: compare.html\n")
    data = data_of(tmp_path / "compare.html")
    assert [run["name"] for run in unpack(data["runs"])["runs"]] == ["one", "same", "other"]
    assert [one["is_noise"] for one in data["comparisons"]] == [True, False]


def test_what_cannot_be_compared_is_refused(runs, tmp_path, capsys):
    for argv, words in (
        (["one"], "at least two runs are needed: superstep compare runs/demo runs/demo-2."),
        (["one", "nowhere"], "'nowhere' is not a run directory: it lacks run.toml"),
        (["one", "same", "--out", "a.png"], "must end in .html"),
    ):
        assert main(["compare", *argv]) == 2
        assert words in capsys.readouterr().err
    (tmp_path / "same" / "metrics.jsonl").unlink()
    assert main(["compare", "one", "same"]) == 2
    assert "has no metrics.jsonl yet" in capsys.readouterr().err


def test_the_end_of_training_leaves_a_report(runs, tmp_path):
    folder = RunFolder(root=tmp_path / "one")
    sink = ReportAtEnd(folder)
    for line in told_runs.lines(steps=3):
        if line["event"] == "finished":
            assert not folder.report.exists()
            sink.write(RunFinished(step=3, elapsed_s=1.0, tokens_seen=10))
    sink.close()
    (told,) = unpack(data_of(folder.report)["runs"])["runs"]
    assert told["step"][-1] == 200
    assert told["spent"] == {}
    assert "torch" in told["facts"]
    # A damaged record of a step costs the report nothing but its picture.
    folder.trace.write_text("{", encoding="utf-8")
    sink.write(RunFinished(step=3, elapsed_s=1.0, tokens_seen=10))
    assert unpack(data_of(folder.report)["runs"])["runs"][0]["spent"] == {}


def test_a_run_that_breaks_off_leaves_a_report(tmp_path):
    folder = RunFolder(root=tmp_path / "one")
    leave_report(folder)
    assert not folder.report.exists(), "it has told nothing yet"
    made(folder.root, CONFIG, steps=200)
    lines = folder.metrics.read_text(encoding="utf-8").splitlines()
    folder.metrics.write_text("\n".join(line for line in lines if "finished" not in line) + "\n", encoding="utf-8")
    folder.fault.write_text(write_box("rank 1: gone", ()), encoding="utf-8")
    leave_report(folder)
    (told,) = unpack(data_of(folder.report)["runs"])["runs"]
    assert told["events"][-1][1:] == ["fault", "rank 1: gone"]
    # One that went on by itself has recovered from it.
    os.utime(folder.fault, (0, 0))
    leave_report(folder)
    assert unpack(data_of(folder.report)["runs"])["runs"][0]["events"][-1][1] != "fault"


def test_metrics_without_a_line_that_can_be_read_are_damaged(runs, tmp_path, capsys):
    for text in (b"\xff\xfe\n", b"{}{\n[1]\n"):
        (tmp_path / "same" / "metrics.jsonl").write_bytes(text)
        assert main(["compare", "one", "same"]) == 2
        assert "same/metrics.jsonl has no readable line: it is damaged" in capsys.readouterr().err
