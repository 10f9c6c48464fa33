"""Elastic runs: plans for fewer hosts, and checkpoints from memory before the plan changes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from superstep.comm.device import Device, choose
from superstep.comm.objects import RankPeers
from superstep.cost.closed.memory import COMMUNICATOR_BYTES, CONTEXT_BYTES, USABLE
from superstep.cost.program.memory.snapshot_memory import snapshot_bytes
from superstep.errors import ConfigError, disk_fault
from superstep.hardware.catalogue import of_device
from superstep.hardware.cpu_core import cores
from superstep.hardware.network import usual_cluster
from superstep.launch.ranks import World
from superstep.plan.resolution.resolve import Resolved
from superstep.planner.elastic import SmallerPlan, smaller_plan
from superstep.state.snapshots.background_checkpoint import write_down
from superstep.state.snapshots.held_folder import HeldFolder
from superstep.state.snapshots.memory_snapshot import Handles, State
from superstep.train.run_folder.folder_watch import RunFolderMoved
from superstep.train.run_folder.run_lock import hold_shared
from superstep.train.run_folder.run_paths import RunFolder

DRIVER = Path("/proc/driver/nvidia/gpus")
"""Linux's list of GPUs, read without touching one."""


def plans_of(run: Resolved, hosts: int) -> dict[int, Resolved]:
    """The run's plan for each possible number of hosts: the requested one, and, for an elastic run, the best for each
    smaller number, unless one for fewer hosts is faster.

    Raises:
        ConfigError: it should be elastic, but there is no smaller plan, or no snapshots.
    """
    plans = {hosts: run}
    if not run.config.train.elastic:
        return plans
    if run.config.state.snapshot_every is None:
        raise ConfigError("train.elastic = true needs states in memory; set state.snapshot_every = 1.")
    size, fastest_s = run.plan.mesh.world // hosts, float("inf")
    for count in range(1, hosts):
        smaller = find_smaller_plan(run, count, size)
        if smaller is not None and smaller.step_s < fastest_s:
            plans[count], fastest_s = smaller.run, smaller.step_s
    if len(plans) == 1:
        raise ConfigError(
            f"train.elastic = true: no plan fits fewer than {hosts} hosts of {size} ranks, which cuts "
            f"train.batch_sequences = {run.config.train.batch_sequences} and the model and leaves room for snapshots; "
            "set it to false, or use a smaller model."
        )
    return plans


def find_smaller_plan(run: Resolved, hosts: int, size: int) -> SmallerPlan | None:
    """The best plan on ``hosts`` hosts with ``size`` ranks each."""
    if choose(run.config.plan.device, size) == "cpu":
        free_bytes = Device("cpu").free_bytes(size)
        return smaller_plan(run, cores(hosts * size, size), free_bytes, snapshot_bytes, is_host=True)
    name = local_gpu()
    chip = of_device(name)
    if chip is None:
        raise ConfigError(
            f"train.elastic = true: plans for fewer hosts are held against each other by the catalogue's figures, and "
            f"it does not have the GPU '{name}'; set it to false."
        )
    cluster = replace(usual_cluster(chip, hosts * size), domain=min(chip.domain, size))
    memory_bytes = USABLE * chip.memory_bytes - CONTEXT_BYTES - COMMUNICATOR_BYTES
    return smaller_plan(run, cluster, memory_bytes)


def local_gpu() -> str:
    """The name of this host's first GPU: torch would use a part of its memory."""
    for place in sorted(DRIVER.glob("*/information")):
        for line in place.read_text(encoding="utf-8").splitlines():
            if line.startswith("Model:"):
                return line.partition(":")[2].strip()
    return "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class StateParts:
    """A host's parts of a state.

    Attributes:
        handles: of ranks' memories.
        state: the state.
        folder: of the run.
        keep: number of checkpoints that stay.
        displaced: the moved run directory, if so, as this host's launcher sees it.
    """

    handles: tuple[Handles, ...]
    state: State
    folder: RunFolder
    keep: int
    displaced: RunFolderMoved | None = None


def write_parts(world: World, parts: StateParts) -> None:
    """Write one host's parts of a checkpoint, from which any plan can resume.

    Raises:
        Fault: the run directory was moved or removed, and the state is written at its new path, or beside; or another
            folder has taken its name meanwhile.
    """
    peers = RankPeers(world.rank, world.size)
    displaced = peers.gather(parts.displaced, RunFolderMoved | None)[0]
    folder = parts.folder if displaced is None else RunFolder(root=displaced.now)
    memories = [handles.of(handles.first + at) for handles in parts.handles for at in range(len(handles.numbers))]
    slots = [(memory, memory.states()[parts.state]) for memory in memories]
    try:
        held = HeldFolder(folder.root)
    except OSError as error:
        raise disk_fault(error, folder.root) from error
    with hold_shared(folder), held:
        write_down(slots, folder.checkpoints, parts.keep, peers, require=held.refuse_another)
    if displaced is not None:
        raise displaced.fault(parts.state[0])
