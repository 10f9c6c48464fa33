"""Losses of post-training on every kind of layout: loss, gradient and log-probabilities are those of autograd on whole
logits, and in exact mode those of one rank to the bit.
"""

from dataclasses import replace
from datetime import timedelta

import pytest
import torch

import objectives
from superstep.errors import DataError, Fault
from superstep.model.axes import units
from superstep.model.unit import UnitSpec
from superstep.numerics.loss import IGNORE
from superstep.numerics.tolerance import TOLERANCE
from superstep.plan.resolve import resolve
from superstep.runtime.device import Device
from superstep.runtime.engine import Engine
from superstep.runtime.mesh import build_mesh
from superstep.train.batches import microbatches_of

pytestmark = pytest.mark.multiproc

FAST = {
    1: [{}, {"microbatch": 8}, {"microbatch": 1, "recompute": "full"}, {"experts": "dropless"}],
    2: [
        {"tp": 2},
        {"tp": 2, "sequence_parallel": False, "tied": False},
        {"tp": 2, "rules": (("vocab", "none"),)},
        {"pp": 2},
        {"pp": 2, "schedule": "zb-h1", "tied": False},
        {"cp": 2},
        {"cp": 2, "context": "ulysses"},
        {"dp": 2},
        {"dp": 2, "zero": 3, "recompute": "full"},
        {"dp": 2, "ep": 2, "experts": "dropless"},
    ],
    4: [{"tp": 2, "cp": 2}, {"pp": 2, "tp": 2}, {"dp": 2, "zero": 2, "pp": 2}],
}
EXACT = {
    1: [{}, {"recompute": "full"}],
    2: [{"tp": 2}, {"pp": 2, "schedule": "zb-h1"}, {"cp": 2}, {"dp": 2, "zero": 3}],
    4: [{"tp": 2, "cp": 2}, {"dp": 2, "zero": 2, "pp": 2}],
}
"""All with microbatches of two sequences: their size is a matter of the bits."""


def weighted(logp, streams):
    return -(streams["weights"] * logp).sum()


def assert_near(ours, theirs, rtol, what):
    far = float((ours.double() - theirs.double()).norm() / theirs.double().norm())
    assert far <= rtol, (what, far)


def compare(ours, theirs, what):
    """With the textbook, within the tolerance of fast mode."""
    allowed = TOLERANCE["fp32"]
    assert_near(ours.logprobs, theirs.logprobs, allowed.loss, (what, "logprobs"))
    assert ours.loss == pytest.approx(theirs.loss, rel=allowed.gradient), what
    for name, gradient in theirs.gradients.items():
        assert_near(ours.gradients[name], gradient, allowed.gradient, (what, name))


@pytest.mark.parametrize("world", FAST)
def test_weights_multiply_the_loss_of_each_token_on_every_layout(pool, world):
    found = objectives.batch()
    runs = [resolve(objectives.config(**layout)) for layout in FAST[world]]
    ranks = pool.run(world, objectives.results, runs, found, timeout_s=200)
    total = float(found.streams["weights"][found.targets_BS != IGNORE].abs().sum())
    for number, (layout, run) in enumerate(zip(FAST[world], runs, strict=True)):
        ours = objectives.whole([rank[number] for rank in ranks])
        theirs = objectives.textbook(run, found, weighted)
        compare(ours, theirs, layout)
        loss, weight = ours.evaluated
        assert weight == pytest.approx(total, rel=1e-6)
        assert loss / found.divisor == pytest.approx(ours.loss, rel=1e-5)


@pytest.fixture(scope="module")
def alone(pool):
    """What one rank makes of the batch in exact mode."""
    run = resolve(objectives.config(exact=True, microbatch=2))
    return objectives.whole([rank[0] for rank in pool.run(1, objectives.results, [run], objectives.batch())])


@pytest.mark.parametrize("world", EXACT)
def test_in_exact_mode_weights_give_the_same_bits_on_every_layout(pool, alone, world):
    found = objectives.batch()
    runs = [resolve(objectives.config(exact=True, microbatch=2, **layout)) for layout in EXACT[world]]
    ranks = pool.run(world, objectives.results, runs, found, timeout_s=200)
    for number, layout in enumerate(EXACT[world]):
        ours = objectives.whole([rank[number] for rank in ranks])
        assert torch.equal(ours.logprobs, alone.logprobs), layout
        assert (ours.loss, ours.evaluated) == (alone.loss, alone.evaluated), layout
        assert ours.gradients.keys() == alone.gradients.keys()
        for name, gradient in alone.gradients.items():
            assert torch.equal(ours.gradients[name], gradient), (layout, name)
    compare(alone, objectives.textbook(runs[0], found, weighted), "exact")


def _refused(rank, world, run, found, change):
    """What one rank says of a batch."""
    mesh = build_mesh(run.plan, rank, Device("cpu"), timeout=timedelta(seconds=60))
    specs: list[UnitSpec] = list(units(run.shape))
    if change == "own loss":
        specs[-1] = replace(specs[-1], loss=lambda out, targets: out.sum())
    engine = Engine(run, specs, mesh)
    streams = dict(found.streams)
    if change == "shape":
        streams["weights"] = streams["weights"][:, :-1]
    if change == "dtype":
        streams["weights"] = streams["weights"].double()
    if change == "large":
        streams["weights"] = streams["weights"] * 1e9
    if change == "both signs":
        # Losses whose sum is small, though each has no room.
        streams["weights"] = torch.where(torch.arange(objectives.TOKENS) % 2 == 0, 1e9, -1e9).expand_as(
            found.targets_BS
        )
    divisor = {"divisor": 0.0, "both signs": 1e12}.get(change, found.divisor)
    parts = microbatches_of(replace(found, streams={} if change == "plain" else streams), run.plan, mesh)
    try:
        engine.train_step(parts, valid_tokens=found.valid_tokens, divisor=divisor, lr=0.0)
    except (DataError, Fault) as error:
        return str(error)
    except Exception as error:  # noqa: BLE001
        return repr(error)
    finally:
        mesh.destroy()


@pytest.mark.parametrize(
    ("change", "exact", "said"),
    [
        ("shape", False, "stream 'weights' is torch.float32 of shape (8, 31)"),
        ("dtype", False, "stream 'weights' is torch.float64"),
        ("divisor", False, "divisor = 0 must be above 0"),
        ("own loss", False, "has a loss of its own"),
        ("large", True, "has a term of"),
        ("both signs", True, "the losses of a step sum to"),
    ],
)
def test_what_cannot_be_is_refused_by_name(pool, change, exact, said):
    run = resolve(objectives.config(exact=exact, microbatch=8))
    (told,) = pool.run(1, _refused, run, objectives.batch(), change)
    assert told is not None
    assert said in told, told
