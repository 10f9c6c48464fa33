"""Every layout of a mixture of experts computes what one device computes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import small
from longer import longer
from superstep.comm.device import Device
from superstep.launch.ranks import World
from superstep.plan.resolution.resolve import resolve
from superstep.train.proof.prove_tolerance import prove, write_reference

pytestmark = pytest.mark.multiproc


def run_of(router, compute="fp32", **plan):
    config = small.config(layers=small.layers_for(plan), packed=False, compute=compute, **plan)
    model = replace(config.model, experts=4, router=router, ffn=24, shared_experts=1, balance_weight=0.2, z_weight=0.05)
    return resolve(replace(config, model=model))


@pytest.fixture(scope="session")
def references(tmp_path_factory):
    root = tmp_path_factory.mktemp("mixtures")

    def folder(run):
        found = root / f"{run.shape.moe.router}-{run.shape.layers}"
        if not found.exists():
            found.mkdir()
            threads = torch.get_num_threads()
            torch.set_num_threads(1)
            write_reference(run.shape, run.config.train, small.batches(packed=False), found)
            torch.set_num_threads(threads)
        return str(found)

    return folder


def _prove_all(rank, world, cases):
    batches = small.batches(packed=False)
    here = World(rank, world, Device("cpu"))
    return [
        prove(here, run, batches, Path(folder), reruns=number % 3 == 0) for number, (run, folder) in enumerate(cases)
    ]


LAYOUTS = {
    1: [{}, {"microbatch": 2, "recompute": "full"}, {"recompute": "selective"}],
    2: [
        {"dp": 2},
        {"dp": 2, "ep": 2, "zero": 1, "recompute": "full"},
        {"tp": 2, "ep": 2, "recompute": "selective"},
        {"tp": 2, "ep": 2, "sequence_parallel": False, "zero": 3},
        {"tp": 2, "sequence_parallel": False, "recompute": "selective"},
        {"tp": 2, "zero": 3},
        {"cp": 2, "ep": 2, "zero": 2},
        {"cp": 2, "context": "ulysses", "recompute": "full"},
        {"pp": 2, "chunks": 2, "recompute": "selective"},
        {"pp": 2, "schedule": "zb-h1", "recompute": "full"},
    ],
    4: [
        {"dp": 4, "ep": 4, "zero": 3},
        {"dp": 4, "ep": 2, "zero": 3, "recompute": "selective"},
        {"dp": 2, "tp": 2, "ep": 4},
        {"dp": 2, "tp": 2, "ep": 2, "zero": 3},
        {"dp": 2, "cp": 2, "ep": 4, "zero": 1},
        {"cp": 2, "tp": 2, "ep": 4, "sequence_parallel": False},
        {"cp": 2, "tp": 2, "ep": 2, "zero": 2},
        {"pp": 2, "dp": 2, "ep": 2, "zero": 2, "recompute": "full"},
        {"pp": 2, "tp": 2, "ep": 2, "zero": 3},
        {"pp": 2, "dp": 2, "ep": 2, "schedule": "zb-v", "chunks": 2, "zero": 2},
        {"dp": 4, "ep": 2, "zero": 3, "replicas": 2},
    ],
}


ROUTERS = ("dropless", "switch", "top2", "noisy-topk")


def dealt(router, world):
    """Every fourth layout for a router, so that each layout meets one: all meet all where there is time."""
    return LAYOUTS[world][ROUTERS.index(router) :: len(ROUTERS)]


def assert_proven(pool, references, world, router, plans):
    cases = [(run, references(run)) for run in (run_of(router, **plan) for plan in plans)]
    verdicts = pool.run(world, _prove_all, cases, timeout_s=300)[0]
    wrong = [
        (plan, verdict.first and verdict.first.describe(), verdict.is_deterministic)
        for plan, verdict in zip(plans, verdicts, strict=True)
        if not verdict.is_proven
    ]
    assert wrong == []


def test_every_layout_meets_a_router_and_every_router_each_way_to_share_tokens():
    for world, plans in LAYOUTS.items():
        for plan in plans:
            assert sum(plan in dealt(router, world) for router in ROUTERS) == 1
    for router in ROUTERS:
        axes = {axis for world in (2, 4) for plan in dealt(router, world) for axis in plan}
        assert axes >= {"dp", "cp", "tp", "ep", "zero"}, router


@pytest.mark.parametrize(
    ("router", "world"),
    longer(
        [(router, world) for router in ROUTERS for world in LAYOUTS if dealt(router, world)],
        lambda case: case[1] > 2,
    ),
)
def test_layouts_compute_what_one_device_computes(pool, references, world, router):
    assert_proven(pool, references, world, router, dealt(router, world))


@pytest.mark.slow
@pytest.mark.parametrize("world", LAYOUTS)
@pytest.mark.parametrize("router", ROUTERS)
def test_every_layout_computes_what_one_device_computes(pool, references, world, router):
    assert_proven(pool, references, world, router, LAYOUTS[world])
