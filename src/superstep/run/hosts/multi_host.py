"""A run on several hosts: a launcher on each; host 0's leads and prepares, and all others follow.

host 0      the run directory, the tokens ─ Lead ─┐
                                                  ├─ attend: ranks of this host, again and again, until it is over
host 1, ..  ────────────────────────────  Member ─┘
"""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import superstep
from superstep.comm.device import choose
from superstep.errors import SuperstepError, UserError
from superstep.launch.failure import RankFailure
from superstep.launch.hosts.coordinator import Coordinator
from superstep.launch.hosts.coordinator_state import CoordinatorState
from superstep.launch.hosts.copy_schedule import ScheduleKeeper
from superstep.launch.hosts.events import Cause, RunOver, StartRanks
from superstep.launch.hosts.follow_orders import attend, raised
from superstep.launch.hosts.listener import SecureListener
from superstep.launch.hosts.member import Member
from superstep.launch.hosts.membership import HeldStates
from superstep.launch.hosts.messages import HELLO, Address, Fetching, Hello, Orders
from superstep.launch.hosts.replica_store import ReplicaStore
from superstep.launch.hosts.tcp_store import TcpStore
from superstep.launch.network_interface import address_to
from superstep.launch.ranks import RankWorld, launch_here
from superstep.launch.rendezvous import Rendezvous
from superstep.plan.config_io import write_config
from superstep.plan.resolution.resolve import Resolved
from superstep.run.console import Console
from superstep.run.exit_messages import ended, stopped
from superstep.run.hosts.elastic import StateParts, write_parts
from superstep.run.hosts.hosts import Hosts
from superstep.run.reports.plan_line import plan_text
from superstep.state.checkpoint import read_position
from superstep.state.snapshots.memory_snapshot import Handles
from superstep.state.verify import newest
from superstep.train.run_folder.folder_watch import FolderWatch
from superstep.train.run_folder.run_paths import RunFolder


def own_address(hosts: Hosts) -> str:
    """The address of this host from which host 0 can be reached.

    Raises:
        UserError: there is none.
    """
    try:
        return address_to(hosts.meet)
    except OSError as error:
        raise UserError(f"--meet = {hosts.meet[0]}:{hosts.meet[1]} cannot be reached ({error}).") from error


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

    def prepared(self) -> AbstractContextManager[J | None]:
        """The job on host 0, with the run's directory locked; None for a complete run."""

    def facts(self, job: J, go: StartRanks) -> bytes:
        """Facts of host 0's job for the other hosts, with absolute paths, as a message."""

    def job(self, given: Orders) -> J:
        """The job on another host; raises Fault where the facts are of another kind."""

    def started(self, job: J, given: Orders, snapshots: Handles | None) -> J:
        """The job of ranks that are started now."""

    def watch(self, job: J) -> FolderWatch:
        """A watch of the run directory."""

    def worlds(self, job: J, console: Console) -> list[RankWorld]:
        """The worlds of the run: one that all hosts share, and others that are whole on a host each. A worker of the
        first returns whether it stopped early on request.
        """


def on_hosts(kind: HostedRun[J], hosts: Hosts, address: str, console: Console) -> int:
    """Train on the ranks of several hosts; the exit status of this host's launcher.

    Args:
        kind: of run.
        hosts: that share its ranks.
        address: of this host.
        console: shows the run.

    Raises:
        SuperstepError: the run ended before its last step.
    """
    console.say(f"host {hosts.number} of {hosts.count}, {address}; host 0 listens on {hosts.meet[0]}:{hosts.meet[1]}")
    here = _Here(kind, hosts, address, console)
    if hosts.number == 0:
        for count in sorted(here.plans, reverse=True)[1:]:
            console.say(f"on {count} host{'s' * (count > 1)}: {plan_text(here.plans[count])}")
    return _led(here) if hosts.number == 0 else _followed(here)


