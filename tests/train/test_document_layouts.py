"""Documents apart in packed sequences: every layout computes what each document gives alone."""

from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
import torch

import small
from longer import many_ranks
from superstep.comm.device import Device
from superstep.comm.mesh import build_mesh
from superstep.engine.attention import choose_attention
from superstep.engine.engine import Engine
from superstep.engine.parallel import ring
from superstep.engine.values.microbatch import microbatches
from superstep.launch.ranks import World
from superstep.model.axes import units
from superstep.model.decoder import Decoder
from superstep.model.unit import initial, parameters
from superstep.numerics.loss import IGNORE, cross_entropy_sum
from superstep.numerics.tolerance import TOLERANCE
from superstep.plan.config import ModelConfig, PlanConfig
from superstep.plan.resolution.resolve import resolve
from superstep.train.proof.prove_exact import Relay, prove_exact, write_bits
from superstep.train.proof.prove_tolerance import prove, write_reference
from superstep.train.weights.model import resolve_config, units_of

pytestmark = pytest.mark.multiproc

OWN = Path(__file__).parents[2] / "recipes" / "own_model.py"
RULES = (("attention", "tp"), ("hidden", "tp"), ("words", "tp"))
TOKENS = 32


def config(*, layers=None, experts=False, exact=False, compute="fp32", pieces=None, **plan):
    pieces = (pieces or small.pieces_for(plan)) if exact else None
    found = small.config(layers=layers or small.layers_for(plan), compute=compute, **plan)
    if experts:
        model = replace(found.model, experts=4, router="dropless", ffn=24, shared_experts=1, balance_weight=0.2)
        found = replace(found, model=model)
    if exact:  # heads that the kernel takes
        found = replace(found, model=replace(found.model, head_dim=16))
    return replace(
        found,
        data=replace(found.data, sequence_tokens=TOKENS, document_mask=True),
        numerics=replace(found.numerics, exact=exact, exact_chunks=pieces),
    )


def own(**plan):
    """A model with learned positions, which alone show on which ranks positions begin anew."""
    model = ModelConfig(source=str(OWN), layers=3, width=32, heads=4, vocab=small.VOCAB)
    return replace(config(), model=model, plan=PlanConfig(rules=RULES, **plan))


def batches():
    return small.batches(tokens=TOKENS, masked=True)


LAYOUTS = {
    1: [{"recompute": "full"}, {"recompute": "selective", "chunks": 2, "schedule": "interleaved", "microbatch": 2}],
    2: [
        {"dp": 2, "zero": 3, "recompute": "selective"},
        {"pp": 2, "microbatch": 2, "schedule": "gpipe"},
        {"cp": 2, "context": "ulysses", "recompute": "full"},
        {"experts": True, "dp": 2, "ep": 2, "zero": 2},
        {"experts": True, "cp": 2, "ep": 2},
        {"compute": "bf16", "cp": 2},
        {"compute": "bf16", "tp": 2},
    ],
    4: [
        {"cp": 4, "zero": 3},
        {"cp": 4, "context": "ulysses"},
        {"cp": 2, "tp": 2},
        {"cp": 2, "pp": 2, "microbatch": 2, "schedule": "zb-h1"},
        {"pp": 2, "chunks": 2, "dp": 2, "zero": 2, "microbatch": 1, "schedule": "interleaved"},
        {"experts": True, "cp": 2, "tp": 2, "ep": 4},
    ],
}
MORE_LAYOUTS = {
    2: [
        {"pp": 2, "microbatch": 1, "schedule": "zb-h1"},
        {"pp": 2, "microbatch": 2, "schedule": "zb-v", "chunks": 2},
        {"pp": 2, "microbatch": 2, "schedule": "breadth-first", "chunks": 2, "recompute": "full"},
        {"tp": 2},
        {"tp": 2, "sequence_parallel": False, "recompute": "selective"},
        {"cp": 2, "recompute": "selective"},
    ]
}
"""What ``test_parity`` meets as well, and the four ranks above."""

OWN_LAYOUTS = {2: [{"tp": 2}, {"cp": 2}, {"dp": 2, "zero": 1}, {"pp": 2, "microbatch": 2}], 4: [{"cp": 2, "tp": 2}]}


