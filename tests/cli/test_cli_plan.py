"""superstep plan: what it prints, the file that it writes, and its refusals."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from superstep.cli.main import main
from superstep.plan.config import ModelConfig, RunConfig
from superstep.plan.config_io import read_config, write_config
from superstep.plan.model.hf_config import to_hf_config
from superstep.plan.model.sizes.named_sizes import SHAPES
from superstep.plan.resolution.resolve import resolve

SMALL = ["demo", "--cluster", "8xA100", "--global-batch", "32", "--sequence", "256"]


def called(argv, capsys):
    status = main(["plan", *argv])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_the_best_plan_is_written_and_resolves(tmp_path, capsys):
    out, told = tmp_path / "run.toml", tmp_path / "told.json"
    flags = ["--tokens", "1e6", "--price", "2", "--out", str(out), "--json", str(told)]
    status, text, _ = called([*SMALL, *flags, "--explain", "--fallback", "1"], capsys)
    assert status == 0
    run = resolve(read_config(out), 8)
    assert run.plan.mesh.world == 8
    assert (run.config.train.batch_sequences, run.config.data.sequence_tokens) == (32, 256)
    assert run.config.train.steps == -(-1_000_000 // (32 * 256))
    best = json.loads(told.read_text(encoding="utf-8"))["best"]
    assert best[0]["plan"]["dp"] == run.config.plan.dp
    assert best[0]["figures"]["step_s"] <= best[-1]["figures"]["step_s"] * 1.2
    assert best[0]["snapshot_bytes"] > 36 * 1e6 / 8
    for words in (
        "tokens/s",
        "Snapshots of plan 1 (state.snapshot_every): up to ",
        "limited by",
        "Nearest alternatives",
        "MWh",
        "price",
        "busiest",
        "fullest",
        "lost",
        "####",
    ):
        assert words in text


def test_failures_are_foreseen_by_what_is_published_or_told(tmp_path, capsys):
    told = tmp_path / "told.json"
    text = called([*SMALL, "--json", str(told)], capsys)[1]
    found = json.loads(told.read_text(encoding="utf-8"))["failures"]
    # RSC-1: 6.5 failures of a node of eight in a thousand days (Kokolis 2024).
    assert found["mtbf_s"] == pytest.approx(1000 / 6.5 * 86400)
    assert found["snapshot_every"] == 1
    assert found["plain_ettr"] < found["ettr"] < 1
    assert "one of the chips fails every 154 days" in text
    assert f"state.save_every = {found['save_every']}: " in text
    assert "one of the chips fails every 15 min" in called([*SMALL, "--mtbf", "2"], capsys)[1]
    other = [*SMALL[:2], "8xV100-32GB", *SMALL[3:]]
    assert "is not published: set the hours" in called(other, capsys)[1]
    assert "--mtbf = 0.0 must be above 0" in called([*SMALL, "--mtbf", "0"], capsys)[2]


def test_a_run_keeps_all_but_its_layout(tmp_path, capsys):
    base = RunConfig(model=ModelConfig(name="tiny", layers=6))
    base = replace(
        base, train=replace(base.train, batch_sequences=24, lr=1e-4), data=replace(base.data, text_field="t")
    )
    (tmp_path / "run.toml").write_text(write_config(base), encoding="utf-8")
    argv = [str(tmp_path / "run.toml"), "--cluster", "4xH100", "--out", str(tmp_path / "out.toml")]
    assert called(argv, capsys)[0] == 0
    found = read_config(tmp_path / "out.toml")
    assert (found.model, found.train, found.data, found.state) == (base.model, base.train, base.data, base.state)
    assert resolve(found).plan.mesh.world == 4


def test_a_hugging_face_config_is_a_model(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(to_hf_config(SHAPES["qwen3-0.6b"])), encoding="utf-8")
    status, text, _ = called([str(path), "--cluster", "8xH100", "--top", "1", "--sequence", "1024"], capsys)
    assert status == 0
    assert "596M parameters" in text


def test_a_file_that_is_there_is_kept(tmp_path, capsys):
    out = tmp_path / "run.toml"
    out.write_text("mine", encoding="utf-8")
    for flag in ("--out", "--json"):
        status, told, err = called([*SMALL, flag, str(out)], capsys)
        assert (status, told) == (2, ""), "before the search"
        assert f"{flag} = " in err
        assert "is there already" in err
    assert out.read_text(encoding="utf-8") == "mine"


def test_files_that_cannot_be_written_are_refused_before_the_search(tmp_path, capsys):
    status, told, err = called([*SMALL, "--out", str(tmp_path / "none" / "run.toml")], capsys)
    assert (status, told) == (2, "")
    assert "make it first" in err
    same = str(tmp_path / "one")
    assert called([*SMALL, "--out", same, "--json", same], capsys)[0] == 2
    assert not (tmp_path / "one").exists()


def test_traffic_is_told_by_axis_and_link(capsys):
    out = called([*SMALL, "--explain", "--fix", "plan.tp=2", "plan.pp=1", "plan.cp=1"], capsys)[1]
    told = dict(re.findall(r"^  (\w+) +[\d.]+ \w+  over the (.+)$", out, flags=re.MULTILINE))
    assert told["tp"] == told["shards"] == "fast links"
    wide = ["demo", "--cluster", "16xA100", "--global-batch", "32", "--sequence", "256", "--explain"]
    out = called([*wide, "--fix", "plan.tp=1", "plan.pp=2", "plan.cp=1"], capsys)[1]
    assert re.search(r"^  pp +[\d.]+ \w+  over the network$", out, flags=re.MULTILINE)


def test_stragglers_are_sampled_when_asked(capsys):
    assert "one in twenty" not in called(SMALL, capsys)[1]
    even, spread = (called([*SMALL, "--jitter", value], capsys)[1] for value in ("0", "0.3"))
    assert "takes 0.0% longer in the mean" in even
    assert float(re.search(r"takes ([\d.]+)% longer", spread)[1]) > 1


def test_what_is_settled_is_kept(tmp_path, capsys):
    told = tmp_path / "told.json"
    argv = [
        *SMALL,
        "--fix",
        "plan.tp=2",
        "plan.schedule=gpipe",
        "plan.pp=2",
        "numerics.compute=fp32",
        "--json",
        str(told),
    ]
    assert called(argv, capsys)[0] == 0
    for each in json.loads(told.read_text(encoding="utf-8"))["best"]:
        assert (each["plan"]["tp"], each["plan"]["pp"], each["plan"]["schedule"]) == (2, 2, "gpipe")
        assert each["compute"] == "fp32"


EXACT = "[model]\nname = 'demo'\n[numerics]\nexact = true\n"
OWN = "[model]\nsource = 'own.py'\nvocab = 64\n"
RULES = "[plan]\nrules = {ffn = 'none'}\n"

# flags after `superstep plan`, a run.toml where RUN stands for it, what the one line must say
REFUSED = [
    ([], None, ["name a model", "superstep plan llama3-8b --cluster"]),
    (["--cluster", "8xH100"], None, ["name a model"]),
    (["demo"], None, ["--cluster is missing", "64xH100"]),
    (["lama3-8b", "--cluster", "8xH100"], None, ["'lama3-8b'", "did you mean 'llama3-8b'?"]),
    (["gpt3-176b", "--cluster", "8xH100"], None, ["did you mean 'gpt3-175b'?"]),
    (["none.toml", "--cluster", "8xH100"], None, ["none.toml cannot be read"]),
    (["none.json", "--cluster", "8xH100"], None, ["none.json", "cannot be read"]),
    (["demo", "--cluster", "8xH1000"], None, ["'H1000'", "did you mean 'H100'?"]),
    (["demo", "--cluster", "eight"], None, ["cluster = 'eight'", "128xH100"]),
    (["demo", "--cluster", "0xH100"], None, ["chips"]),
    (
        ["demo", "--cluster", "8xV100", "--fix", "numerics.compute=bf16"],
        None,
        ["V100", "fp16", "leave numerics.compute"],
    ),
    ([*SMALL, "--sequence", "9000"], None, ["data.sequence_tokens = 9000", "2048 or less"]),
    ([*SMALL, "--global-batch", "0"], None, ["--global-batch = 0", "at least 1"]),
    ([*SMALL, "--top", "0"], None, ["--top = 0", "at least 1"]),
    ([*SMALL, "--fallback", "-1"], None, ["--fallback = -1", "at least 0"]),
    ([*SMALL, "--jitter", "5"], None, ["--jitter = 5", "between 0 and 1"]),
    ([*SMALL, "--slow-share", "-0.1"], None, ["--slow-share = -0.1", "between 0 and 1"]),
    ([*SMALL, "--tokens", "-5"], None, ["--tokens = -5", "above 0"]),
    ([*SMALL, "--price", "nan"], None, ["--price = nan", "above 0"]),
    ([*SMALL, "--memory", "81"], None, ["--memory = 81 GiB", "more than a chip has beside", "set it to 77.95 or less"]),
    ([*SMALL, "--fix", "plan.tp"], None, ["--fix plan.tp:", "plan.tp=4"]),
    ([*SMALL, "--fix", "plan.tpp=4"], None, ["no such field", "did you mean 'plan.tp'?"]),
    ([*SMALL, "--fix", "plan.schedule=1f2b"], None, ["plan.schedule", "'1f2b'", "'1f1b'"]),
    ([*SMALL, "--fix", "numerics.compute=fp8"], None, ["no such format"]),
    ([*SMALL, "--fix", "plan.tp=3"], None, ["plan.tp = 3: no layout of 8 chips", "set plan.tp to one of [1, 2]"]),
    ([*SMALL, "--fx", "plan.tp=3"], None, ["unknown flag --fx", "--fix"]),
    (
        ["demo", "--cluster", "88xA100", "--global-batch", "20"],
        None,
        ["--global-batch = 20 sequences", "no layout of 88 chips", "the nearest number that one does is 22"],
    ),
    (
        ["llama3.2-1b", "--cluster", "8xH100", "--memory", "1", "--global-batch", "64"],
        None,
        ["--memory = 1 GiB", "no plan fits on 8 chips", "most of it optimizer", "of these chips are enough"],
    ),
    pytest.param(
        ["llama3-70b", "--cluster", "8xH100", "--memory", "10", "--global-batch", "64"],
        None,
        ["--memory = 10 GiB", "no plan fits on 8 chips", "most of it optimizer", "of these chips are enough"],
        marks=pytest.mark.long,
    ),
    (["RUN", "--cluster", "8xH100"], EXACT, ["numerics.exact = true", "set it to false"]),
    (["RUN", "--cluster", "8xH100"], OWN, ["model.source = 'own.py'", "leave it out"]),
    (["RUN", "--cluster", "8xH100"], RULES, ["plan.rules", "leave them out"]),
]


@pytest.mark.parametrize(
    ("argv", "toml", "words"), REFUSED, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_a_mistake_is_one_line_and_exit_status_2(argv, toml, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if toml is not None:
        (tmp_path / "run.toml").write_text(toml, encoding="utf-8")
    status, out, err = called(["run.toml" if word == "RUN" else word for word in argv], capsys)
    assert status == 2
    assert out == ""
    assert err.startswith("superstep: ")
    assert err.count("\n") == 1
    assert [word for word in words if word not in err] == []
