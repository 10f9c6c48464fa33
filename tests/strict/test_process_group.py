"""NCCL on emulated GPUs: its calls give the numbers of Gloo, it refuses what NCCL does, and names calls that differ."""

import os
import re
import time
from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from strict_ranks import SETTINGS, begin_nccl, device_module, gpu_of, run_to_the_end, wait_for_text
from superstep.comm.shared_memory.group_base import gather_single, scatter_single
from superstep.launch.failure import trouble_of
from superstep.strict.load import configure
from superstep.strict.nccl import stall

pytestmark = pytest.mark.strict

TIME_S = 110
"""Of a job, on a machine that has other work too."""


def numbers(rank, *shape, dtype=torch.float32):
    found = torch.randn(shape, generator=torch.Generator().manual_seed(rank))
    return found.to(dtype) if dtype.is_floating_point else (100 * found).to(dtype)


# The numbers of its calls.


def reduced(operation, dtype=torch.float32):
    def call(rank, world, place, group):
        x = numbers(rank, 3, 4, dtype=dtype).to(place)
        if operation == dist.ReduceOp.AVG and place.type == "cpu":  # which Gloo does not have
            dist.all_reduce(x, group=group)
            return x / world
        dist.all_reduce(x, operation, group=group)
        return x

    return call


def mean_of_integers(rank, world, place, group):
    """Towards zero."""
    x = numbers(rank, 3, 4, dtype=torch.int32).to(place)
    if place.type == "cpu":  # which Gloo does not have
        dist.all_reduce(x, group=group)
        return x.div(world, rounding_mode="trunc")
    dist.all_reduce(x, dist.ReduceOp.AVG, group=group)
    return x


def sum_of_products(rank, world, place, group):
    x = numbers(rank, 8).to(place)
    if place.type == "cpu":  # which Gloo does not have
        x *= 0.25
        dist.all_reduce(x, group=group)
    else:
        dist.all_reduce(x, dist._make_nccl_premul_sum(0.25), group=group)
    return x


def of_eight_bits(rank, world, place, group):
    """Which Gloo does not have: gathered, exchanged, sent from rank 0 to all, and summed, each rank ones."""
    one = torch.ones(2, device=place)
    if place.type == "cpu":
        return torch.cat([one.repeat(3 * world + 1), one * world])
    x = one.to(torch.float8_e4m3fn)
    gathered, exchanged = x.repeat(world), x.repeat(world)
    gather_single(gathered, x, group=group)
    dist.all_to_all_single(exchanged.clone(), exchanged, group=group)
    sent, total = x.repeat(world + 1), x.clone()
    dist.broadcast(sent, 0, group=group)
    dist.all_reduce(total, group=group)
    return torch.cat([gathered, exchanged, sent, total]).float()


def broadcast(rank, world, place, group):
    x = numbers(rank, 5).to(place)
    dist.broadcast(x, world - 1, group=group)
    return x


def gathered(rank, world, place, group):
    parts = [torch.empty(2, 3, device=place) for _ in range(world)]
    dist.all_gather(parts, numbers(rank, 2, 3).to(place), group=group)
    return torch.stack(parts)


def gathered_unevenly(rank, world, place, group):
    """Of rank r r + 1 rows."""
    parts = [torch.empty(peer + 1, 3, device=place) for peer in range(world)]
    if place.type == "cpu":  # which Gloo does not have
        return torch.cat([numbers(peer, peer + 1, 3) for peer in range(world)])
    dist.all_gather(parts, numbers(rank, rank + 1, 3).to(place), group=group)
    return torch.cat(parts)


def gathered_single(rank, world, place, group):
    whole = torch.empty(world * 2, 3, device=place)
    gather_single(whole, numbers(rank, 2, 3).to(place), group=group)
    return whole


def scattered(rank, world, place, group):
    part = torch.empty(2, 3, device=place)
    whole = numbers(rank, 2 * world, 3).to(place)
    if place.type == "cpu":
        dist.all_reduce(whole, group=group)
        return whole.chunk(world)[rank]
    scatter_single(part, whole, group=group)
    return part