class _Here(Generic[J]):
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

    def held(self) -> HeldStates:
        """Complete states in the memory of this host."""
        return self.keeper.held()

    def fetch(self, order: Fetching) -> None:
        """Fetch a state of its ranks from another host."""
        self.keeper.fetch(order)

    def run(self, given: Orders, cut: Connection, troubled: Callable[[RankFailure], None]) -> bool:
        """Start its ranks, and wait for them; whether all have finished."""
        if self.job is None:
            self.job = self.kind.job(given)
        if self._watch is None and self.job.folder.root.is_dir():
            self._watch = self.kind.watch(self.job)
        crew = given.go.crew(self.hosts.count)
        at = crew.index(self.hosts.number)
        if given.go.sources:
            return launch_here("cpu", [self._writes(given, self.job, at)], cut, troubled)[1]
        job = self.kind.started(self.job, given, self._snapshots(at))
        worlds = list(self._worlds_here(given, at, self.kind.worlds(job, self.console)))
        device = choose(job.run.config.plan.device, sum(each.size for each in worlds))
        self.keeper.begin(given)
        try:
            value, is_done = launch_here(device, worlds, cut, troubled)
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


def _led(here: _Here[J]) -> int:
    """Host 0: it answers before it has prepared, which may take long."""
    hosts, config, console = here.hosts, here.resolved.config, here.console
    stores: list[TcpStore] = []

    def prepare(go: StartRanks) -> tuple[Address, bytes]:
        assert here.job is not None
        stores[:] = [TcpStore(here.address)]
        return stores[0].address, here.kind.facts(here.job, go)

    table = CoordinatorState(
        seats=(None,) * hosts.count,
        can_recover=config.state.snapshot_every is not None,
        patience_s=hosts.patience_s,
        sizes=tuple(sorted(here.plans)),
        without_s=hosts.without_s,
        since_s=time.time(),
    )
    try:
        mine = here.hello(hosts.meet[1])
        lead = Coordinator(
            (here.address, hosts.meet[1]),
            hosts.secret,
            mine=mine,
            table=table,
            prepare=prepare,
            copies=(here.keeper, ScheduleKeeper(config.state.snapshot_every or 1)),
            tell=console.say,
        )
    except OSError as error:
        raise UserError(
            f"--meet = {hosts.meet[0]}:{hosts.meet[1]} must be an address of this host, number 0, which cannot listen "
            f"there: {error.strerror}; give an address of this host and a free port."
        ) from error
    last: RunOver | None = None
    try:
        with here.kind.prepared() as job:
            if job is None:
                last = RunOver()
                return 0
            here.job = job
            lead.begin()
            try:
                last = attend(0, here.name, lead.orders, lead.told, here, console.say)
            except BaseException as error:
                last = _left(error)  # before the message on how this host resumes
                if (status := ended(error, job.folder, console, here.verb)) is not None:
                    return status
                raise
            return _ending(last, here)
    except SuperstepError as error:
        last = last or _left(error)
        raise
    finally:
        lead.close(last or RunOver(Cause("host 0 has left the run")))


def _left(error: BaseException) -> RunOver:
    """The message to other hosts when host 0 ends by an error of its own."""
    text = f"host 0: {error}" if isinstance(error, SuperstepError) else "host 0 has left the run"
    return RunOver(Cause(text, is_mistake=isinstance(error, UserError)))


def _followed(here: _Here[J]) -> int:
    """Any other host."""
    hosts = here.hosts
    door = SecureListener((here.address, 0), hosts.secret, HELLO, here.keeper.enters, here.console.say)
    member = Member(
        hosts.meet,
        hosts.secret,
        mine=here.hello(door.address[1]),
        patience_s=hosts.patience_s,
        copies=here.keeper,
        is_complete=lambda: _is_complete(here.resolved, here.console),
    )
    try:
        return _ending(attend(hosts.number, here.name, member.orders, member.told, here, here.console.say), here)
    finally:
        member.close()
        door.close()


def _is_complete(run: Resolved, console: Console) -> bool:
    """Whether the run's directory shows that it is complete; False if unknown."""
    folder = RunFolder(root=Path(run.config.state.dir))
    with suppress(SuperstepError, OSError):
        if run.config.state.existing == "resume" and (saved := newest(folder.checkpoints)) is not None:
            step = read_position(saved).step
            if step >= run.config.train.steps:
                console.say(f"The run in {folder.root} is complete at step {step}: host 0 has left.")
                return True
    return False


def _ending(over: RunOver, here: _Here[J]) -> int:
    if over.cause is not None:
        error = raised(over.cause)
        if here.job is not None:
            ended(error, here.job.folder, here.console, here.verb)
        raise error
    if here.is_stopped and here.job is not None:
        return stopped(here.job.folder, here.console, here.verb)
    if here.job is not None:
        here.console.say(f"\nResults: {here.job.folder.root}")
    return 0
