"""State of a run from outside: from its ranks' memory while it runs, else from its fault record."""

from __future__ import annotations

import mmap
import os
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from superstep.errors import StateError, UserError
from superstep.launch.stack_dump import ask, ask_spy, threads_of
from superstep.monitor.rank_inspector import RankInspector, views_of, with_notes
from superstep.observe.doctor.failure_file import read_box
from superstep.observe.doctor.observations import Disk, RankObservation, RunObservation
from superstep.plan.config import PlanConfig
from superstep.plan.config_io import read_config
from superstep.plan.mesh import MeshShape
from superstep.program.instructions import Program
from superstep.program.text import read_program
from superstep.train.run_folder.run_lock import owner, sharers
from superstep.train.run_folder.run_paths import RunFolder

STOPPED = ("T", "t", "")
"""States of a process that cannot answer."""


@dataclass(frozen=True, slots=True)
class LiveRun:
    """A running run that can be inspected.

    Attributes:
        folder: of the run.
        views: the status page of each rank.
        looker: inspects the ranks.
    """

    folder: RunFolder
    views: Mapping[int, mmap.mmap]
    looker: RankInspector

    def observe(self) -> RunObservation:
        """The current state, without stacks."""
        ranks = (with_notes(rank, self.views[rank.rank]) for rank in self.looker.look())
        return _run(self.folder, tuple(ranks))

    def with_stacks(self, run: RunObservation) -> RunObservation:
        """The observation with the ranks' current stacks. Take it last: the request may wake a process that sleeps in a
        system call.
        """
        places = self.looker.stacks()
        stacks = ask({rank.process: places.get(rank.process, 0) for rank in run.ranks if rank.state not in STOPPED})
        spy = shutil.which("py-spy")
        for rank in run.ranks:
            if spy is not None and rank.state and not stacks.get(rank.process):
                stacks[rank.process] = ask_spy(spy, rank.process)
        return replace(run, ranks=tuple(replace(r, stacks=threads_of(stacks.get(r.process, ""))) for r in run.ranks))


@contextmanager
def live(
    folder: RunFolder, make: Callable[[Mapping[int, mmap.mmap]], RankInspector] = RankInspector
) -> Iterator[LiveRun | None]:
    """The run while it trains; None if it does not, or runs on another host."""
    process = owner(folder)
    views = {} if process is None or not folder.program.is_file() else views_of(process)
    if len(views) == 1:  # ranks without our launcher, as with torchrun, have a page each
        views = {rank: view for each in sharers(folder) for rank, view in views_of(each).items()} or views
    try:
        yield LiveRun(folder, views, make(views)) if views else None
    finally:
        for view in views.values():
            view.close()


def read_failure(folder: RunFolder) -> RunObservation | None:
    """The run at its last failure; None without a record.

    Raises:
        StateError: the record cannot be read.
    """
    if not folder.fault.is_file():
        return None
    box = read_box(folder.fault)
    return replace(_run(folder, box.ranks), is_live=False, fault=box.fault, host=box.host)


def over(folder: RunFolder) -> RunObservation:
    """A run that is not running and has no record."""
    return replace(_run(folder, ()), is_live=False)


def require_run(folder: RunFolder) -> None:
    """Check that a folder is a run's.

    Raises:
        StateError: it is not.
    """
    if not (folder.config.is_file() and folder.program.is_file()):
        raise StateError(
            f"'{folder.root}' is not a run directory: it lacks run.toml or program.txt. Name the folder of a run."
        )


def program_of(folder: RunFolder) -> Program:
    """The program of a run's steps.

    Raises:
        StateError: the folder is not a run's, or the file cannot be read.
    """
    require_run(folder)
    try:
        return read_program(folder.program.read_text(encoding="utf-8"))
    except (OSError, ValueError, UserError) as error:
        raise StateError(f"{folder.program} cannot be read ({error}); resuming the run writes it anew.") from error


def _run(folder: RunFolder, ranks: tuple[RankObservation, ...]) -> RunObservation:
    mesh = mesh_of(read_config(folder.config).plan)
    return RunObservation(
        program=program_of(folder), mesh=mesh, ranks=ranks, host=platform.node(), disk=disk_of(folder)
    )


def mesh_of(plan: PlanConfig) -> MeshShape:
    """The mesh of a run, from a configuration without automatic fields."""
    dp, ep = plan.dp or 1, plan.ep or 1
    return MeshShape(pp=plan.pp, dp=dp, cp=plan.cp, tp=plan.tp, ep=ep, replicas=plan.replicas)


def disk_of(folder: RunFolder) -> Disk:
    """Disk space that a run needs."""
    needed = 0
    with suppress(OSError):
        # By names alone: reading checkpoints needs torch, which takes too long to import here.
        for path in sorted(folder.checkpoints.glob("step-" + "[0-9]" * 6))[-1:]:
            needed = sum(os.lstat(each).st_size for each in path.iterdir())
    try:
        return Disk(free_bytes=shutil.disk_usage(folder.root).free, needed_bytes=needed)
    except OSError:
        return Disk(needed_bytes=needed)