def exchanged(rank, world, place, group):
    """Rank r sends r + p rows to rank p."""
    rows = [rank + peer for peer in range(world)]
    out = torch.empty(sum(rows), 2, device=place)
    dist.all_to_all_single(out, numbers(rank, sum(rows), 2).to(place), rows, rows, group=group)
    return out


def exchanged_evenly(rank, world, place, group):
    out = torch.empty(2 * world, 2, device=place)
    dist.all_to_all_single(out, numbers(rank, 2 * world, 2).to(place), group=group)
    return out


def reduced_on_one(rank, world, place, group):
    x = numbers(rank, 5).to(place)
    dist.reduce(x, world - 1, group=group)
    return x if rank == world - 1 else None


def gathered_on_one(rank, world, place, group):
    parts = [torch.empty(3, device=place) for _ in range(world)] if rank == 1 else None
    dist.gather(numbers(rank, 3).to(place), parts, 1, group=group)
    return parts and torch.stack(parts)


def dealt(rank, world, place, group):
    parts = list(numbers(7, world, 3).to(place)) if rank == 0 else None
    own = torch.empty(3, device=place)
    dist.scatter(own, parts, 0, group=group)
    return own


def scattered_list(rank, world, place, group):
    """To rank r r + 1 rows."""
    parts = [numbers(rank, peer + 1, 4).to(place) for peer in range(world)]
    if place.type == "cpu":  # which Gloo does not have
        whole = torch.cat(parts)
        dist.all_reduce(whole, group=group)
        return whole.split([peer + 1 for peer in range(world)])[rank]
    own = torch.empty(rank + 1, 4, device=place)
    dist.reduce_scatter(own, parts, group=group)
    return own


def exchanged_list(rank, world, place, group):
    """Rank r sends r + p numbers to rank p, as a tensor for each."""
    sent = [numbers(rank, rank + peer + 1).to(place) for peer in range(world)]
    came = [torch.empty(rank + peer + 1, device=place) for peer in range(world)]
    if place.type == "cpu":  # which Gloo does not have
        rows = [len(each) for each in sent]
        dist.all_to_all_single(torch.cat(came), torch.cat(sent), rows, rows, group=group)
        return torch.cat([numbers(peer, rank + peer + 1) for peer in range(world)])
    dist.all_to_all(came, sent, group=group)
    return torch.cat(came)


def together(rank, world, place, group):
    """Several calls as one."""
    sums = [numbers(rank, 3).to(place), numbers(rank, 4).to(place)]
    wholes = torch.empty(2, 3 * world, device=place)
    coalesced = dist.distributed_c10d._coalescing_manager if place.type == "cuda" else lambda group: nullcontext()
    with coalesced(group):
        for whole in wholes:
            gather_single(whole, sums[0].clone(), group=group)
    with coalesced(group):
        for each in sums:
            dist.all_reduce(each, group=group)
    return torch.cat([*sums, wholes.view(-1)])


def together_on_a_device(rank, world, place, group):
    """Several calls as one, of which the manager is told the device: each is issued as it is called."""
    if place.type == "cpu":
        return together(rank, world, place, group)
    manager = dist.distributed_c10d._coalescing_manager
    sums = [numbers(rank, 3).to(place), numbers(rank, 4).to(place)]
    wholes = torch.empty(2, 3 * world, device=place)
    with manager(group, place, async_ops=True) as calls:
        for whole in wholes:
            gather_single(whole, sums[0].clone(), group=group)
    calls.wait()
    with manager(group, place):
        for each in sums:
            dist.all_reduce(each, group=group)
    return torch.cat([*sums, wholes.view(-1)])


def passed_on(rank, world, place, group):
    """Along the ranks, one after the other."""
    x = numbers(rank, 4).to(place)
    if rank > 0:
        dist.recv(x, rank - 1, group=group)
    x += 1
    if rank < world - 1:
        dist.send(x, rank + 1, group=group)
    return x


