"""A run goes on under another layout: the same bits are loaded, and the same text is read on from the same place."""

import functools
from dataclasses import replace
from pathlib import Path

import pytest

import runs
from longer import longer
from superstep.comm.device import Device
from superstep.data.preparation.prepare import prepare
from superstep.launch.ranks import World
from superstep.numerics.tolerance import TOLERANCE
from superstep.plan.resolution.resolve import resolve
from superstep.state.checkpoint import read_position
from superstep.state.checkpoint_dirs import checkpoint_at
from superstep.state.manifest import Position
from superstep.train.corpus_trainer import CorpusTrainer
from superstep.train.loop import train
from superstep.train.run_folder.run_paths import RunFolder
from superstep.train.throughput import PeakRate

pytestmark = pytest.mark.multiproc

STEPS, HALF = 6, 3
ONE = "one rank"
LAYOUTS = {
    ONE: {"dp": 1},
    "tp 2": {"dp": 1, "tp": 2},
    "pp 2": {"dp": 1, "pp": 2, "microbatch": 1},
    "dp 2, zero 3": {"dp": 2, "zero": 3},
    "pp 2 in 4 stages": {"dp": 1, "pp": 2, "chunks": 2, "microbatch": 1},
    "dp 2, zero 0": {"dp": 2},
    "dp 2, tp 2, zero 1": {"dp": 2, "tp": 2, "zero": 1},
    "dp 2, pp 2, zero 2": {"dp": 2, "pp": 2, "zero": 2, "microbatch": 1},
}

FEW = (ONE, "tp 2", "pp 2 in 4 stages", "dp 2, zero 3")


def _run(layout, steps):
    # The rate depends on the steps of the whole run, unless it is held.
    train = {"steps": steps, "min_lr_ratio": 1.0, "eval_every": 100}
    return resolve(runs.config(layers=4, plan=LAYOUTS[layout], train=train))


class _Losses:
    """A sink that keeps what each step was."""

    def __init__(self):
        self.seen = []

    def write(self, event):
        if event.name == "step":
            self.seen.append((event.step, event.loss, event.grad_norm, event.tokens_seen))

    def close(self):
        pass


def _go(rank, world, run, root, corpus, start):
    """Train to the run's last step, from a checkpoint if any, which is written again first, as it was loaded."""
    unknown = PeakRate(flops_per_token=None, peak_flops=None)
    trainer = CorpusTrainer(World(rank, world, Device("cpu")), run, RunFolder(root=Path(root)), Path(corpus), unknown)
    position = Position()
    if start is not None:
        position = trainer.load(Path(start))
        trainer.save(position)
    losses = _Losses()
    train(trainer, position, losses)
    trainer.close()
    return losses.seen


@pytest.fixture(scope="module")
def go(pool, tmp_path_factory):
    """Trains a layout to a step, from a checkpoint if any: (folder of its checkpoints, its steps)."""
    place = tmp_path_factory.mktemp("layouts")
    (place / "good.txt").write_text(runs.TEXT, encoding="utf-8")
    corpus = place / "data"
    prepare(replace(runs.config().data, corpus=(str(place / "good.txt"),)), 300, corpus)
    count = 0

    def going(layout, steps, start=None):
        nonlocal count
        count += 1
        run = _run(layout, steps)
        root = place / f"run-{count}"
        root.mkdir()
        seen = pool.run(run.plan.mesh.world, _go, run, str(root), str(corpus), start and str(start), timeout_s=60)
        assert all(there == seen[0] for there in seen), "every rank is told the same"
        return root / "checkpoints", seen[0]

    return going


@pytest.fixture(scope="module")
def half_of(go):
    """A layout's first steps, done once: the checkpoint after them."""
    return functools.cache(lambda layout: checkpoint_at(go(layout, HALF)[0], HALF))


@pytest.fixture(scope="module")
def whole(go):
    """The steps of a run on one rank that never stopped."""
    return go(ONE, STEPS)[1]


def _bytes(checkpoint):
    return {name: (checkpoint / name).read_bytes() for name in ("model.safetensors", "optimizer.safetensors")}


def _pairs():
    """Each goes on where the one before it stopped, around: in the short run those of two ranks."""
    names, few = list(LAYOUTS), list(FEW)
    every = [(names[number - 1], name) for number, name in enumerate(names)]
    around = [(few[number - 1], name) for number, name in enumerate(few)]
    return [*around, *longer([pair for pair in every if pair not in around], lambda pair: True)]


@pytest.mark.parametrize(("before", "after"), _pairs())
def test_a_run_goes_on_under_another_layout(go, half_of, whole, before, after):
    root, seen = go(after, STEPS, half_of(before))
    # What was loaded was written again at once: not a bit of weights or moments may differ.
    again = checkpoint_at(root, HALF)
    assert _bytes(again) == _bytes(half_of(before))
    assert read_position(again) == read_position(half_of(before)) == Position(step=3, samples=12, tokens=384)
    assert [step for step, *_ in seen] == [4, 5, 6]
    allowed = TOLERANCE["fp32"]
    for (step, loss, norm, tokens), (_, wanted_loss, wanted_norm, wanted_tokens) in zip(seen, whole[3:], strict=True):
        assert loss == pytest.approx(wanted_loss, rel=allowed.loss), step
        assert norm == pytest.approx(wanted_norm, rel=allowed.gradient_later), step
        assert tokens == wanted_tokens


@pytest.mark.parametrize("layout", longer(LAYOUTS, lambda layout: layout not in ("tp 2", "dp 2, zero 3")))
def test_a_restart_changes_no_bit(go, half_of, layout):
    through_root, through = go(layout, STEPS)
    again_root, again = go(layout, STEPS, half_of(layout))
    assert again == through[HALF:]
    assert _bytes(checkpoint_at(again_root, STEPS)) == _bytes(checkpoint_at(through_root, STEPS))
