"""One flipped bit is found, its rank is named, and the run goes on as if it had not flipped."""

import os
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import runs
from superstep.comm.device import Device
from superstep.data.preparation.prepare import prepare
from superstep.engine.optimizer import Optimizer
from superstep.errors import Fault
from superstep.launch.ranks import World
from superstep.numerics.fixed_point import Grid
from superstep.plan.resolution.resolve import resolve
from superstep.state.fingerprint import (
    BLOCK,
    Element,
    TensorPart,
    bit_sums,
    differing_indices,
    farthest,
    outvote,
    salts,
)
from superstep.state.manifest import Position
from superstep.state.snapshots.memory_snapshot import SnapshotMemory
from superstep.state.tensor_piece import TensorPiece
from superstep.train.corpus_trainer import CorpusTrainer
from superstep.train.loop import steps
from superstep.train.policy.gradient_recheck import wrong_places
from superstep.train.run_folder.run_paths import RunFolder
from superstep.train.throughput import PeakRate

STEPS = 9


def _piece(values, name="w"):
    index = tuple(slice(0, n) for n in values.shape)
    return TensorPiece(kind="weight", name=name, shape=tuple(values.shape), index=index,
                 low=0, values=values.flatten(), is_owner=True)  # fmt: skip


def test_a_flip_of_any_bit_changes_the_sum_and_an_order_does_not():
    values = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0))
    values[0, 0] = float("nan")
    (whole,) = bit_sums([_piece(values)]).tolist()
    parts = [_piece(part.contiguous()) for part in (values[:, 100:], values[:, :37], values[:, 37:100])]
    assert int(bit_sums(parts).sum()) == whole
    for bit in range(32):
        flipped = values.clone()
        flipped.view(torch.int32)[2, 7] ^= -(2**31) if bit == 31 else 2**bit
        assert int(bit_sums([_piece(flipped)])) != whole
    assert len(set(salts([_piece(values), _piece(values, "v")]).tolist())) == 2


def test_most_copies_are_right_and_of_two_the_nearer():
    part = TensorPart("weight", "w", ((0, 4),), 0, 4)
    one, other = (int(torch.tensor(x).view(torch.int32)) for x in (1.0, 1.5))
    assert outvote([Element(part, 0, {0: one, 1: other, 2: one})]) == (1,)
    assert outvote([Element(part, 0, {0: one, 1: other})]) is None
    pair = [Element(part, 0, {0: one, 3: other})]
    assert farthest(pair, [1.01]) == (3,)
    assert farthest(pair, [1.49]) == (0,)
    assert farthest(pair, [1.25]) == ()
    nothing = int(torch.tensor(float("nan")).view(torch.int32))
    assert farthest([Element(part, 0, {0: nothing, 3: other})], [9.0]) == (0,)
    assert differing_indices({0: [1, 2, 3], 1: [1, 5, 3]}) == [1]
    assert BLOCK > 1


def _config(every, **plan):
    config = runs.config(plan=plan, train={"steps": STEPS, "batch_sequences": 12, "eval_every": 100})
    numerics = replace(config.numerics, exact=True)
    return replace(config, numerics=numerics, state=replace(config.state, save_every=100, fingerprint_every=every))


def _go(rank, world, run, root, corpus, flip=None):
    """What a run tells, on each rank: its steps and other events; ``flip`` is where a bit changes: between two steps,
    or just before or after the update of one.
    """
    unknown = PeakRate(flops_per_token=None, peak_flops=None)
    trainer = CorpusTrainer(World(rank, world, Device("cpu")), run, RunFolder(root=Path(root)), Path(corpus), unknown)
    trainer.keep_snapshots(SnapshotMemory(os.memfd_create(f"rank-{rank}")), None)
    told, losses = [], {}
    update, done_before = Optimizer.step, []

    def flips(when, step):
        if flip and flip["when"] == when and not done_before and step == flip["step"]:
            done_before.append(None)
            if rank == flip["rank"]:
                _flip(trainer, flip)

    def flipping(self, lr, norm, *others):
        flips("before the update", self.steps + 1)
        update(self, lr, norm, *others)
        flips("after the update", self.steps)

    Optimizer.step = flipping
    try:
        for done in steps(trainer, Position(), report=told.append):
            losses[done.position.step] = (done.event.loss, done.event.grad_norm)
            flips("between steps", done.position.step)
    except Fault as fault:
        told.append(str(fault))
    finally:
        Optimizer.step = update
        trainer.close()
    return losses, told