def passed_round(rank, world, place, group):
    """To both neighbours at once: calls of one group, in whatever order they are listed."""
    x, left, right = numbers(rank, 4).to(place), torch.empty(4, device=place), torch.empty(4, device=place)
    up, down = (rank + 1) % world, (rank - 1) % world
    calls = [
        dist.P2POp(dist.isend, x, up, group, tag=1),
        dist.P2POp(dist.isend, x * 2, down, group, tag=2),
        dist.P2POp(dist.irecv, left, down, group, tag=1),
        dist.P2POp(dist.irecv, right, up, group, tag=2),
    ]
    for work in dist.batch_isend_irecv(calls if rank else calls[2:] + calls[:2]):
        work.wait()
    return torch.stack([left, right])


def in_memory_formats(rank, world, place, group):
    """With channels last, and of what is called with several tensors, or sent, in any order without gaps."""
    images = numbers(rank, 2, 3, 4, 5).to(place)
    if place.type == "cpu":  # which Gloo does not have
        dist.all_reduce(images, group=group)
        return torch.cat([images.flatten()] * 2 + [numbers(0, 6, 2).flatten(), numbers((rank - 1) % world, 40)])
    images = images.to(memory_format=torch.channels_last)
    pair = [images.clone(), images.permute(3, 1, 0, 2).clone()]
    dist.all_reduce(images, group=group)
    with dist.distributed_c10d._coalescing_manager(group):
        for each in pair:
            dist.all_reduce(each, group=group)
    first = numbers(rank, 6, 2).to(place).view(2, 6).t().clone().copy_(numbers(rank, 6, 2))
    dist.broadcast(first.t(), 0, group=group)
    sent, came = numbers(rank, 40).to(place).view(5, 8).t(), torch.empty(5, 8, device=place).t()
    ends = [
        dist.P2POp(dist.isend, sent, (rank + 1) % world, group),
        dist.P2POp(dist.irecv, came, (rank - 1) % world, group),
    ]
    for work in dist.batch_isend_irecv(ends):
        work.wait()
    return torch.cat([images.flatten(), pair[1].permute(2, 1, 3, 0).flatten(), first.flatten(), came.t().flatten()])


def objects(rank, world, place, group):
    every, one = [None] * world, [f"of {rank}" if rank == 0 else None, rank]
    dist.all_gather_object(every, {"rank": rank, "text": "x" * rank}, group=group)
    dist.broadcast_object_list(one, 0, group=group)
    dist.barrier(group)
    return every, one


CALLS = {
    "sum": reduced(dist.ReduceOp.SUM),
    "mean": reduced(dist.ReduceOp.AVG),
    "max": reduced(dist.ReduceOp.MAX),
    "min": reduced(dist.ReduceOp.MIN),
    "sum of integers": reduced(dist.ReduceOp.SUM, torch.int64),
    "sum of bf16": reduced(dist.ReduceOp.SUM, torch.bfloat16),
    "mean of integers": mean_of_integers,
    "sum of products": sum_of_products,
    "eight bits": of_eight_bits,
    "broadcast": broadcast,
    "all_gather": gathered,
    "all_gather, uneven": gathered_unevenly,
    "all_gather_single": gathered_single,
    "reduce_scatter": scattered,
    "all_to_all, uneven": exchanged,
    "all_to_all": exchanged_evenly,
    "reduce": reduced_on_one,
    "gather": gathered_on_one,
    "scatter": dealt,
    "reduce_scatter of lists": scattered_list,
    "all_to_all of lists": exchanged_list,
    "several at once": together,
    "several at once, on a device": together_on_a_device,
    "send and recv": passed_on,
    "batch_isend_irecv": passed_round,
    "memory formats": in_memory_formats,
    "objects": objects,
}


