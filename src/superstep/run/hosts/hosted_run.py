"""What a kind of run does so that several hosts can share its ranks."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

from superstep.launch.hosts.events import StartRanks
from superstep.launch.hosts.messages import Orders
from superstep.launch.ranks import RankWorld
from superstep.plan.resolution.resolve import Resolved
from superstep.run.console import Console
from superstep.state.snapshots.memory_snapshot import Handles
from superstep.train.run_folder.folder_watch import FolderWatch
from superstep.train.run_folder.run_paths import RunFolder


class HostJob(Protocol):
    """The job of a run's ranks."""

    @property
    def run(self) -> Resolved: ...
    @property
    def folder(self) -> RunFolder: ...


J = TypeVar("J", bound=HostJob)


class HostedRun(Protocol[J]):
    """A kind of run on several hosts."""

    @property
    def run(self) -> Resolved:
        """The run, of ``share_out``."""

    @property
    def plans(self) -> Mapping[int, Resolved]:
        """The plan for each number of hosts."""

    @property
    def verb(self) -> str:
        """The words after superstep that resume it."""

    @property
    def text(self) -> str:
        """The settings that all hosts must have in common, besides those of the plans."""

    def prepare(self) -> AbstractContextManager[J | None]:
        """The job on host 0, with the run's directory locked; None for a complete run."""

    def facts(self, job: J, go: StartRanks) -> bytes:
        """Facts of host 0's job for the other hosts, with absolute paths, as a message."""

    def job(self, given: Orders) -> J:
        """The job on another host; raises Fault where the facts are of another kind."""

    def start_job(self, job: J, given: Orders, snapshots: Handles | None) -> J:
        """The job of ranks that are started now."""

    def watch(self, job: J) -> FolderWatch:
        """A watch of the run directory."""

    def worlds(self, job: J, console: Console) -> list[RankWorld]:
        """The worlds of the run: one that all hosts share, and others that are whole on a host each. A worker of the
        first returns whether it stopped early on request.
        """
