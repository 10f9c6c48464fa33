"""Losses of post-training on every kind of layout: loss, gradient and log-probabilities are those of autograd on whole
logits, and in exact mode those of one rank to the bit.
"""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch

import objectives
from longer import first_few, many_ranks
from objectives import compare
from superstep.comm.device import Device
from superstep.comm.mesh import build_mesh
from superstep.engine.engine import Engine
from superstep.engine.values.microbatch import microbatches_of
from superstep.errors import DataError, Fault
from superstep.launch.ranks import World
from superstep.model.axes import units
from superstep.model.unit import UnitSpec
from superstep.numerics.loss import IGNORE
from superstep.numerics.tolerance import TOLERANCE
from superstep.plan.resolution.resolve import resolve
from superstep.train.proof.prove_tolerance import prove, write_reference
from superstep.train.proof.restart import data_bits

pytestmark = pytest.mark.multiproc

FAST = {
    1: [{"microbatch": 1, "recompute": "full"}, {"experts": "dropless"}, {}, {"microbatch": 8}],
    2: [
        {"tp": 2},
        {"pp": 2, "schedule": "zb-h1", "tied": False},
        {"cp": 2},
        {"dp": 2, "zero": 3, "recompute": "full"},
        {"dp": 2, "ep": 2, "experts": "dropless"},
        {"tp": 2, "sequence_parallel": False, "tied": False},
        {"tp": 2, "rules": (("vocab", "none"),)},
        {"pp": 2},
        {"cp": 2, "context": "ulysses"},
        {"dp": 2},
    ],
    4: [{"tp": 2, "cp": 2}, {"pp": 2, "tp": 2}, {"dp": 2, "zero": 2, "pp": 2}],
}
EXACT = {
    1: [{"recompute": "full"}],
    2: [
        {"tp": 2},
        {"pp": 2, "schedule": "zb-h1"},
        {"cp": 2},
        {"dp": 2, "zero": 3},
        {"tp": 2, "compute": "bf16"},
        {"cp": 2, "compute": "bf16"},
        {"dp": 2, "ep": 2, "experts": "dropless"},
    ],
    4: [{"tp": 2, "cp": 2}, {"dp": 2, "zero": 2, "pp": 2}],
}
"""All with microbatches of two sequences: their size is a matter of the bits."""


def told(found, logprobs):
    """What a step of ``one_pass`` tells of these log-probabilities."""
    streams = {name: stream.double() for name, stream in found.streams.items()}
    counts = (found.targets_BS != IGNORE) & (streams["weights"] != 0)
    seen = objectives.ONE.watch(logprobs.double(), streams)
    means = {name: float(seen[name][counts].double().mean()) for name in objectives.ONE.sums}
    return means | {name: float(seen[name][counts].max()) for name in objectives.ONE.maxima}


def on_layouts(pool, world, layouts, found, *, temperature=1.0, **also):
    """For each layout its run, and the results of its trials."""
    runs = [resolve(objectives.config(**also, **layout)) for layout in layouts]
    ranks = pool.run(world, objectives.results, runs, found, temperature, timeout_s=240)
    for number, run in enumerate(runs):
        yield run, [objectives.whole(list(parts)) for parts in zip(*(rank[number] for rank in ranks), strict=True)]


@pytest.mark.parametrize(("world", "part"), first_few(FAST, {1: 2, 2: 5}))
def test_losses_and_gradients_are_those_of_autograd_on_every_layout(pool, world, part):
    layouts, found = FAST[world][part], objectives.batch()
    total = float(found.streams["weights"][found.targets_BS != IGNORE].abs().sum())
    expected = {}
    for layout, (run, ours) in zip(layouts, on_layouts(pool, world, layouts, found), strict=True):
        kind = (layout.get("experts"), layout.get("tied", True))
        expected.setdefault(kind, objectives.textbooks(run, found))
        for trial, mine, theirs in zip(objectives.TRIALS, ours, expected[kind], strict=True):
            compare(mine, theirs, (layout, trial.__name__))
        weights, one, lag_0, answers = ours
        for mine, theirs in zip((weights, one, lag_0), expected[kind], strict=False):
            assert mine.loss == pytest.approx(theirs.loss, rel=2e-5), layout
            loss, weight = mine.evaluated
            assert weight == pytest.approx(total, rel=1e-6)
            assert loss / found.divisor == pytest.approx(mine.loss, rel=1e-5)
        assert one.measures == pytest.approx(told(found, one.logprobs), rel=1e-4, abs=1e-6)
        assert 0 < one.measures["clip_low"] < one.measures["clip_low"] + one.measures["clip_high"] < 1
        assert weights.measures == answers.measures == {}