def call_all(rank, world):
    with gpu_of(rank, world) as (device, report):
        gloo, found = dist.new_group(backend="gloo"), {}
        for name, call in CALLS.items():
            pair = [call(rank, world, device.torch, None), call(rank, world, torch.device("cpu"), gloo)]
            found[name] = [one.cpu() if isinstance(one, torch.Tensor) else one for one in pair]
        return found, report()


@pytest.mark.parametrize("world", [2, 3])
def test_all_calls_give_gloos_numbers(pool, world):
    for found, observed in pool.run(world, call_all, timeout_s=TIME_S):
        for name, (of_nccl, of_gloo) in found.items():
            if isinstance(of_nccl, torch.Tensor):
                torch.testing.assert_close(of_nccl, of_gloo, msg=name)
            else:
                assert of_nccl == of_gloo
        assert observed.races == {}


# Calls that differ.


def failures(*calls):
    """What calls and what follows from them raise, in order, as a rank tells its launcher. Each is over before the next
    one: a late failure is raised by what is called then, which this rank would leave out.
    """
    found = []
    for step in (step for call in calls for step in (call, torch.cuda.synchronize)):
        try:
            step()
        except (RuntimeError, ValueError) as error:
            found.append(str(trouble_of(dist.get_rank(), error).error))
    return found


def ones(device, *shape, dtype=torch.float32):
    return torch.ones(*shape, dtype=dtype, device=device)


def sum_and_gather(device, rank):
    """The same two calls on each rank, in two orders."""
    calls = [lambda: dist.all_reduce(ones(device, 8)), lambda: gather_single(ones(device, 8), ones(device, 4))]
    return calls if rank else calls[::-1]


def swapped_ends(device, rank):
    """Of two transfers, rank 1 receives the second one first."""
    if rank == 0:
        return [lambda: dist.send(ones(device, 8), 1), lambda: dist.send(ones(device, 4), 1)]
    return [lambda: dist.recv(ones(device, 4), 0), lambda: dist.recv(ones(device, 8), 0)]


def reduce_in_backward(device, rank):
    """The next kernel of autograd's thread raises what has become of the call."""

    def reduce(gradient):
        dist.all_reduce(ones(device, 8 + rank))
        while device_module().under_way():
            time.sleep(0.01)

    x = ones(device, 4).requires_grad_()
    y = x * 2
    y.register_hook(reduce)
    y.sum().backward()


DIFFERENT = {
    "count": lambda device, rank: dist.all_reduce(ones(device, 8 + rank)),
    "memory format": lambda device, rank: dist.all_reduce(
        ones(device, 1, 2, 2, 2).to(memory_format=(torch.contiguous_format, torch.channels_last)[rank])
    ),
    "dtype": lambda device, rank: dist.all_reduce(ones(device, 8, dtype=(torch.float32, torch.float64)[rank])),
    "rule": lambda device, rank: dist.all_reduce(ones(device, 8), (dist.ReduceOp.SUM, dist.ReduceOp.MAX)[rank]),
    "root": lambda device, rank: dist.broadcast(ones(device, 8), rank),
    "operation": lambda device, rank: dist.all_reduce(ones(device, 8)) if rank else dist.broadcast(ones(device, 8), 0),
    "backward": reduce_in_backward,
}


def call_differently(rank, world, name):
    with gpu_of(rank, world) as (device, _):
        if name == "order":
            return failures(*sum_and_gather(device.torch, rank))
        return failures(lambda: DIFFERENT[name](device.torch, rank))


@pytest.mark.parametrize("name", [*DIFFERENT, "order"])
def test_members_that_call_differently_are_named_with_both_lines(pool, name):
    for rank, found in enumerate(pool.run(2, call_differently, name, timeout_s=TIME_S)):
        line = r"\S*test_process_group.py:\d+"
        calls = f"rank {rank} .*{line}.*, rank {1 - rank} .*{line}.*"
        assert found, "nothing was raised"
        assert re.fullmatch(f"rank {rank}: members of communicator \\S+ call differently: {calls}", found[0]), found


