"""The engine on a GPU, against the same one-process reference on the CPU, and what only a GPU can tell."""

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

import small
from bench import gpu as bench
from measured_operations import OPERATIONS
from superstep.comm.device import Device
from superstep.engine.instruction_timer import CudaRecorder
from superstep.engine.measure.launch_cost import launch_s
from superstep.engine.measure.probe_kernels import PASSES, TimingOptions, measure_operations
from superstep.launch.ranks import World
from superstep.numerics.tolerance import TOLERANCE
from superstep.plan.resolution.resolve import resolve
from superstep.train.proof.prove_tolerance import prove, write_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

GPU = Device("cuda", 0)
REAL = bench.Size(layers=2, width=512, heads=4, kv_heads=2, ffn=1408, vocab=1024, sequences=2)
"""2,048 tokens and heads 128 wide, where torch picks the kernels that a real run has."""


@pytest.fixture
def world(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as superstep prove does
    torch.cuda.set_device(GPU.torch)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield World(0, 1, GPU)
    dist.destroy_process_group()


@pytest.mark.parametrize("compute", sorted(TOLERANCE))
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_one_gpu_computes_what_one_cpu_does(world, tmp_path, compute, recompute):
    run = resolve(small.config(packed=False, compute=compute, recompute=recompute, microbatch=2))
    batches = small.batches(packed=False)
    write_reference(run.shape, run.config.train, batches, tmp_path)
    verdict = prove(world, run, batches, tmp_path, reruns=True)
    assert verdict.is_proven, verdict.first and verdict.first.describe()


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_so_it_does_at_real_sizes_and_in_one_order(world, tmp_path, schedule):
    run = REAL.run(schedule=schedule)
    batches = small.batches(sequences=REAL.sequences, tokens=REAL.tokens)
    write_reference(run.shape, run.config.train, batches, tmp_path)
    verdict = prove(world, run, batches, tmp_path, reruns=True)
    assert verdict.is_proven, verdict.first and verdict.first.describe()
    assert verdict.is_deterministic is True


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_blocks_of_attention_are_as_exact_as_torchs(dtype):
    found = bench.attention(GPU, (64, 80, 128), (2048, 333, 37), (dtype,))
    assert found["worst_error_over_torchs"] < 2


@pytest.mark.parametrize("counts", [(0, 640, 0, 1, 383, 0), (128,) * 8, (0, 0, 7)])
def test_experts_without_rows_get_nothing(counts):
    found = bench.experts(GPU, 512, 1024, counts)
    assert found["product_error"] < 1e-2
    assert found["gradient_error"] < 1e-2
    assert found["nobodys_rows_are_zero"]
    assert found["empty_experts_gradients_are_zero"]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_everything_that_a_run_measures_runs_there(dtype):
    gauge = TimingOptions(device=GPU, budget_s=0.001)
    products, copies = measure_operations(OPERATIONS, dtype, gauge)
    assert len(products) == 4
    assert {copy.kernel for copy in copies} == set(PASSES)
    assert 1e-7 < launch_s(gauge) < 1e-3


def test_a_steps_events_follow_one_another_and_hold_its_work():
    driven = bench.Driven(REAL.run(), World(0, 1, GPU))
    driven.step()
    record = CudaRecorder(GPU)
    driven.step(record=record)
    ran = record.ran()
    program = driven.engine.step_program.ranks[0]
    assert [r.index for r in ran] == list(range(len(program)))
    assert all(r.end_s >= r.start_s for r in ran)
    assert all(later.start_s >= earlier.end_s - 1e-6 for earlier, later in pairwise(ran))


def test_a_peak_is_near_its_prediction_and_the_free_memory_shrinks_by_what_is_held():
    for policy in bench.recompute(GPU, REAL)["policies"].values():
        assert 0.5 < policy["ratio"] < 2
    torch.cuda.empty_cache()
    free = GPU.free_bytes(ranks=1)
    held = torch.empty(2**28, dtype=torch.uint8, device=GPU.torch)
    assert free - GPU.free_bytes(ranks=1) == pytest.approx(held.nbytes, rel=0.1)
    assert GPU.capacity_bytes() > free
