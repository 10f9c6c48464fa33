"""What a run writes after its checkpoints: by a process beside it, and into its report."""

from __future__ import annotations

import json
import re
import time

import pytest

import runs
from superstep.cli.main import main
from superstep.observe.page.bundle_html import unpack
from superstep.run.reports.samples import TOKENS, sampling
from superstep.train.run_folder.run_paths import RunFolder

PROMPT = "the quick"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    runs.make_files(folder)
    return folder


@pytest.fixture(autouse=True)
def here(place, monkeypatch):
    monkeypatch.chdir(place)


def test_a_run_writes_after_its_last_checkpoint_and_its_report_has_it(place, capsys):
    assert main(["train", "run.toml", "--state.save-every", "6", "--observe.sample", PROMPT]) == 0
    (line,) = [json.loads(text) for text in (place / "run/samples.jsonl").read_text().splitlines()]
    capsys.readouterr()
    assert main(["sample", "run", PROMPT, "--step", "6", "--tokens", str(TOKENS)]) == 0
    assert line == {"step": 6, "text": capsys.readouterr().out.rstrip("\n")}
    assert line["text"].startswith(PROMPT)
    assert len(line["text"]) > len(PROMPT)
    page = (place / "run/report.html").read_text(encoding="utf-8")
    (run,) = unpack(json.loads(re.search(r'id="data"[^>]*>(.*?)</script>', page, re.S)[1])["runs"])["runs"]
    assert run["samples"] == [[6, line["text"], False]]


@pytest.mark.long
def test_why_there_is_no_sample_is_told(place):
    folder = RunFolder(root=place / "run")
    folder.samples.unlink(missing_ok=True)
    with sampling(folder, "lazy " * 400) as finish:
        finish()
    (line,) = [json.loads(text) for text in folder.samples.read_text().splitlines()]
    assert line["step"] == 6
    assert "prompt" in line["why"]
    before = folder.samples.read_bytes()
    with sampling(folder, PROMPT) as finish:  # the run is gone on with: of that checkpoint it has been told
        finish()
    assert folder.samples.read_bytes() == before


def test_a_sample_is_given_up_where_the_run_is_stopped(place):
    folder = RunFolder(root=place / "run")
    folder.samples.unlink(missing_ok=True)
    began_s = time.monotonic()
    with sampling(folder, PROMPT):
        time.sleep(0.5)
    assert time.monotonic() - began_s < 3.0, "an interpreter that imports torch takes longer"
    assert not folder.samples.exists()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["sample", "run", PROMPT, "--step", "4"], "'run' has no checkpoint of step 4; choose one of [6]"),
        (["train", "run.toml", "--observe.sample", ""], "observe.sample = '' is an empty prompt"),
        (["train", "run.toml", "--observe.sample", "a", "--lora.rank", "2"], "[lora] has checkpoints of adapters"),
        (
            ["train", "run.toml", "--observe.sample", "a", "--hosts", "2", "--host", "0", "--meet", "127.0.0.1:1"],
            "observe.sample = 'a' needs ranks that one launcher",
        ),
    ],
)
def test_what_cannot_be_written_is_refused(argv, said, monkeypatch, capsys):
    monkeypatch.setenv("SUPERSTEP_SECRET", "that of the hosts of a run")
    assert main([*argv]) == 2
    assert said in capsys.readouterr().err