def exchange_differently(rank, world):
    with gpu_of(rank, world) as (device, _):
        rows = [2, 3 + rank]
        out = torch.empty(5 + rank, device=device.torch)
        return failures(lambda: dist.all_to_all_single(out, ones(device.torch, 5 + rank), rows, rows))


def test_parts_that_are_sent_and_received_in_other_sizes_are_named(pool):
    first, second = pool.run(2, exchange_differently, timeout_s=TIME_S)
    call = r"all_to_all_single of torch.float32 \(\S*test_process_group.py:\d+.*\) over communicator \S+:"
    assert re.fullmatch(f"rank 0: {call} rank 0 receives 3 rows from rank 1, which sends 2", first[0]), first
    assert re.fullmatch(f"rank 1: {call} rank 1 receives 2 rows from rank 0, which sends 3", second[0]), second


def swap_transfers(rank, world):
    with gpu_of(rank, world) as (device, _):
        return failures(*swapped_ends(device.torch, rank))


def test_ends_of_a_transfer_that_do_not_fit_are_named(pool):
    sent, received = pool.run(2, swap_transfers, timeout_s=TIME_S)
    ends = ["rank 0 send of 8 float32 .*", "rank 1 recv of 4 float32 .*"]
    assert re.fullmatch(f"rank 0: the ends of a transfer .* do not fit: {ends[0]}{ends[1]}", sent[0]), sent
    assert re.fullmatch(f"rank 1: the ends of a transfer .* do not fit: {ends[1]}{ends[0]}", received[0]), received


# What is refused at the call.


def refused_calls(gpu, rank):
    """Each with how its error goes on behind the rank."""
    strided, one = ones(gpu, 4, 4)[:, ::2], ones(gpu, 4)
    images = ones(gpu, 1, 2, 2, 2).to(memory_format=torch.channels_last)
    return {
        "cpu": (lambda: dist.all_reduce(torch.ones(4)), "all_reduce of sum of 4 float32: No backend type .* type cpu"),
        "cpu output": (
            lambda: gather_single(torch.ones(8), one),
            "all_gather_single of 4 float32: No backend type .* type cpu; a tensor must be on a GPU",
        ),
        "another GPU": (
            lambda: gather_single(ones("cuda:7", 8), one),
            "all_gather_single of 4 float32: its tensors are on cuda:. and cuda:7; they must be on one GPU",
        ),
        "another type": (
            lambda: gather_single(ones(gpu, 8, dtype=torch.float64), one),
            "all_gather_single of 4 float32: its tensors are of torch.float32 and torch.float64",
        ),
        "unknown type": (
            lambda: dist.send(ones(gpu, 4, dtype=torch.int16), 1 - rank),
            "send of 4 int16: Input tensor data type is not supported for NCCL process group: torch.int16",
        ),
        "bits": (
            lambda: dist.all_reduce(ones(gpu, 4, dtype=torch.int32), dist.ReduceOp.BAND),
            "all_reduce of band of 4 int32: Cannot use ReduceOp.BAND with NCCL",
        ),
        "mean of truth": (
            lambda: dist.all_reduce(ones(gpu, 4, dtype=torch.bool), dist.ReduceOp.AVG),
            "all_reduce of mean of 4 bool: Cannot use ReduceOp.AVG with boolean inputs",
        ),
        "strided": (
            lambda: dist.all_reduce(strided),
            r"all_reduce of sum of 8 float32: Tensors must be contiguous; one has shape \(4, 2\) and strides \(4, 2\)",
        ),
        "transposed": (lambda: dist.all_reduce(ones(gpu, 2, 3).t()), "all_reduce of .*: Tensors must be contiguous"),
        "list of channels last": (
            lambda: dist.all_gather([ones(gpu, 1, 2, 2, 2)] * 2, images),
            "all_gather of 2 x 8 float32: torch gives elements of a list that is not contiguous another order",
        ),
        "strided send": (lambda: dist.send(strided, 1 - rank), "send of 8 float32: Tensors must be contiguous"),
        "nobody": (
            lambda: dist.group.WORLD.send([one], 7, 0),
            rf"send of 4 float32: Invalid peer rank 7; it must be one of \[{1 - rank}\] in its group",
        ),
        "gathered": (
            lambda: gather_single(ones(gpu, 7), one),
            "all_gather_single of 4 float32: its output must have .* the inputs of all 2 .*; it has 7, .* 2 x 4",
        ),
        "scattered": (
            lambda: scatter_single(ones(gpu, 3), one),
            "reduce_scatter_single of sum of 4 float32: its input must have .*; it has 4, which is not 2 x 3",
        ),
        "gathered list": (
            lambda: dist.all_gather([ones(gpu, 5), ones(gpu, 5)], one),
            f"all_gather of 2 x 5 float32: tensor {rank} of its list has 5 numbers, and this rank's own one 4",
        ),
        "short list": (
            lambda: dist.reduce_scatter(one, [one]),
            "reduce_scatter of sum of 4 float32: a list must have a tensor for each of the 2 members; one has 1",
        ),
        "parts": (
            lambda: dist.all_to_all_single(ones(gpu, 4), ones(gpu, 4), [2, 2], [1, 2]),
            r"all_to_all_single of torch.float32: 4 rows cannot be cut into \[1, 2\], one for each member",
        ),
        "equal parts": (
            lambda: dist.all_to_all_single(ones(gpu, 5), ones(gpu, 5)),
            "all_to_all_single of torch.float32: 5 rows cannot be cut into 2 equal parts, one for each member",
        ),
    }


