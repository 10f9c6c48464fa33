"""Ranks on the strict device: each on an emulated GPU of its own, in a process group of the emulated NCCL."""

import importlib
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from superstep.runtime.device import Device
from superstep.strict.load import configure
from superstep.strict.settings import Settings


@dataclass(frozen=True)
class Seen:
    """What the device saw on a rank.

    Attributes:
        races: in words.
        host_waits: how often the host waited, by operator and line.
        contexts: the GPUs that were used.
        peak_bytes: of the rank's own GPU.
    """

    races: list
    host_waits: dict
    contexts: set
    peak_bytes: int


def device_module():
    return importlib.import_module("strict_device")


@contextmanager
def gpu_of(rank, world, settings=None):
    """The rank's GPU, and the default process group on it, in place of the pool's; what was seen comes out."""
    module = device_module()
    configure(module, settings or Settings(devices=8, device_bytes=1 << 30))
    given = dist.distributed_c10d._get_default_store()
    store = dist.PrefixStore(f"gpus {given.add(f'rank {rank}', 1)}/", given)
    dist.barrier()  # a member that is still connecting would see another one leave
    dist.destroy_process_group()
    device = Device("cuda", rank)
    device.make_current()
    timeout = dist.constants.default_pg_timeout
    dist.init_process_group("nccl", store=store, rank=rank, world_size=world, timeout=timeout, device_id=device.torch)
    module.take_races()
    module.take_host_waits()
    module.reset_peak(rank)
    seen = Seen([], {}, set(), 0)
    found = [seen]

    def look():
        torch.cuda.synchronize()
        found[0] = Seen(module.take_races(), module.take_host_waits(), module.contexts(), module.memory(rank)[1])
        return found[0]

    yield device, look
    dist.barrier()
    dist.destroy_process_group()