def _close(rank, world, cases):
    here = World(rank, world, Device("cpu"))
    return [prove(here, run, batches(), Path(folder), reruns=number == 0) for number, (run, folder) in enumerate(cases)]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The folder of the reference's results, made once for each model."""
    root = tmp_path_factory.mktemp("references")

    def folder(run):
        name = run.config.model.source
        if not name:
            name = f"layers={run.shape.layers} heads={run.shape.head_dim} experts={run.shape.moe is not None}"
        found = root / Path(name).stem
        if not found.exists():
            found.mkdir()
            torch.set_num_threads(1)
            write_reference(run.decoder or units_of(run), run.config.train, batches(), found)
        return str(found)

    return folder


@pytest.mark.parametrize("world", many_ranks(LAYOUTS))
def test_layouts_compute_what_one_device_does(pool, reference, world):
    runs = [resolve(config(**layout)) for layout in LAYOUTS[world]]
    runs += [resolve_config(own(**layout)) for layout in OWN_LAYOUTS.get(world, [])]
    assert_proven(pool, reference, world, runs)


@pytest.mark.slow
@pytest.mark.parametrize("world", MORE_LAYOUTS)
def test_more_layouts_compute_what_one_device_does(pool, reference, world):
    assert_proven(pool, reference, world, [resolve(config(**layout)) for layout in MORE_LAYOUTS[world]])


def assert_proven(pool, reference, world, runs):
    verdicts = pool.run(world, _close, [(run, reference(run)) for run in runs], timeout_s=300)[0]
    for run, verdict in zip(runs, verdicts, strict=True):
        assert verdict.is_proven, (run.config.plan, verdict.first and verdict.first.describe())


EXACT = {
    2: [
        {"cp": 2},
        {"cp": 2, "context": "ulysses"},
        {"dp": 2, "zero": 3, "recompute": "full"},
        {"experts": True, "cp": 2, "ep": 2},
        {"compute": "bf16", "cp": 2},
    ],
    4: [{"cp": 4}, {"cp": 2, "tp": 2}, {"cp": 2, "pp": 2}],
}


def _bits(rank, world, cases):
    found = []
    for run, folder in cases:
        relay = Relay(take=Path(folder) / "checkpoint", leave=None, step=1)
        found.append(prove_exact(World(rank, world, Device("cpu")), run, batches(), Path(folder), relay))
    return found


def _write(rank, world, run, folder):
    return write_bits(World(rank, world, Device("cpu")), run, batches(), Path(folder), stop=1)


@pytest.fixture(scope="module")
def bits(pool, tmp_path_factory):
    """The folder of one rank's bits, made once for each model and dtype."""
    folders = {}

    def folder(layout):
        kind = {name: layout[name] for name in ("experts", "compute") if name in layout}
        kind |= {"layers": small.layers_for(layout), "microbatch": small.microbatch_for(layout)}
        kind |= {"pieces": small.pieces_for(layout)}
        if str(kind) not in folders:
            folders[str(kind)] = str(tmp_path_factory.mktemp("bits"))
            pool.run(1, _write, resolve(config(exact=True, **kind)), folders[str(kind)], timeout_s=100)
        return folders[str(kind)]

    return folder


@pytest.mark.parametrize("world", many_ranks(EXACT, most=1))
def test_in_exact_mode_layouts_give_the_same_bits(pool, bits, world):
    cases = [
        (resolve(config(exact=True, **{"microbatch": small.microbatch_for(layout)} | layout)), bits(layout))
        for layout in EXACT[world]
    ]
    verdicts = pool.run(world, _bits, cases, timeout_s=300)[0]
    for layout, verdict in zip(EXACT[world], verdicts, strict=True):
        told = [d.describe() for d in (verdict.first, verdict.first_resumed) if d]
        assert verdict.is_proven, (layout, told)


def _engine(rank, world, run, batch):
    """The loss of a batch, summed over its targets, and the gradients of it by name."""
    mesh = build_mesh(run.plan, rank, Device("cpu"), timeout=timedelta(seconds=60))
    engine = Engine(run, units(run.shape), mesh)
    parts = microbatches(batch.tokens_BS, batch.targets_BS, run.plan, mesh, batch.starts_BS)
    loss, tokens = engine.evaluate(parts)
    gradients = {}

    def keep():
        gradients.update({p.name: p.values.detach().view(p.shape).clone() for p in engine.pieces(["gradient"])})

    engine.train_step(parts, valid_tokens=batch.valid_tokens, lr=0.0, inspect=keep)
    mesh.destroy()
    return loss, tokens, gradients


