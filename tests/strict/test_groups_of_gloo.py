"""Process groups that Gloo has a part in, on emulated GPUs: tensors of the host, and those of a GPU by way of it."""

import re

import pytest
import torch
import torch.distributed as dist

from strict_ranks import gpu_of
from superstep.errors import CollectiveError

pytestmark = pytest.mark.strict


def collectives(group, place, rank, world):
    """The numbers of each collective."""
    x = torch.arange(4.0, device=place) + rank
    total, first, parts = x.clone(), x.clone(), [torch.empty(4, device=place) for _ in range(world)]
    whole, exchanged, on_one = torch.empty(4 * world, device=place), torch.empty(4, device=place), x.clone()
    dist.all_reduce(total, group=group)
    dist.broadcast(first, 1, group=group)
    dist.all_gather(parts, x, group=group)
    dist.all_gather_into_tensor(whole, x, group=group)
    dist.all_to_all_single(exchanged, x, group=group)
    dist.reduce(on_one, 0, group=group)
    own = torch.empty(4, device=place)
    dist.scatter(own, parts if rank == 0 else None, 0, group=group)
    on_root = [torch.empty(4, device=place) for _ in range(world)] if rank == 1 else None
    dist.gather(x, on_root, 1, group=group)
    of_root = torch.stack(on_root or [x])
    found = [total, first, torch.stack(parts), whole, exchanged, own, of_root, *([on_one] if rank == 0 else [])]
    return [each.cpu().tolist() for each in found]


def objects(group, rank, world):
    found = [None] * world
    dist.all_gather_object(found, {"rank": rank}, group=group)
    return found


def both(rank, world):
    with gpu_of(rank, world) as (device, report):
        two, gloo = dist.new_group(backend="cpu:gloo,cuda:nccl"), dist.new_group(backend="gloo")
        host = torch.device("cpu")
        found = [
            collectives(*which, rank, world)
            for which in ((two, host), (two, device.torch), (gloo, host), (gloo, device.torch))
        ]
        met = torch.zeros(2)
        ends = {"send": dist.isend, "recv": dist.irecv}
        op = dist.P2POp(ends["send" if rank == 0 else "recv"], met + 1 if rank == 0 else met, 1 - rank, two)
        for work in dist.batch_isend_irecv([op]):
            work.wait()
        refused = []
        for end, call in ends.items():
            with pytest.raises(CollectiveError) as error:
                call(torch.ones(2, device=device.torch), 1 - rank, group=gloo)
            refused.append((end, str(error.value)))
        dist.barrier(two)
        return found, objects(two, rank, world), met.tolist(), refused, report().races


def test_tensors_of_the_host_go_to_gloo_and_those_of_a_gpu_by_way_of_the_host(pool):
    for rank, (found, gathered, met, refused, races) in enumerate(pool.run(2, both, timeout_s=60)):
        assert found[0] == found[1] == found[2] == found[3]
        assert gathered == [{"rank": 0}, {"rank": 1}]
        assert met == [float(rank)] * 2
        for end, text in refused:
            assert re.search(
                rf"{end} of Gloo \(\S*test_groups_of_gloo.py:\d+.*\): it moves tensors of the host alone", text
            )
        assert races == {}