def refuse(rank, world):
    """What each call raises."""
    with gpu_of(rank, world) as (device, _):
        found = {name: failures(call) for name, (call, _) in refused_calls(device.torch, rank).items()}
        dist.barrier()
        return found


def test_what_nccl_refuses_is_refused_in_one_line(pool):
    for rank, found in enumerate(pool.run(2, refuse, timeout_s=TIME_S)):
        for name, (_, text) in refused_calls("cpu", rank).items():
            call, why = text.split(": ", 1)
            wanted = rf"rank {rank}: {call} \(\S*test_process_group.py:\d+.*\): {why}.*"
            assert len(found[name]) == 1, (name, found[name])
            assert re.fullmatch(wanted, found[name][0]), (name, found[name])


def share_a_gpu(rank, world):
    with gpu_of(rank, world):
        store = dist.PrefixStore("shared", dist.distributed_c10d._get_default_store())
        shared = dist.ProcessGroupNCCL(store, rank, world, dist.ProcessGroupNCCL.Options())
        return failures(lambda: shared.allreduce([ones("cuda:0", 4)]))


def test_two_ranks_on_one_gpu_are_refused(pool):
    for found in pool.run(2, share_a_gpu, timeout_s=TIME_S):
        assert "Duplicate GPU detected" in found[0]


def leave_out_a_group(rank, world):
    with gpu_of(rank, world):
        limit, began_s = timedelta(seconds=1), time.monotonic()
        found = failures(lambda: dist.new_group([0, 1], timeout=limit)) if rank == 0 else []
        took_s = time.monotonic() - began_s
        wait_for_each_other(rank, "made")
        return found, took_s


