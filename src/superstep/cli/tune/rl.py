"""superstep tune rl: learns from rewards, on ranks that sample and train."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

from superstep.cli.arguments.tune.tune import RlArgs
from superstep.cli.join_hosts import join_hosts
from superstep.cli.launcher import is_of_torchrun, launcher
from superstep.cli.serve.serve_settings import kernels_folder
from superstep.cli.train.terminal import Terminal
from superstep.launch.torchrun import join
from superstep.plan.config import DeviceKind
from superstep.run.hosts.multi_host import on_hosts
from superstep.run.rl.launch_rl import launch_rl
from superstep.run.rl.prepare_rl import prepare_rl_job
from superstep.run.rl.rl_job_message import RL_JOB
from superstep.run.rl.rl_on_hosts import RlOnHosts
from superstep.run.rl.rl_rank import torchrun_worlds
from superstep.tune.rl.config import RlRecipe
from superstep.tune.rl.job import RlJob


def run(read: Callable[[], RlArgs], *, has_hosts: bool = False) -> int:
    """Learn from rewards; the exit status.

    Args:
        read: the command line; under torchrun only rank 0 reads it.
        has_hosts: whether it asks for several hosts.
    """
    if has_hosts and (hosts := (args := read()).hosts) is not None:
        address = join_hosts(hosts)
        kind = RlOnHosts(args.recipe, hosts.count, kernels_folder(None), Terminal())
        return on_hosts(kind, hosts, address, Terminal())
    if is_of_torchrun():
        worlds = partial(torchrun_worlds, console=Terminal())
        return int(join(lambda ranks: _prepare_job(read().recipe, ranks), worlds, RL_JOB, _device))
    with _prepare_job(read().recipe) as job:
        if job is None:
            return 0
        if (status := launch_rl(job, Terminal())) is not None:
            return status
    print(f"\nResults: {job.folder.root}", flush=True)
    return 0


def _prepare_job(recipe: RlRecipe, ranks: int | None = None) -> AbstractContextManager[RlJob | None]:
    return prepare_rl_job(recipe, kernels_folder(None), Terminal(), launcher=launcher(), ranks=ranks)


def _device(job: RlJob | None) -> DeviceKind | None:
    """The device of a run's settings."""
    return None if job is None else job.run.config.plan.device
