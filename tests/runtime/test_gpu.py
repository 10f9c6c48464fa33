"""The engine on a GPU, against the same one-process reference on the CPU."""

import pytest
import torch
import torch.distributed as dist

import small
from superstep.numerics.tolerance import TOLERANCE
from superstep.plan.resolve import resolve
from superstep.runtime.device import Device
from superstep.runtime.launch import World
from superstep.train.proof.close import prove, write_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def world():
    device = Device("cuda", 0)
    torch.cuda.set_device(device.torch)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield World(0, 1, device)
    dist.destroy_process_group()


@pytest.mark.parametrize("compute", sorted(TOLERANCE))
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_one_gpu_computes_what_one_cpu_does(world, tmp_path, compute, recompute):
    run = resolve(small.config(packed=False, compute=compute, recompute=recompute, microbatch=2))
    batches = small.batches(packed=False)
    write_reference(run.shape, run.config.train, batches, tmp_path)
    verdict = prove(world, run, batches, tmp_path, reruns=True)
    assert verdict.is_proven, verdict.first and verdict.first.describe()