def _alone(run, batch):
    """The same of a plain decoder that is given each document as a sequence of its own."""
    model = Decoder(run.shape)
    specs = parameters(model, units(run.shape))
    with torch.no_grad():
        for spec, param in specs.values():
            param.copy_(initial(spec, param.shape, run.config.train.seed))
    total, tokens = 0.0, 0
    for row, (ids, targets) in enumerate(zip(batch.tokens_BS, batch.targets_BS, strict=True)):
        for a, b in pairwise([*batch.starts_BS[row].unique().tolist(), TOKENS]):
            loss = cross_entropy_sum(model(ids[None, a:b]), targets[None, a:b])
            loss.backward()
            total, tokens = total + loss.item(), tokens + int((targets[a:b] != IGNORE).sum())
    return total, tokens, {name: param.grad / batch.valid_tokens for name, (_, param) in specs.items()}


@pytest.mark.parametrize("exact", [False, True])
def test_a_packed_document_has_the_loss_and_the_gradient_that_it_has_alone(pool, exact):
    run, (batch, _) = resolve(config(exact=exact, dp=1)), batches()
    assert len(batch.starts_BS.unique()) > 10
    ours, theirs = pool.run(1, _engine, run, batch)[0], _alone(run, batch)
    allowed = TOLERANCE["fp32"]
    assert ours[0] == pytest.approx(theirs[0], rel=allowed.loss)
    assert ours[1] == theirs[1] == batch.valid_tokens
    for name, gradient in theirs[2].items():
        assert (ours[2][name] - gradient).norm() <= allowed.gradient * gradient.norm(), name


def _positions_go_on(rank):
    """Rank 1 counts on from the start of the sequence."""
    inner = choose_attention.build_sight

    def build(*args):
        inside, across = inner(*args), inner(*args)(None)
        count = torch.arange(TOKENS) if across.positions is None else across.positions

        def sight(starts):
            return replace(inside(starts), positions=count.expand(len(starts), -1))

        return sight

    return mock.patch("superstep.engine.build.build_sight", build if rank == 1 else inner)


def _no_mask_on_one_rank(rank):
    inner = choose_attention.build_sight

    def build(*args):
        inside = inner(*args)
        return lambda starts: replace(inside(starts), attend=inside(None).attend)

    return mock.patch("superstep.engine.build.build_sight", build if rank == 1 else inner)


def _no_mask_in_one_turn(rank):
    inner = ring.rectangles_of

    def rectangles(block, tokens, documents):
        return inner(block, tokens, None if rank == 1 else documents)

    return mock.patch.object(ring, "rectangles_of", rectangles)


def _documents_of_the_rows_before(rank):
    """A microbatch gets the documents of another one."""
    inner = choose_attention.build_sight

    def build(*args):
        inside = inner(*args)
        return lambda starts: inside(starts.roll(1, 0))

    return mock.patch("superstep.engine.build.build_sight", build)


FAULTS = [
    (_positions_go_on, config(cp=2)),
    (_positions_go_on, config(cp=2, context="ulysses")),
    (_positions_go_on, own(dp=2)),
    (_no_mask_on_one_rank, config(dp=2)),
    (_no_mask_on_one_rank, config(pp=2, microbatch=2)),
    (_no_mask_on_one_rank, config(tp=2)),
    (_no_mask_in_one_turn, config(cp=2)),
    (_documents_of_the_rows_before, config(dp=2)),
    (_no_mask_on_one_rank, config(tp=2, exact=True)),
]


def _close_with(rank, world, cases):
    found = []
    for fault, run, folder in cases:
        with fault(rank):
            found.append(prove(World(rank, world, Device("cpu")), run, batches(), Path(folder), reruns=False))
    return found


def test_a_planted_fault_is_caught(pool, reference):
    runs = [resolve_config(config) for _, config in FAULTS]
    cases = [(fault, run, reference(run)) for (fault, _), run in zip(FAULTS, runs, strict=True)]
    for (fault, run, _), verdict in zip(cases, pool.run(2, _close_with, cases, timeout_s=100)[0], strict=True):
        assert verdict.first is not None, (fault.__name__, run.config.plan)
        assert verdict.first.kind == "loss", verdict.first.describe()