KINDS = {"dense": {}, "bf16": {"compute": "bf16"}, "experts": {"experts": "dropless"}}


def kind_of(layout):
    return next((name for name, of in KINDS.items() if of and of.items() <= layout.items()), "dense")


@pytest.fixture(scope="module")
def alone(pool):
    """What one rank makes of the batch in exact mode, by the kind of model."""
    found = on_layouts(pool, 1, KINDS.values(), objectives.batch(), exact=True, microbatch=2)
    return {kind: trials for kind, (_, trials) in zip(KINDS, found, strict=True)}


@pytest.mark.parametrize("world", many_ranks(EXACT, most=1))
def test_in_exact_mode_every_layout_gives_the_same_bits(pool, alone, world):
    found = objectives.batch()
    for layout, (_, ours) in zip(
        EXACT[world], on_layouts(pool, world, EXACT[world], found, exact=True, microbatch=2), strict=True
    ):
        for trial, mine, theirs in zip(objectives.TRIALS, ours, alone[kind_of(layout)], strict=True):
            what = (layout, trial.__name__)
            assert torch.equal(mine.logprobs, theirs.logprobs), what
            assert (mine.loss, mine.evaluated, mine.measures) == (theirs.loss, theirs.evaluated, theirs.measures), what
            assert mine.gradients.keys() == theirs.gradients.keys()
            for name, gradient in theirs.gradients.items():
                assert torch.equal(mine.gradients[name], gradient), (what, name)


def test_in_exact_mode_the_ratio_is_one_where_the_weights_are_those_of_then(alone):
    for trials in alone.values():
        lag_0 = trials[objectives.TRIALS.index(objectives.lag_0)]
        assert lag_0.measures["ratio"] == 1.0
        nothing = ("max_dlogp", "old_k1", "old_k3", "clip_low", "clip_high")
        assert [lag_0.measures[name] for name in nothing] == [0.0] * 5


def test_exact_mode_gives_the_losses_of_the_papers_too(pool, alone):
    found = objectives.batch()
    for kind in ("dense", "experts"):
        theirs = objectives.textbooks(resolve(objectives.config(exact=True, microbatch=2, **KINDS[kind])), found)
        for trial, mine, one in zip(objectives.TRIALS, alone[kind], theirs, strict=True):
            compare(mine, one, (kind, trial.__name__))


TEMPERATURE = 0.7
TEMPERED = {
    1: [{"kernels": "off"}, {"recompute": "full"}],
    2: [
        {"tp": 2},
        {"tp": 2, "kernels": "off"},
        {"tp": 2, "rules": (("vocab", "none"),)},
        {"cp": 2},
        {"pp": 2, "tied": False},
        {"dp": 2, "zero": 3},
    ],
}
"""Each way in which logits become log-probabilities: by the kernel and by torch, of a whole vocabulary and of parts."""


@pytest.mark.parametrize("world", TEMPERED)
def test_a_temperature_divides_the_logits_on_every_layout(pool, world):
    found, expected = objectives.batch(), {}
    ours = on_layouts(pool, world, TEMPERED[world], found, temperature=TEMPERATURE)
    for layout, (run, trials) in zip(TEMPERED[world], ours, strict=True):
        tied = layout.get("tied", True)
        if tied not in expected:
            expected[tied] = objectives.textbooks(run, found, TEMPERATURE)
        for trial, mine, theirs in zip(objectives.TRIALS, trials, expected[tied], strict=True):
            compare(mine, theirs, (layout, trial.__name__))


