"""Layouts on emulated GPUs whose streams run in other orders, and with pauses: the same numbers, and no race."""

from dataclasses import replace

import pytest
from test_layouts import LAYOUTS

import small
from strict_ranks import SETTINGS, prove_on_gpus
from superstep.plan.resolution.resolve import resolve
from superstep.train.proof.prove_tolerance import write_reference

pytestmark = pytest.mark.strict

ORDERS = ("issued", "seeded", "latest")
DELAY_US = 500
SOME = ("zero 2 bf16", "zero 3 full", "sp bf16", "ring masked", "ulysses", "zb-v")
SEEDS = 10


def settings(order, seed):
    return replace(SETTINGS, order=order, seed=seed, delay_us=DELAY_US if order == "seeded" else 0)


def assert_sound(pool, folder, name, ways):
    layout = LAYOUTS[name]
    config = small.config(packed=False, **{"microbatch": 2, "layers": small.layers_for(layout), **layout})
    run, batches = resolve(config), small.batches(packed=False)
    write_reference(run.shape, run.config.train, batches, folder)
    for way in ways:
        found = pool.run(run.plan.mesh.world, prove_on_gpus, run, batches, folder, None, settings(*way), timeout_s=60)
        for first, observed in found:
            assert first is None, way
            assert observed.races == {}, way


@pytest.mark.parametrize("name", SOME)
def test_a_layout_gives_the_cpus_losses_in_any_order(pool, tmp_path, name):
    assert_sound(pool, tmp_path, name, [(order, 1) for order in ORDERS])


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_does_with_many_seeds(pool, tmp_path, name):
    assert_sound(pool, tmp_path, name, [(order, seed) for order in ORDERS for seed in range(SEEDS)])