def _flip(trainer, flip):
    pieces = [piece for piece in trainer.pieces((flip["kind"],)) if piece.values.numel()]
    values = pieces[flip["piece"] % len(pieces)].values
    values.view(torch.int32)[flip["element"] % len(values)] ^= 2 ** flip["bit"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    place = tmp_path_factory.mktemp("integrity")
    (place / "good.txt").write_text(runs.TEXT, encoding="utf-8")
    prepare(replace(runs.config().data, corpus=(str(place / "good.txt"),)), 300, place / "data")
    return place / "data"


@pytest.fixture
def go(pool, corpus, tmp_path):
    def going(flip=None, every=1, **plan):
        run = resolve(_config(every, **plan))
        run = replace(run, plan=replace(run.plan, snapshots=True))
        run = resolve(replace(run.config, state=replace(run.config.state, snapshot_every=every)))
        found = pool.run(run.plan.mesh.world, _go, run, str(tmp_path), str(corpus), flip, timeout_s=120)
        assert all(each == found[0] for each in found), "every rank is told the same"
        return found[0]

    return going


@pytest.mark.long
@pytest.mark.multiproc
def test_the_fingerprint_is_the_same_on_any_layout(go):
    def prints(**plan):
        return [event for event in go(microbatch=2, **plan)[1] if event.name == "fingerprint"]

    alone = prints(dp=1)
    assert [event.step for event in alone] == list(range(1, STEPS + 1))
    assert len({event.weights for event in alone}) == STEPS
    for plan in ({"dp": 2}, {"dp": 2, "zero": 1}, {"dp": 2, "zero": 3}, {"dp": 1, "tp": 2}, {"dp": 1, "pp": 2}):
        assert prints(**plan) == alone, plan


FLIPS = [
    ({"dp": 3}, "gradient", "majority"),
    ({"dp": 2, "zero": 1}, "weight", "at rest"),
    ({"dp": 2}, "gradient", "replay"),
    ({"dp": 1, "tp": 2}, "exp_avg", "at rest"),
    ({"dp": 1, "pp": 2}, "exp_avg_sq", "at rest"),
]


@pytest.mark.multiproc
@pytest.mark.parametrize("flips", [FLIPS[:2], pytest.param(FLIPS[2:], marks=pytest.mark.long)], ids=["few", "others"])
def test_a_flipped_bit_is_found_and_its_rank_named(go, flips):
    draw = random.Random(12)
    undisturbed = go(microbatch=2, dp=1)[0]
    for plan, kind, how in flips:
        world = resolve(_config(1, **plan)).plan.mesh.world
        drawn = {"step": (3, STEPS - 1), "rank": (0, world), "piece": (0, 99), "element": (0, 9999), "bit": (0, 31)}
        when = "before the update" if kind == "gradient" else "between steps"
        flip = {"kind": kind, "when": when} | {name: draw.randrange(*bounds) for name, bounds in drawn.items()}
        losses, told = go(flip, microbatch=2, **plan)
        corrupted = [event for event in told if not isinstance(event, str) and event.name == "corrupted"]
        assert [(event.ranks, event.how) for event in corrupted] == [((flip["rank"],), how)], (plan, flip, told)
        assert corrupted[0].found in (flip["step"], flip["step"] + 1)
        assert f"{kind} of " in corrupted[0].what or how != "at rest"
        assert sorted(losses) == list(range(1, STEPS + 1))
        assert losses == undisturbed, "done again, to the bit"


NEAR_UPDATES = [
    ({"dp": 2, "zero": 1}, "weight", "after the update"),
    ({"dp": 2, "zero": 1}, "exp_avg", "before the update"),
    ({"dp": 2, "zero": 3}, "exp_avg_sq", "after the update"),
    ({"dp": 1, "tp": 2}, "weight", "after the update"),
    ({"dp": 1, "pp": 2}, "exp_avg", "after the update"),
    ({"dp": 1}, "weight", "before the update"),
]


@pytest.mark.multiproc
@pytest.mark.parametrize(
    "flips", [NEAR_UPDATES[:2], pytest.param(NEAR_UPDATES[2:], marks=pytest.mark.long)], ids=["few", "others"]
)
def test_a_bit_that_flips_beside_an_update_in_state_that_one_rank_holds_is_found(go, flips):
    """After the state was compared and before the update has read it, or between the update and the next comparison."""
    draw = random.Random(13)
    undisturbed = go(microbatch=2, dp=1)[0]
    for plan, kind, when in flips:
        world = resolve(_config(1, **plan)).plan.mesh.world
        drawn = {"step": (3, STEPS - 1), "rank": (0, world), "piece": (0, 99), "element": (0, 9999), "bit": (0, 31)}
        flip = {"kind": kind, "when": when} | {name: draw.randrange(*bounds) for name, bounds in drawn.items()}
        losses, told = go(flip, microbatch=2, **plan)
        corrupted = [event for event in told if not isinstance(event, str) and event.name == "corrupted"]
        assert [(event.ranks, event.how, event.found) for event in corrupted] == [
            ((flip["rank"],), "at rest", flip["step"])
        ], (plan, flip, told)
        assert f"{kind} of " in corrupted[0].what
        assert losses == undisturbed, "done again, to the bit"


@pytest.mark.multiproc
def test_between_checks_a_flip_spreads_and_is_still_told_from_what_it_spread_to(go):
    flip = {"kind": "weight", "when": "between steps", "step": 6, "rank": 1, "piece": 3, "element": 77, "bit": 29}
    losses, told = go(flip, every=4, microbatch=2, dp=2)
    corrupted = [event for event in told if not isinstance(event, str) and event.name == "corrupted"]
    assert [(event.ranks, event.found, event.how) for event in corrupted] == [((1,), 8, "replay")], told
    assert losses == go(every=4, microbatch=2, dp=2)[0]


def test_places_that_compute_otherwise_are_told_apart():
    def compute(broken, flaky=None):
        times = []

        def of(rows, place):
            times.append(None)
            return f"{rows}" + (" wrong" if place == broken else "") + (f" {len(times)}" if place == flaky else "")

        return of

    assert wrong_places(compute(None), 4) == ()
    assert [wrong_places(compute(broken), places) for broken, places in ((0, 3), (2, 4), (4, 5))] == [(0,), (2,), (4,)]
    assert wrong_places(compute(1), 2) == (), "of two that agree with themselves, none is known"
    assert wrong_places(compute(None, flaky=1), 2) == (1,)


def _computing_wrongly(rank, world, run, root, corpus, wrong):
    """As ``_go``, with a processor that adds wrongly on a rank, in steps 4 and 5."""
    put, steps_of = Grid.put_, []

    def broken(self, values):
        found = put(self, values)
        if rank == wrong and self.name.startswith("the gradient of") and steps_of and steps_of[-1] in (3, 4):
            found.view(-1)[0] *= 2  # what is the same whatever the rows are would not be seen
        return found

    step = CorpusTrainer.step

    def noting(self, *args, **rest):
        steps_of.append(rest["step"] - 1)
        return step(self, *args, **rest)

    Grid.put_, CorpusTrainer.step = broken, noting
    try:
        return _go(rank, world, run, root, corpus)
    finally:
        Grid.put_, CorpusTrainer.step = put, step


@pytest.mark.multiproc
def test_a_rank_that_computes_wrongly_is_found_by_those_that_compute_its_rows(pool, corpus, tmp_path):
    config = _config(None, dp=3, zero=2, microbatch=2)
    run = resolve(replace(config, state=replace(config.state, recompute_every=2)))
    found = pool.run(3, _computing_wrongly, run, str(tmp_path), str(corpus), 1, timeout_s=120)
    assert all(each == found[0] for each in found)
    losses, told = found[0]
    assert isinstance(told[-1], str), told
    events = [(event.name, getattr(event, "ranks", None)) for event in told[:-1]]
    assert events == [("rolled_back", None), ("corrupted", (1,))] * 3
    assert "fourth time" in told[-1]
    assert "Take rank 1 to another host" in told[-1]
    assert sorted(losses) == [1, 2, 3], "step 4 was not taken by a wrong gradient"
