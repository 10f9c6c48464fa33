"""This host's part of a run on several: its ranks, and the memory that outlives them."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Generic

import superstep
from superstep.comm.device import choose
from superstep.launch.failure import RankFailure
from superstep.launch.hosts.membership import HeldStates
from superstep.launch.hosts.messages import Fetching, Hello, Orders
from superstep.launch.hosts.replica_store import ReplicaStore
from superstep.launch.ranks import RankWorld, launch_here
from superstep.launch.rendezvous import Rendezvous
from superstep.plan.config_io import write_config
from superstep.run.console import Console
from superstep.run.hosts.elastic import StateParts, write_parts
from superstep.run.hosts.hosted_run import HostedRun, J
from superstep.run.hosts.hosts import Hosts
from superstep.state.snapshots.memory_snapshot import Handles
from superstep.train.run_folder.folder_watch import FolderWatch


class ThisHost(Generic[J]):
    """This host's part of the run: its ranks, and the memory that outlives them."""

    def __init__(self, kind: HostedRun[J], hosts: Hosts, address: str, console: Console) -> None:
        run = kind.run
        self.kind, self.resolved, self.hosts, self.address, self.console = kind, run, hosts, address, console
        self.size = run.plan.mesh.world // hosts.count
        self.plans = kind.plans
        self.name = f"{hosts.number} ({os.uname().nodename})"
        self.job: J | None = None
        self._watch: FolderWatch | None = None
        self.is_stopped = False
        meet = f"{hosts.meet[0]}:{hosts.meet[1]}"
        self.verb = f"{kind.verb} --hosts {hosts.count} --host {hosts.number} --meet {meet}"
        state = run.config.state
        kept = 0 if state.snapshot_every is None else self.size
        peers, rate = state.peers or 0, state.peer_bytes_per_s
        self.keeper = ReplicaStore(kept, hosts.secret, peers=peers, bytes_per_s=rate, say=console.say)

    def hello(self, port: int) -> Hello:
        """This host's introduction to other launchers."""
        # The resume settings may differ: only host 0 uses them.
        config = self.resolved.config
        configs = [config, *(self.plans[count].config for count in sorted(self.plans))]
        text = "".join(write_config(replace(each, state=replace(each.state, existing="refuse"))) for each in configs)
        text += self.kind.text
        self.keeper.hello = Hello(
            purpose="join",
            host=self.hosts.number,
            hosts=self.hosts.count,
            run=hashlib.sha256(text.encode()).hexdigest(),
            version=superstep.__version__,
            process=secrets.token_hex(16),
            port=port,
        )
        return self.keeper.hello

    def list_held(self) -> HeldStates:
        """Complete states in the memory of this host."""
        return self.keeper.list_held()

    def fetch(self, order: Fetching) -> None:
        """Fetch a state of its ranks from another host."""
        self.keeper.fetch(order)

    def run(self, given: Orders, cut: Connection, on_trouble: Callable[[RankFailure], None]) -> bool:
        """Start its ranks, and wait for them; whether all have finished."""
        if self.job is None:
            self.job = self.kind.job(given)
        if self._watch is None and self.job.folder.root.is_dir():
            self._watch = self.kind.watch(self.job)
        crew = given.go.crew(self.hosts.count)
        at = crew.index(self.hosts.number)
        if given.go.sources:
            return launch_here("cpu", [self._writes(given, self.job, at)], cut, on_trouble)[1]
        job = self.kind.start_job(self.job, given, self._snapshots(at))
        worlds = list(self._worlds_here(given, at, self.kind.worlds(job, self.console)))
        device = choose(job.run.config.plan.device, sum(each.size for each in worlds))
        self.keeper.begin(given)
        try:
            value, is_done = launch_here(device, worlds, cut, on_trouble)
        finally:
            self.keeper.rest()
            self.console.restore()
        self.is_stopped = bool(value)
        return is_done

    def _worlds_here(self, given: Orders, at: int, worlds: Sequence[RankWorld]) -> Iterator[RankWorld]:
        """This host's share of the ranks of some worlds; it is the ``at``-th participating host."""
        shared, *others = worlds
        yield replace(shared, size=self.size, meeting=self._meeting(given, self.size * at, shared.size))
        share = len(others) // len(given.go.crew(self.hosts.count))
        for each in others[share * at : share * (at + 1)]:
            yield replace(each, meeting=self._meeting(given, 0, each.size))

    def _meeting(self, given: Orders, first: int, world: int) -> Rendezvous:
        """The rendezvous of a world, of which this host has the ranks from ``first`` on."""
        return Rendezvous(
            store=given.store,
            first=first,
            world=world,
            host=self.name,
            address=self.address,
            secret=self.hosts.secret,
        )

    def _writes(self, given: Orders, job: J, at: int) -> RankWorld:
        """A rank that writes this host's parts of a checkpoint."""
        go, number = given.go, self.hosts.number
        crew = go.crew(self.hosts.count)
        assert go.state is not None
        of = [host for host, source in zip(go.cut.crew(self.hosts.count), go.sources, strict=True) if source == number]
        kept = [self.keeper.own] * (number in of) + [self.keeper.copies] * any(host != number for host in of)
        displaced = None if self._watch is None else self._watch.look()
        if self._watch is not None and displaced is not None and at == 0:
            self._watch.make(displaced)
        parts = StateParts(
            handles=tuple(kept),
            state=go.state,
            folder=job.folder,
            keep=job.run.config.state.keep,
            displaced=displaced,
        )
        return RankWorld(size=1, worker=write_parts, args=(parts,), meeting=self._meeting(given, at, len(crew)))

    def _snapshots(self, at: int) -> Handles | None:
        has_some = self.resolved.config.state.snapshot_every is not None
        return replace(self.keeper.own, first=self.size * at) if has_some else None