def wait_for_each_other(rank, what):
    """By the store, as nothing on the GPUs is to order the ranks."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{what} {rank}", "yes")
    store.wait([f"{what} {1 - rank}"], timedelta(seconds=TIME_S))


def test_a_group_that_one_rank_does_not_make_says_which_and_at_its_time(pool):
    (found, took_s), _ = pool.run(2, leave_out_a_group, timeout_s=TIME_S)
    assert 1.0 <= took_s < 1.9  # a store in a file ends a wait of its own up to a second late
    assert re.search(
        r"ranks \[1\] of it have not come to 'split 1' .* within 1 s; every rank has to make each group", found[0]
    ), found


def guess(rank, world, folder):
    """Barriers of a default group that is bound to no GPU, on a rank that computes on the last GPUs of its host."""
    configure(device_module(), SETTINGS)
    torch.cuda.set_device(7 - rank)
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=world)
    before = device_module().contexts()
    dist.barrier()
    (folder / f"contexts {rank}").write_text(f"{before} {device_module().contexts()}")


def test_a_barrier_of_a_group_that_is_bound_to_no_gpu_guesses_one_by_rank(tmp_path):
    for rank, (status, text) in enumerate(run_to_the_end(2, guess, tmp_path)):
        assert status == 0, text
        assert (tmp_path / f"contexts {rank}").read_text() == f"{{{7 - rank}}} { {rank, 7 - rank} }"


# How calls are ordered.


def connect(gpu, *groups):
    """Use groups once, as the first call over each keeps the host; what the calls come to is not waited for."""
    for group in groups:
        dist.all_reduce(ones(gpu, 1), group=group)


def wait_on_the_device(rank, world):
    """Rank 1 calls only once rank 0 has come back from ``wait``."""
    with gpu_of(rank, world) as (device, report):
        store = dist.distributed_c10d._get_default_store()
        x = ones(device.torch, 4)
        connect(device.torch, None)
        if rank == 1:
            store.wait(["rank 0 went on"], timedelta(seconds=TIME_S))
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        was_over = work.is_completed()
        store.set(f"rank {rank} went on", "yes")
        y = x + 1  # after it all the same
        return was_over, y.tolist(), report().races


def test_wait_orders_streams_and_no_host(pool):
    first, second = pool.run(2, wait_on_the_device, timeout_s=TIME_S)
    assert first[0] is False
    assert first[1:] == second[1:] == ([3.0] * 4, {})


def abort_one(rank, world):
    """Rank 0 has a call under way that rank 1 never makes, and another one behind it over another group."""
    with gpu_of(rank, world) as (device, _):
        hangs, goes_on = dist.new_group([0, 1]), dist.new_group([0, 1])
        connect(device.torch, hangs, goes_on)
        x, y = ones(device.torch, 4), ones(device.torch, 4)
        if rank == 0:
            dist.all_reduce(x, group=hangs, async_op=True)
        work = dist.all_reduce(y, group=goes_on, async_op=True)
        if rank == 0:
            assert not work.is_completed()
            hangs.abort()
        work.wait()
        torch.cuda.synchronize()
        used_again = failures(lambda: dist.all_reduce(x, group=hangs)) if rank == 0 else []
        return y.tolist(), used_again


def test_abort_ends_what_is_under_way_and_what_waits_behind_it(pool):
    (first, used_again), (second, _) = pool.run(2, abort_one, timeout_s=TIME_S)
    assert first == second == [2.0] * 4
    assert "was aborted on rank 0" in used_again[0]


def narrow_group(blocks):
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = blocks
    return dist.new_group([0, 1], pg_options=options)


def call_crosswise(rank, world, folder, blocks, limit_s):
    """Two communicators, used in opposite orders; the first call of each rank is under way when it makes the second.
    Only calls have the limit: on a busy machine ranks need longer to meet.
    """
    gpu = begin_nccl(rank, world, folder, TIME_S)
    groups = [narrow_group(blocks) if blocks else dist.new_group([0, 1]) for _ in range(2)]
    for group in groups:
        connect(gpu, group)
        torch.cuda.synchronize()
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=limit_s), group)
    x, y = ones(gpu, 4), ones(gpu, 4)
    torch.cuda.synchronize()
    wait_for_each_other(rank, "connected")
    first = dist.all_reduce(x, group=groups[rank], async_op=True)  # the first of two
    while not (first.is_completed() or any("runs call" in task for task in device_module().under_way())):
        time.sleep(0.01)
    dist.all_reduce(y, group=groups[1 - rank], async_op=True)
    torch.cuda.synchronize()
    assert x.tolist() == y.tolist() == [2.0] * 4


def test_narrow_communicators_run_beside_each_other(tmp_path):
    for status, text in run_to_the_end(2, call_crosswise, tmp_path, 16, TIME_S):
        assert status == 0, text


@pytest.mark.parametrize("blocks", [0, 32])
def test_a_hang_of_communicators_that_have_no_room_beside_each_other_is_named(tmp_path, blocks):
    require_hang(run_to_the_end(2, call_crosswise, tmp_path, blocks, 1), "# the first of two")


def send_both(rank, world, folder):
    """Each sends first, outside of a group of calls."""
    gpu = begin_nccl(rank, world, folder, 2)
    for source in range(world):  # the first transfers keep their hosts
        dist.send(ones(gpu, 1), 1 - rank) if rank == source else dist.recv(ones(gpu, 1), source)
    dist.send(ones(gpu, 4), 1 - rank)  # before its recv
    dist.recv(ones(gpu, 4), 1 - rank)
    torch.cuda.synchronize()


def leave_out(rank, world, folder):
    gpu = begin_nccl(rank, world, folder, 2)
    dist.all_reduce(ones(gpu, 4))
    if rank == 0:
        dist.all_reduce(ones(gpu, 5))  # one alone
        torch.cuda.synchronize()
    else:
        wait_for_text(folder / "stderr 0", "watchdog")


HANGS = {"send and send": (send_both, "# before its recv"), "left out": (leave_out, "# one alone")}


@pytest.mark.parametrize("name", HANGS)
def test_a_hang_is_named_by_the_watchdog(tmp_path, name):
    job, line = HANGS[name]
    require_hang(run_to_the_end(2, job, tmp_path), line)


def collect_crosswise(gpu, rank):
    """Over two groups, neither of which has been used."""
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    dist.all_reduce(ones(gpu, 4), group=groups[rank])  # over one of two


def send_crosswise(gpu, rank):
    """To a rank that sends as well, before it receives."""
    dist.isend(ones(gpu, 4), 1 - rank)  # both ways


CROSSED = {
    "collectives": (collect_crosswise, "# over one of two", "the first collective"),
    "transfers": (send_crosswise, "# both ways", "the first transfer from (0 to 1|1 to 0)"),
}


def cross(rank, world, folder, name):
    gpu = begin_nccl(rank, world, folder, 600)
    connect(gpu, None)
    stall.STALL_S = 1.0
    CROSSED[name][0](gpu, rank)


@pytest.mark.parametrize("name", CROSSED)
def test_hosts_whose_first_uses_cross_are_named(tmp_path, name):
    _, line, first = CROSSED[name]
    wanted = rf"have not come to 'use 0, {first}' \(\S*test_process_group.py:{line_number(line)}"
    hung = [text for status, text in run_to_the_end(2, cross, tmp_path, name) if status == -6]
    assert hung
    for text in hung:
        assert re.search(rf"no rank moves any more: communicator \d+: ranks \[[01]\] of it {wanted}", text), text


def require_hang(ends, line):
    """A rank was ended by its watchdog, which names the line that hangs."""
    number = line_number(line)
    hung = [text for status, text in ends if status == -6]
    assert hung, ends
    for text in hung:
        assert re.search(
            rf"watchdog: call \d+ .*test_process_group.py:{number}.* has not ended in its time; under way:", text
        )
        assert re.search(r"stream \d+ runs call \d+ of communicator", text)


def line_number(text):
    """Where this file has a text, which it has once more: in the test that asks."""
    with open(__file__, encoding="utf-8") as file:
        return next(number for number, line in enumerate(file, 1) if text in line)


def threads_of_groups(rank, world):
    with gpu_of(rank, world):
        dist.all_reduce(torch.ones(1, device=f"cuda:{rank}"))
        before = len(os.listdir("/proc/self/task"))
        for _ in range(3):
            group = dist.new_group(list(range(world)), device_id=torch.device("cuda", rank))
            dist.destroy_process_group(group)
        return len(os.listdir("/proc/self/task")) - before


def test_a_group_that_is_destroyed_leaves_no_thread(pool):
    assert max(pool.run(2, threads_of_groups)) <= 0
