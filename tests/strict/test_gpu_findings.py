"""Faults of the GPU path that were found by reading once: put back, each is seen on an emulated GPU."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import small
from strict_ranks import device_module, gpu_of
from superstep.comm.device import Device
from superstep.comm.mesh import build_mesh
from superstep.comm.objects import gather
from superstep.engine.engine import Engine
from superstep.engine.values.microbatch import microbatches_of, rows
from superstep.launch import ranks
from superstep.model import fused_attention
from superstep.model.axes import units
from superstep.model.mixture import expert_dispatch, experts
from superstep.plan.config import ModelConfig
from superstep.plan.resolution.resolve import resolve
from superstep.train.proof.prove_tolerance import TIMEOUT

pytestmark = pytest.mark.strict

EXPERTS = ModelConfig(name="tiny", layers=2, experts=4, experts_per_token=2)


def filled_in_place(x_RI, matrix_EIO, rows_E):
    """The result of the kernel, which selective recompute keeps, is changed."""
    end_E = rows_E.cumsum(0, dtype=torch.int32)
    is_nobodys_R = torch.arange(len(x_RI), device=x_RI.device) >= end_E[-1]
    return F.grouped_mm(x_RI, matrix_EIO, offs=end_E).masked_fill_(is_nobodys_R[:, None], 0.0)


def rows_counted_on_the_host(expert_Tk, count):
    """Rows are counted by an operator whose result has a size that the host waits for."""
    expert_R = expert_Tk.flatten()
    order_R = expert_R.where(expert_R >= 0, count).sort(stable=True).indices
    return order_R, torch.bincount(expert_R.where(expert_R >= 0, count), minlength=count + 1)[:count]


def step_of_experts(rank, world, planted):
    """What a step of experts with selective recompute ends in, and the lines that the host waited in."""
    run = resolve(
        replace(small.config(layers=2, compute="bf16", recompute="selective", kernels="torch"), model=EXPERTS)
    )
    with pytest.MonkeyPatch.context() as patch, gpu_of(rank, world) as (device, report):
        for name, function in planted.items():
            for module in (experts, expert_dispatch):
                patch.setattr(module, name, function, raising=False)
        mesh = build_mesh(run.plan, rank, device, timeout=TIMEOUT)
        engine = Engine(run, units(run.shape), mesh)
        (batch,) = small.batches(steps=1)
        mine = microbatches_of(batch.rows(rows(run.plan, mesh)), run.plan, mesh)
        try:
            engine.train_step(mine, valid_tokens=batch.valid_tokens, lr=1e-3)
            said = ""
        except RuntimeError as error:
            said = str(error)
        mesh.destroy()
        waits = [line for line in device_module().take_host_waits() if "superstep/model/" in line]
        report()
        return said, waits


def test_a_kept_result_of_the_experts_kernel_that_is_changed_is_named(pool):
    ((said, waits),) = pool.run(1, step_of_experts, {})
    assert (said, waits) == ("", [])
    ((said, _),) = pool.run(1, step_of_experts, {"kernel_products": filled_in_place})
    assert "mutated" in said


def test_a_wait_of_the_host_in_every_layer_is_named(pool):
    ((said, waits),) = pool.run(1, step_of_experts, {"sort_by_expert": rows_counted_on_the_host})
    assert not said
    assert [line.split(" ")[0] for line in waits] == ["aten::bincount"]


@pytest.mark.parametrize("width", [8, 6])
def test_scores_of_grouped_heads_in_fp32_are_not_made_whole(width, monkeypatch):
    q, k = (torch.ones(1, heads, 1024, width, device="cuda") for heads in (8, 2))
    scores_bytes = 8 * 1024 * 1024 * 4

    def peak_bytes():
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        device_module().reset_peak(0)
        fused_attention.fused_attention(q, k, k)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    assert peak_bytes() < scores_bytes / 8
    monkeypatch.setattr(fused_attention, "expand_heads", lambda x, q: x)
    assert peak_bytes() > scores_bytes


def contexts_after_a_barrier(world):
    dist.barrier()
    return gather(device_module().contexts(), set[int])


class UnboundSeat(ranks.RankSlot):
    """The default group is given no GPU, and NCCL guesses one by the rank's number."""

    def take(self, device):
        with mock.patch.object(Device, "of_groups", None):
            super().take(device)


def test_a_barrier_of_a_group_without_a_gpu_of_its_own_takes_another_ranks(monkeypatch):
    """Ranks 0 and 1 have GPUs 2 and 3."""
    assert ranks.launch_from(2, "cuda", 2, contexts_after_a_barrier) == [{2}, {3}]
    monkeypatch.setattr(ranks, "RankSlot", UnboundSeat)
    assert ranks.launch_from(2, "cuda", 2, contexts_after_a_barrier) == [{0, 2}, {1, 3}]


def test_memory_that_a_gpu_refuses_to_register_fails_no_kernel_that_follows():
    gpu, memory, is_registered = Device("cuda", 0), torch.empty(1 << 16), "the requested memory range is already mapped"
    assert gpu.pin(memory.data_ptr(), memory.nbytes) == ""
    assert is_registered in gpu.pin(memory.data_ptr(), memory.nbytes)
    assert torch.ones(2, device="cuda").sum().item() == 2
    # Not looked at, in the thread that computes.
    torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    with pytest.raises(RuntimeError, match=f"CUDA error: .*{is_registered}"):
        torch.ones(2, device="cuda")
    assert torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()) == 0
