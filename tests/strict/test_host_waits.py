"""Where the host waits for an emulated GPU within a training step: on a GPU nothing is issued meanwhile."""

import math
import re
from collections import Counter

import pytest
import torch
from test_models_on_gpus import batches, config

from strict_ranks import device_module, gpu_of
from superstep.comm.mesh import build_mesh
from superstep.comm.objects import RankPeers
from superstep.engine.engine import Engine
from superstep.engine.values.microbatch import microbatches_of, rows
from superstep.numerics.fixed_point import PARAMETER, RangeExcess
from superstep.plan.resolution.resolve import resolve
from superstep.train.policy.corruption_check import Integrity
from superstep.train.proof.prove_tolerance import TIMEOUT
from superstep.train.weights.model import units_of

pytestmark = pytest.mark.strict


def waits_of_a_step(rank, world, run):
    """Of a second step, its batch included: how often the host waited, by operator and line, before the update and in
    it.
    """
    batch, device = batches(run)[0], device_module()
    with gpu_of(rank, world) as (gpu, report):
        mesh = build_mesh(run.plan, rank, gpu, timeout=TIMEOUT)
        engine = Engine(run, units_of(run), mesh)
        before = {}
        inner = engine._executor._step

        def update(*args):
            before.update(device.take_host_waits())
            return inner(*args)

        engine._executor._step = update
        for _ in range(2):
            before.clear()
            report()
            mine = microbatches_of(batch.rows(rows(run.plan, mesh)), run.plan, mesh)
            engine.train_step(mine, valid_tokens=batch.valid_tokens, lr=1e-3)
            after = device.take_host_waits()
        races = report().races
        mesh.destroy()
    return before, after, races


LAYOUTS = {
    "fp16": {"compute": "fp16"},
    "dense": {},
    "tp": {"tp": 2, "sequence_parallel": True},
    "zero 3": {"dp": 2, "zero": 3, "recompute": "full"},
    "pp": {"pp": 2, "schedule": "zb-h1"},
    "ulysses": {"cp": 2, "context": "ulysses"},
    "documents": {"documents": True},
    "documents ring": {"documents": True, "cp": 2},
    "documents of fp32": {"documents": True, "compute": "fp32"},
    "lora": {"lora": True},
    "experts": {"router": "dropless"},
    "experts with noise": {"router": "noisy-topk", "recompute": "selective"},
    "ep": {"router": "dropless", "dp": 2, "ep": 2},
    "ep with places": {"router": "switch", "tp": 2, "ep": 2},
    "experts of fp32": {"router": "dropless", "compute": "fp32"},
}

EXCHANGED_SIZES = "superstep/engine/parallel/expert.py"
"""An exchange of unequal parts takes their sizes from the host: once in each forward pass of a mixture."""
PRODUCT_OF_EACH = "superstep/model/mixture/experts.py"
"""Outside of bf16 torch has no kernel for the products of all experts: each is a call, whose size the host has to know:
twice in a forward pass of three products and in the gradients of their inputs, once in each gradient of a weight."""
BLOCKS = 2 * 2
"""Two layers, and as many microbatches on a rank."""
WAITS = {
    "ep": {EXCHANGED_SIZES: BLOCKS},
    "ep with places": {EXCHANGED_SIZES: BLOCKS},
    "experts of fp32": {PRODUCT_OF_EACH: 9 * BLOCKS},
}


def by_file(waits):
    """How often the host waited, by the file of the innermost line."""
    found = Counter()
    for where, count in waits.items():
        found[re.search(r"\((\S+?):\d+", where).group(1)] += count
    return dict(found)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_host_waits_for_sizes_of_experts_alone_and_once_for_the_loss(pool, name):
    run = resolve(config(**{"layers": 2, "compute": "bf16"} | LAYOUTS[name]))
    for before, in_update, races in pool.run(run.plan.mesh.world, waits_of_a_step, run, timeout_s=60):
        assert by_file(before) == WAITS.get(name, {}), before
        assert by_file(in_update) == {"superstep/engine/optimizer.py": 1}, in_update
        assert races == {}


def test_the_host_waits_for_the_rows_of_exact_experts(pool):
    """Once in each product's forward pass, and in each gradient of a weight for its parts and for their sizes."""
    run = resolve(config(layers=2, compute="bf16", router="dropless", exact=True))
    ((before, _, races),) = pool.run(1, waits_of_a_step, run, timeout_s=60)
    assert by_file(before)["superstep/engine/exact/experts.py"] == 9 * BLOCKS, before
    assert races == {}


@pytest.mark.parametrize("term", [1.0, math.inf, math.nan])
def test_a_term_without_room_is_found_at_the_end_of_a_step(term):
    excess, gpu = RangeExcess(), torch.device("cuda", 0)
    grid = PARAMETER.of(4, "the gradient of w", excess)
    large = torch.full((3,), term * grid.limit).to(gpu)
    device_module().take_host_waits()
    grid.put_(torch.ones(4, device=gpu))
    is_found_before = excess.is_exceeded(gpu)
    grid.put_(large)
    grid.put_(torch.ones(4, device=gpu))
    is_exceeded = excess.is_exceeded(gpu)
    assert device_module().take_host_waits() == {}
    assert (is_found_before.item(), is_exceeded.item()) == (False, True)
    assert excess.message().startswith("the gradient of w has a term of ")
    excess.clear()
    assert (excess.is_exceeded(gpu).item(), excess.message()) == (False, "")


def waits_of_a_check(rank, world, run):
    """Of a step whose state is checked, once before and once in the end: how often the host waited in its update and in
    the check, by operator and line.
    """
    batch = batches(run)[0]
    with gpu_of(rank, world) as (gpu, report):
        mesh = build_mesh(run.plan, rank, gpu, timeout=TIMEOUT)
        engine = Engine(run, units_of(run), mesh)
        integrity = Integrity(1, engine, RankPeers(rank, world))
        integrity.begin(0)
        for step in (1, 2):
            integrity.watch(is_due=True)
            mine = microbatches_of(batch.rows(rows(run.plan, mesh)), run.plan, mesh)
            report()
            engine.train_step(mine, valid_tokens=batch.valid_tokens, lr=1e-3)
            in_step = report().host_waits
            found = integrity.check(step)[1]
            in_check = report().host_waits
        mesh.destroy()
    return in_step, in_check, found


def test_the_host_waits_in_a_check_for_what_it_says_alone(pool):
    run = resolve(config(layers=2, compute="bf16", dp=2))
    for in_step, in_check, found in pool.run(2, waits_of_a_check, run, timeout_s=60):
        assert found is None
        assert by_file(in_step) == {"superstep/engine/optimizer.py": 1}, in_step
        assert by_file(in_check) == {"superstep/train/policy/corruption_check.py": 3}, in_check
