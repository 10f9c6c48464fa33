"""fp16: the loss scale falls and rises alike on all ranks, a skipped step changes nothing, a run resumes with it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import runs
import small
from corpus import write_corpus
from superstep.cli.main import main
from superstep.comm.device import Device
from superstep.engine.optimizer import Optimizer
from superstep.launch.ranks import World
from superstep.numerics.loss_scale import LossScale, first_scale
from superstep.plan.loss_scale import LossScaleConfig
from superstep.plan.resolution.resolve import resolve
from superstep.state.checkpoint_dirs import checkpoints
from superstep.train.proof.proof_inputs import Cases, prove_case

LAYOUTS = [
    {"dp": 2, "zero": 2},
    {"dp": 2, "zero": 3, "microbatch": 2},
    {"tp": 2},
    {"pp": 2, "microbatch": 2, "schedule": "zb-h1"},
    {"cp": 2, "recompute": "full"},
]
FLAGS = ["train", "run.toml", "--numerics.compute", "fp16", "--train.lr", "1e-2"]


def test_the_scale_falls_at_an_overflow_and_rises_after_clean_steps():
    settings = LossScaleConfig(start=8.0, growth=4.0, growth_steps=2, backoff=0.25)
    scale = first_scale(settings)
    assert scale.factor == 8.0
    once = scale.after_step(settings)
    assert (once.factor, once.clean_steps) == (8.0, 1)
    assert once.after_step(settings) == LossScale(exponent=5)
    lower = once.after_overflow(settings)
    assert lower == LossScale(exponent=1, skipped_steps=1)
    # The floor of 1 ends it: the step after that cannot be skipped.
    lowest = lower.after_overflow(settings)
    assert lowest == LossScale(exponent=0, skipped_steps=2)
    assert lowest.after_overflow(settings) is None
    # 1 leaves the scale where it is.
    fixed = replace(settings, growth=1.0)
    assert once.after_step(fixed) == LossScale(exponent=3)


@pytest.mark.parametrize("scale", [LossScale(), LossScale(exponent=40, clean_steps=2**28 - 1, skipped_steps=2**20)])
def test_a_scale_fits_into_a_word_of_a_snapshot(scale):
    word = scale.pack()
    assert 0 < word < 2**63
    assert LossScale.unpack(word) == scale
    assert LossScale.unpack(0) is None


def _prove_each(rank, world, cases):
    return [prove_case(World(rank, world, Device("cpu")), case) for case in cases]


def _skew(rank, world, case):
    """A rank that forgets the scale in its update."""
    real = Optimizer.step
    if rank == 1:
        Optimizer.step = lambda self, lr, norm, loss_scale=1.0: real(self, lr, norm, 2 * loss_scale)
    try:
        return prove_case(World(rank, world, Device("cpu")), case)
    finally:
        Optimizer.step = real


@pytest.mark.multiproc
def test_every_layout_is_proven(pool, tmp_path):
    corpus = write_corpus(tmp_path / "corpus", vocab=small.VOCAB)
    made = Cases(tmp_path / "files", corpus, steps=3)
    experts = small.config(layers=2, compute="fp16", dp=2, ep=2)
    mixture = {"experts": 4, "router": "dropless", "z_weight": 1.0}
    experts = replace(experts, model=replace(experts.model, ffn=32, **mixture))
    cases = [
        made.case(resolve(small.config(layers=2, compute="fp16", **plan)), reruns=number == 1)
        for number, plan in enumerate(LAYOUTS)
    ]
    cases.append(Cases(tmp_path / "experts", corpus, steps=3).case(resolve(experts), reruns=False))
    verdicts = pool.run(2, _prove_each, cases, timeout_s=240)[0]
    for case, verdict in zip(cases, verdicts, strict=True):
        assert verdict.is_proven, (case.run.config.plan, verdict.first and verdict.first.describe(), verdict.again)
    wrong = pool.run(2, _skew, cases[0], timeout_s=120)[0]
    assert wrong.first is not None


@pytest.fixture
def folder(tmp_path, monkeypatch):
    runs.make_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _train(*flags, status=0):
    assert main([*FLAGS, *flags]) == status


def _position(run="run", at=-1):
    return json.loads((checkpoints(Path(run) / "checkpoints")[at] / "manifest.json").read_text())["position"]


def _course(run):
    return [(line["step"], line["loss"], line["grad_norm"]) for line in runs.events(Path(run), "step")]


def test_steps_that_overflow_are_skipped_until_the_scale_fits(folder, capsys):
    big = str(2.0**36)
    _train("--loss-scale.start", big, "--train.steps", "30", "--state.save-every", "15", "--state.dir", "run")
    said = capsys.readouterr().out
    lines = _course("run")
    skipped = [step for step, _, norm in lines if norm is None]
    first_taken = next(step for step, _, norm in lines if norm is not None)
    assert 5 < first_taken <= len(skipped) + 1 < 25
    assert f"step 1 overflowed in fp16 and is skipped; the loss scale is now {2.0**35:g}." in said
    # A skipped step leaves the weights: every batch has the same pattern, and its loss stays until the first update.
    first = lines[0][1]
    assert all(abs(loss - first) < 0.1 for _, loss, _ in lines[:first_taken])
    assert lines[-1][1] < first - 0.5
    scale = _position()["loss_scale"]
    clean = 30 - max(skipped)
    assert scale == {"exponent": 36 - len(skipped), "clean_steps": clean, "skipped_steps": len(skipped)}

    # A run that is resumed has the same scale, count and bits.
    _train("--loss-scale.start", big, "--train.steps", "30", "--state.save-every", "15", "--state.dir", "half")
    for place in checkpoints(folder / "half" / "checkpoints")[-1:]:
        for each in sorted(place.iterdir()):
            each.unlink()
        place.rmdir()
    _train(
        *("--loss-scale.start", big, "--train.steps", "30", "--state.save-every", "15", "--state.dir", "half"),
        *("--state.existing", "resume"),
    )
    assert _position("half") == _position("run")
    assert _course("half")[-15:] == _course("run")[-15:]


def test_at_the_floor_the_run_ends_and_names_the_unit(folder, capsys):
    big = str(2.0**36)
    _train("--loss-scale.start", big, "--loss-scale.floor", big, status=1)
    said = capsys.readouterr()
    assert "fp16 overflows at the least loss scale: the first unit, from the last one on, whose gradient" in said.err
    assert "is not finite is '" in said.err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--numerics.exact"], "numerics.compute = 'fp16' with numerics.exact"),
        (["--numerics.kernels", "triton"], "set numerics.kernels to torch"),
        (["--loss-scale.start", "1000"], "loss_scale.start = 1000.0 must be a power of two"),
        (["--loss-scale.backoff", "1"], "loss_scale.backoff = 1.0 must be below 1"),
        (["--loss-scale.growth", "0.5"], "loss_scale.growth = 0.5 must be at least 1"),
        (["--loss-scale.floor", "0.5"], "loss_scale.floor = 0.5 must lie between 1 and"),
        (["--loss-scale.growth-steps", "0"], "loss_scale.growth_steps = 0 must lie between 1 and"),
        (["--numerics.compute", "bf16", "--loss-scale.start", "8"], "[loss_scale] with numerics.compute = 'bf16'"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(folder, capsys, flags, said):
    _train(*flags, status=2)
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert said in lines[0]
