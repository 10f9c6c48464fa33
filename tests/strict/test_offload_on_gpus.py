"""Activations in the memory of emulated GPUs' hosts: the CPU's losses, ordered uses of memory, and its peak."""

from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import test_layouts
import test_memory_of_gpus

from pool import RankError
from strict_ranks import prove_on_gpus
from superstep.cost.program.memory.memory_fit import memory_of
from superstep.engine.activations.copiers import StreamCopy
from superstep.plan.config import StateConfig
from superstep.train.proof.prove_tolerance import write_reference

pytestmark = pytest.mark.strict
HOST = {"activations": ("host",)}

LAYOUTS = {
    "one": {"layers": 6},
    "exact": {"layers": 6, "exact": True},
    "selective": {"layers": 6, "compute": "bf16", "recompute": "selective"},
    "full": {"layers": 6, "recompute": "full"},
    "zero 3": {"layers": 4, "dp": 2, "zero": 3},
    "tp": {"layers": 4, "tp": 2},
    "ring": {"layers": 4, "cp": 2, "context": "ring"},
    "1f1b": {"layers": 6, "pp": 2, "schedule": "1f1b"},
    "zb-v": {"layers": 6, "pp": 2, "chunks": 2, "schedule": "zb-v"},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_host_gives_the_cpus_losses(pool, tmp_path, name):
    run = test_layouts.run_of(**LAYOUTS[name], **HOST)
    test_layouts.assert_sound(pool, run, tmp_path, reruns=name == "one")


def test_the_disk_of_a_gpu_gives_the_cpus_losses(pool, tmp_path):
    run = test_layouts.run_of(layers=6, activations=("disk",))
    run = replace(run, config=replace(run.config, state=StateConfig(dir=str(tmp_path / "run"))))
    test_layouts.assert_sound(pool, run, tmp_path, reruns=False)


@pytest.mark.parametrize("layout", [{}, {"recompute": "full"}, {"pp": 2, "schedule": "1f1b"}], ids=str)
def test_the_peak_is_its_prediction(pool, layout):
    small_head = test_memory_of_gpus.MODEL | {"vocab": 256}
    run = test_memory_of_gpus.on_gpu({"layers": 8, **layout, **HOST}, small_head)
    plain = memory_of(test_memory_of_gpus.on_gpu({"layers": 8, **layout}, small_head))
    ranks = memory_of(run)
    for at, peak in pool.run(run.plan.mesh.world, test_memory_of_gpus.peak_of_steps, run, timeout_s=100):
        assert abs(peak / ranks[at].bytes - 1) < 0.02, (at, peak, ranks[at].bytes)
        assert peak < plain[at].bytes


def prove_without(waits, rank, world, *arguments):
    """The proof with one of the waits for copies left out: of offloads, or of reloads."""
    wait = StreamCopy.wait
    with mock.patch.object(StreamCopy, "wait", lambda copy: None if copy.is_out == (waits == "out") else wait(copy)):
        return prove_on_gpus(rank, world, *arguments)


@pytest.mark.parametrize("waits", ["out", "in"])
def test_a_wait_that_is_left_out_is_found(pool, tmp_path, waits):
    run = test_layouts.run_of(layers=6, **HOST)
    batches = test_layouts.batches_of(run)
    write_reference(run.shape, run.config.train, batches, tmp_path)
    with pytest.raises(RankError, match=r"race: .* on stream .*, and no event orders the two"):
        pool.run(1, partial(prove_without, waits), run, batches, tmp_path, timeout_s=60)