def test_in_exact_mode_a_temperature_gives_the_same_bits_on_every_layout(pool):
    found, how = objectives.batch(), {"exact": True, "microbatch": 2, "temperature": TEMPERATURE}
    ((run, alone),) = on_layouts(pool, 1, [{}], found, **how)
    for trial, mine, theirs in zip(
        objectives.TRIALS, alone, objectives.textbooks(run, found, TEMPERATURE), strict=True
    ):
        compare(mine, theirs, trial.__name__)
    layouts = [{"tp": 2}, {"pp": 2}, {"cp": 2}]
    for layout, (_, trials) in zip(layouts, on_layouts(pool, 2, layouts, found, **how), strict=True):
        for trial, mine, theirs in zip(objectives.TRIALS, trials, alone, strict=True):
            assert torch.equal(mine.logprobs, theirs.logprobs), (layout, trial.__name__)
            for name, gradient in theirs.gradients.items():
                assert torch.equal(mine.gradients[name], gradient), (layout, trial.__name__, name)


@pytest.mark.parametrize(("world", "layout"), [(1, {}), (2, {"tp": 2})])
def test_in_bf16_weights_and_lag_0_are_those_of_autograd(pool, world, layout):
    """Of the other losses a token may lie on the other side of a bound than in fp32."""
    found, allowed = objectives.batch(), TOLERANCE["bf16"]
    ((run, ours),) = on_layouts(pool, world, [layout], found, compute="bf16")
    for trial, mine, theirs in zip(objectives.TRIALS, ours, objectives.textbooks(run, found), strict=True):
        if trial in (objectives.weights_only, objectives.lag_0):
            compare(mine, theirs, trial.__name__, allowed)


@pytest.mark.slow
def test_a_compiled_model_has_the_same_losses_and_gradients(pool):
    found, config = objectives.batch(), objectives.config()
    run = resolve(replace(config, numerics=replace(config.numerics, compile=True)))
    ((ours,),) = pool.run(1, objectives.results, [run], found, timeout_s=600)
    for trial, mine, theirs in zip(objectives.TRIALS, ours, objectives.textbooks(run, found), strict=True):
        compare(objectives.whole([mine]), theirs, trial.__name__)


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
    assert ("too large for the divisor" in told) == (change in ("large", "both signs"))


LAYOUTS = [{"dp": 2, "zero": 2, "microbatch": 2}, {"tp": 2}, {"cp": 2}, {"pp": 2}]


def _prove(rank, world, runs, batches, folder):
    return [prove(World(rank, world, Device("cpu")), run, batches, Path(folder), reruns=False) for run in runs]


def test_two_steps_with_weights_are_those_of_the_reference(pool, tmp_path):
    """Losses, gradients, moments and updates, by what ``superstep prove`` compares; a factor left out shows."""
    batches = tuple(
        replace(found, streams={"weights": found.streams["weights"].abs()})
        for found in (objectives.batch(seed) for seed in (1, 2))
    )
    runs = [resolve(objectives.config(**layout)) for layout in LAYOUTS]
    for name, given in (("right", batches), ("wrong", tuple(replace(b, streams={}) for b in batches))):
        (tmp_path / name).mkdir()
        write_reference(runs[0].shape, runs[0].config.train, given, tmp_path / name)
    for layout, verdict in zip(LAYOUTS, pool.run(2, _prove, runs, batches, str(tmp_path / "right"))[0], strict=True):
        assert verdict.is_proven, (layout, verdict.first and verdict.first.describe())
    assert not pool.run(2, _prove, runs[:1], batches, str(tmp_path / "wrong"))[0][0].is_proven


def test_a_second_run_is_held_to_the_same_streams_and_divisor():
    found = objectives.batch()
    bits = data_bits(found)
    streams = dict(found.streams, old=found.streams["old"] + 1e-3)
    others = [replace(found, streams=streams), replace(found, divisor=1.0), replace(found, streams={})]
    assert bits == data_bits(objectives.batch())
    assert all(data_bits(other) != bits for other in others)
