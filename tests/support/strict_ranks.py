"""Ranks on the strict device: each on an emulated GPU of its own, in a process group of the emulated NCCL."""

import gc
import importlib
import os
import time
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from pool import IMPORTED
from superstep.comm.device import Device
from superstep.comm.mesh import build_mesh
from superstep.launch.fork_server import fork_context, heed_all
from superstep.launch.ranks import World
from superstep.strict.load import configure
from superstep.strict.monitor import Monitor
from superstep.strict.settings import Settings
from superstep.train.proof.prove_exact import prove_exact
from superstep.train.proof.prove_tolerance import TIMEOUT, prove

SETTINGS = Settings(devices=8, device_bytes=1 << 30)


def device_module():
    return importlib.import_module("strict_device")


@contextmanager
def gpu_of(rank, world, settings=None):
    """The rank's GPU, with the default process group on it in place of the pool's, and what reports on it."""
    module = device_module()
    configure(module, settings or SETTINGS)
    given = dist.distributed_c10d._get_default_store()
    store = dist.PrefixStore(f"gpus {given.add(f'rank {rank}', 1)}/", given)
    dist.barrier()  # a member that is still connecting would see another one leave
    dist.destroy_process_group()
    device = Device("cuda", rank)
    device.make_current()
    timeout = dist.constants.default_pg_timeout
    dist.init_process_group("nccl", store=store, rank=rank, world_size=world, timeout=timeout, device_id=device.torch)
    before = module.contexts() - {rank}  # of jobs that this process has run: a context is for good
    monitor = Monitor(rank)

    def report():
        observed = monitor.report()
        return replace(observed, contexts=observed.contexts - before)

    yield device, report
    dist.barrier()
    dist.destroy_process_group()


def peak_of_two_steps(rank, gpu, report, run, start):
    """The pipeline rank, and the most bytes of the allocator over two steps, without what was there before.

    Args:
        rank: of the job.
        gpu: of the rank.
        report: of its GPU.
        run: the resolved run.
        start: of the mesh an engine, its microbatches, and the valid tokens of the batch.
    """
    gc.collect()  # engines of tests before
    torch.cuda.synchronize()
    device_module().reset_peak(rank)
    before = torch.cuda.memory_allocated()
    mesh = build_mesh(run.plan, rank, gpu, timeout=TIMEOUT)
    engine, mine, valid_tokens = start(mesh)
    for _ in range(2):
        engine.train_step(mine, valid_tokens=valid_tokens, lr=1e-3)
    peak = report().peak_bytes - before
    mesh.destroy()
    return mesh.at.pp, peak


def run_to_the_end(world, job, folder, *args, limit_s=60.0):
    """The job on ranks that may die: of each, its exit status and what it wrote to stderr. ``job(rank, world, *args)``
    finds no process group; its store is a file of the folder.
    """
    context = fork_context(IMPORTED)
    ranks = [context.Process(target=_write_apart, args=(rank, world, job, folder, args)) for rank in range(world)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(limit_s)
        rank.kill()
        rank.join()
    return [(rank.exitcode, (folder / f"stderr {number}").read_text()) for number, rank in enumerate(ranks)]


def _write_apart(rank, world, job, folder, args):
    with open(folder / f"stderr {rank}", "w") as file:
        os.dup2(file.fileno(), 2)
    heed_all()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    job(rank, world, folder, *args)


def begin_nccl(rank, world, folder, limit_s):
    """The default group of such ranks, each on the GPU of its number."""
    configure(device_module(), SETTINGS)
    Device("cuda", rank).make_current()
    store = dist.FileStore(str(folder / "store"), world)
    limit = timedelta(seconds=limit_s)
    gpu = torch.device("cuda", rank)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=world, timeout=limit, device_id=gpu)
    return gpu


def wait_for_text(path, text):
    """Until a file has it: the other rank's end is not to be this one's."""
    while text not in path.read_text():
        time.sleep(0.05)


def prove_on_gpus(rank, world, run, batches, folder, specs=None, settings=None, *, reruns=False):
    """The first value of a run that is not the reference's, in words, and what was observed on the GPU."""
    with gpu_of(rank, world, settings) as (device, report):
        verdict = prove(World(rank, world, device), run, batches, folder, reruns=reruns, specs=specs)
        observed = report()
    return verdict.first and verdict.first.describe(), observed


def prove_bits_on_gpus(rank, world, run, batches, folder, relay, settings=None):
    """The same of exact mode: the first number whose bits are not those of the CPU's one rank, from the start and from
    that one's checkpoint.
    """
    with gpu_of(rank, world, settings) as (device, report):
        verdict = prove_exact(World(rank, world, device), run, batches, folder, relay)
        observed = report()
    return [difference.describe() for difference in (verdict.first, verdict.first_resumed) if difference], observed
