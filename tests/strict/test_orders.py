"""Layouts on emulated GPUs whose streams run in other orders, and with pauses: the same numbers, and no race.

    python -m pytest -p on_strict_device -m "strict and slow" tests/strict/test_orders.py

runs every layout in three orders with ten seeds.
"""

import gc
import os
from dataclasses import replace

import pytest
import test_layouts
import test_models_on_gpus
import torch
from test_models_on_gpus import EXACT, both_factors_at_work, relay_of, run_exactly

from strict_ranks import SETTINGS, device_module, prove_bits_on_gpus, prove_on_gpus
from superstep.plan.resolution.resolve import resolve
from superstep.train.proof.prove_tolerance import write_reference

pytestmark = pytest.mark.strict

ORDERS = ("issued", "seeded", "latest")
DELAY_US = 500
SOME = ("zero 2 bf16", "zero 3 full", "sp bf16", "ring masked", "ulysses", "zb-v")
SEEDS = 10
MANY = [(order, seed) for order in ORDERS for seed in range(SEEDS)]


def settings(order, seed):
    return replace(SETTINGS, order=order, seed=seed, delay_us=DELAY_US if order == "seeded" else 0)


def run_of(name):
    """The run of a layout, and its batches."""
    if name in test_layouts.LAYOUTS:
        run = test_layouts.run_of(**test_layouts.LAYOUTS[name])
        return run, test_layouts.batches_of(run)
    run = resolve(test_models_on_gpus.config(**test_models_on_gpus.LAYOUTS[name]))
    return run, test_models_on_gpus.batches(run)


def specs_of(run):
    return both_factors_at_work(run) if run.config.lora else None


def prove_in_order(rank, world, run, batches, folder, way):
    """As ``prove_on_gpus``, and what is left on the GPU: bytes of memory, tasks under way, threads."""
    before = left_on(rank)
    first, observed = prove_on_gpus(rank, world, run, batches, folder, specs_of(run), settings(*way))
    return first, observed, [after - had for after, had in zip(left_on(rank), before, strict=True)]


def left_on(rank):
    gc.collect()
    torch.cuda.synchronize(rank)  # for the poison of what was freed
    return torch.cuda.memory_allocated(rank), len(device_module().under_way()), len(os.listdir("/proc/self/task"))


def assert_sound(found, way):
    for first, observed, *_ in found:
        assert not first, way
        assert observed.races == {}, way


def assert_losses(pool, folder, name, ways):
    run, batches = run_of(name)
    write_reference(specs_of(run) or run.shape, run.config.train, batches, folder)
    for number, way in enumerate(ways):
        world = run.plan.mesh.world
        found = pool.run(world, prove_in_order, run, batches, folder, way, timeout_s=110)
        assert_sound(found, way)
        for *_, (left_bytes, tasks, threads) in found if number else ():  # of the first run, torch's own threads stay
            assert (left_bytes, tasks, max(0, threads)) == (0, 0, 0), way


@pytest.mark.parametrize("name", SOME)
def test_a_layout_gives_the_cpus_losses_in_any_order(pool, tmp_path, name):
    assert_losses(pool, tmp_path, name, [(order, 1) for order in ORDERS])


@pytest.mark.slow
@pytest.mark.parametrize("name", [*test_layouts.LAYOUTS, *test_models_on_gpus.LAYOUTS])
def test_every_layout_does_with_many_seeds(pool, tmp_path, name):
    assert_losses(pool, tmp_path, name, MANY)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_exact_mode_gives_the_cpus_digits_with_many_seeds(pool, tmp_path, name):
    run, batches = run_exactly(pool, tmp_path, name)
    relay, world = relay_of(tmp_path), run.plan.mesh.world
    for way in MANY:
        found = pool.run(world, prove_bits_on_gpus, run, batches, tmp_path, relay, settings(*way), timeout_s=110)
        assert_sound(found, way)
