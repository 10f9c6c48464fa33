"""A run as it is seen from outside: while it is live out of its ranks' memory, else out of the file that it left."""

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
"""States of a process that answers no question."""


@dataclass(frozen=True, slots=True)
class LiveRun:
    """A run whose ranks can be looked at.

    Attributes:
        folder: of the run.
        views: the page of each rank.
        looker: that looks at them.
    """

    folder: RunFolder
    views: Mapping[int, mmap.mmap]
    looker: RankInspector

    def seen(self) -> RunObservation:
        """All that is known of it now, but for stacks."""
        ranks = (with_notes(rank, self.views[rank.rank]) for rank in self.looker.look())
        return _run(self.folder, tuple(ranks))

    def asked(self, run: RunObservation) -> RunObservation:
        """What was seen, with the stacks of the ranks as they are now. All else is to be seen before: the question may
        wake who sleeps within a call of the system.
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
    """The run, while it trains; None where it does not, or not on this host."""
    process = owner(folder)
    views = {} if process is None or not folder.program.is_file() else views_of(process)
    if len(views) == 1:  # ranks that nobody has launched, torchrun's say, have a page each
        views = {rank: view for each in sharers(folder) for rank, view in views_of(each).items()} or views
    try:
        yield LiveRun(folder, views, make(views)) if views else None
    finally:
        for view in views.values():
            view.close()


def read_failure(folder: RunFolder) -> RunObservation | None:
    """The run as it was when it failed last; None where it has left nothing.

    Raises:
        StateError: what it has left cannot be read.
    """
    if not folder.fault.is_file():
        return None
    box = read_box(folder.fault)
    return replace(_run(folder, box.ranks), is_live=False, fault=box.fault, host=box.host)


def over(folder: RunFolder) -> RunObservation:
    """A run that does not train and has left nothing of its ranks."""
    return replace(_run(folder, ()), is_live=False)


def require_run(folder: RunFolder) -> None:
    """See that a folder is a run's.

    Raises:
        StateError: it is not.
    """
    if not (folder.config.is_file() and folder.program.is_file()):
        raise StateError(
            f"'{folder.root}' is no run directory: it lacks run.toml or program.txt. Name the folder that train wrote."
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
    """The mesh of a run, whose configuration has every automatic field filled in."""
    dp, ep = plan.dp or 1, plan.ep or 1
    return MeshShape(pp=plan.pp, dp=dp, cp=plan.cp, tp=plan.tp, ep=ep, replicas=plan.replicas)


def disk_of(folder: RunFolder) -> Disk:
    """Where a run writes."""
    needed = 0
    with suppress(OSError):
        # By their names alone: what is in one is known to code that brings torch, for which nobody here has the time.
        for path in sorted(folder.checkpoints.glob("step-" + "[0-9]" * 6))[-1:]:
            needed = sum(os.lstat(each).st_size for each in path.iterdir())
    try:
        return Disk(free_bytes=shutil.disk_usage(folder.root).free, needed_bytes=needed)
    except OSError:
        return Disk(needed_bytes=needed)
