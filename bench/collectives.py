"""Shared memory beside Gloo: what collectives between ranks of this machine take, in turn on the same ranks.

    python -m bench.collectives                  JSON under bench/results/
    python -m bench.collectives --world 4
    python -m bench.collectives --world 4 --hosts 2 --link 1gbit
                                                 as root, on Linux: hosts are network namespaces with such a link

With hosts, their ranks share memory and messages go between them. Each way has its turn within a round, and of a
round's ratio the median counts. Beside the seconds stand those that a rank's processor had to work: on a machine with
fewer cores than ranks they are what others wait for.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from bench.machine import write_result
from bench.several import Several
from superstep.comm.backend import GLOO, reach
from superstep.comm.collectives import Group, all_gather, all_reduce, receive, reduce_scatter, send, together
from superstep.comm.device import Device

PATIENCE = timedelta(minutes=2)
BYTES = (4, 4096, 2**16, 2**20, 2**24)
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "send")
CLONE_NEWNET = 0x40000000


def _call(kind: str, size: int, group: Group) -> Callable[[], None]:
    """One collective of ``size`` bytes, as the engine starts and waits for it."""
    ranks, me = group.size(), group.rank()
    buffer, other = torch.ones(max(size // 4 // ranks, 1) * ranks), torch.ones(max(size // 4 // ranks, 1) * ranks)
    calls: dict[str, Callable[[], None]] = {
        "all-reduce": lambda: all_reduce(buffer, group).wait(),
        "all-gather": lambda: all_gather(buffer, group, tag=0).wait(),
        "reduce-scatter": lambda: reduce_scatter(buffer, group, tag=0).wait(),
        # Round the ring.
        "send": lambda: together(
            (
                send(buffer, group, (me + 1) % ranks, 0),
                receive(other, group, (me - 1) % ranks, 0),
            )
        ).wait(),
    }
    return calls[kind]


def _timed(call: Callable[[], None], repeats: int) -> tuple[float, float]:
    """Seconds of one call, and of this rank's processor."""
    call()
    dist.barrier()
    processor_s, start_s = time.process_time(), time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start_s) / repeats, (time.process_time() - processor_s) / repeats


def _enter(host: int, name: str, link: str) -> None:
    """Be a process of a host from here on."""
    with Path(f"/var/run/netns/{name}").open() as space:
        if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"host {host} cannot be entered")
    os.environ["GLOO_SOCKET_IFNAME"] = link


def _rank(rank: int, world: int, rounds: int, folder: str, hosts: list[tuple[str, str]]) -> None:
    torch.set_num_threads(1)
    if hosts:
        host = rank * len(hosts) // world
        _enter(host, *hosts[host])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=PATIENCE)
    device = Device("cpu")
    there = reach(rank, world, device)
    assert there.shared is not None, there.why
    ways = {"shared": there, "gloo": GLOO}
    made_s, groups = {}, {}
    for name, way in ways.items():
        dist.barrier()
        start_s = time.perf_counter()
        groups[name] = way.group(range(world), device=device, timeout=PATIENCE)
        made_s[name] = time.perf_counter() - start_s
    rows = [_row(kind, size, groups, rounds) for kind in KINDS for size in BYTES]
    if rank == 0:
        torch.save({"group_s": made_s, "rows": rows}, Path(folder) / "found.pt")
    dist.barrier()
    dist.destroy_process_group()


def _row(kind: str, size: int, groups: dict[str, Group], rounds: int) -> dict[str, object]:
    calls = {name: _call(kind, size, group) for name, group in groups.items()}
    repeats = 100 if size < 2**18 else 8
    found = [{name: _timed(call, repeats) for name, call in calls.items()} for _ in range(rounds)]
    return {
        "collective": kind,
        "bytes": size,
        **{f"{name}_s": statistics.median(each[name][0] for each in found) for name in calls},
        **{f"{name}_cpu_s": statistics.median(each[name][1] for each in found) for name in calls},
        "ratio": statistics.median(each["gloo"][0] / each["shared"][0] for each in found),
    }


def _measured(world: int, rounds: int, link: str | None) -> dict:
    with tempfile.TemporaryDirectory() as folder, Several(Path(folder), []) if link else nullcontext() as several:
        hosts = [] if several is None else list(zip(several.names, several.links, strict=True))
        if several is not None and link:
            several.limit(link)
        mp.spawn(_rank, args=(world, rounds, folder, hosts), nprocs=world)
        found = torch.load(Path(folder) / "found.pt", weights_only=False)
    return {"world": world, "hosts": max(1, len(hosts)), "link": link, **found}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, nargs="*", default=[2, 4], help="numbers of ranks")
    parser.add_argument("--hosts", type=int, choices=(1, 2), default=1)
    parser.add_argument("--link", default="1gbit", help="between hosts, each way, as tc(8) writes it")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--out", type=Path, help="default: bench/results/collectives.json, with hosts collectives-hosts"
    )
    options = parser.parse_args(argv)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    link = options.link if options.hosts > 1 else None
    found = [_measured(world, options.rounds, link) for world in options.world]
    name = "collectives-hosts" if options.hosts > 1 else "collectives"
    for each in found:
        print(f"{each['world']} ranks: a group in {each['group_s']['shared'] * 1e3:.1f} ms, Gloo's in ", end="")
        print(f"{each['group_s']['gloo'] * 1e3:.1f} ms")
        for row in each["rows"]:
            print(
                f"  {row['collective']:15}{row['bytes']:>10} B   {row['shared_s'] * 1e6:>9.0f} us"
                f"   Gloo {row['gloo_s'] * 1e6:>9.0f} us   {row['ratio']:>5.1f}x"
            )
    write_result(options.out or Path(f"bench/results/{name}.json"), rounds=options.rounds, measured=found)


if __name__ == "__main__":
    main()
