"""A run on several hosts: a launcher on each; host 0's leads and prepares, and all others follow.

host 0      the run directory, the tokens ─ Lead ─┐
                                                  ├─ attend: ranks of this host, again and again, until it is over
host 1, ..  ────────────────────────────  Member ─┘
"""

from __future__ import annotations

import hashlib
import os
import secrets
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import superstep
from superstep.comm.device import choose
from superstep.errors import ConfigError, SuperstepError, UserError
from superstep.launch.failure import RankFailure
from superstep.launch.hosts.coordinator import Coordinator
from superstep.launch.hosts.coordinator_state import CoordinatorState
from superstep.launch.hosts.copy_schedule import ScheduleKeeper
from superstep.launch.hosts.events import Cause, RunOver, StartRanks
from superstep.launch.hosts.follow_orders import attend, raised
from superstep.launch.hosts.listener import HostListener
from superstep.launch.hosts.member import Member
from superstep.launch.hosts.membership import HeldStates
from superstep.launch.hosts.messages import Address, Fetching, Hello, Message, Orders
from superstep.launch.hosts.network_interface import address_to
from superstep.launch.hosts.replica_store import ReplicaStore
from superstep.launch.hosts.tcp_store import TcpStore
from superstep.launch.ranks import RankWorld, launch_here
from superstep.launch.rendezvous import Rendezvous
from superstep.plan.config_io import write_config
from superstep.plan.resolution.resolve import Resolved
from superstep.run.console import Console
from superstep.run.exit_messages import ended, stopped
from superstep.run.hosts.elastic import StateParts, plans_of, write_parts
from superstep.run.hosts.hosts import Hosts
from superstep.run.job import Tokens, TrainJob, prepared_job, watch_of
from superstep.run.rank import rank
from superstep.run.recover import Recovery
from superstep.run.reports.plan_line import plan_text
from superstep.state.checkpoint import read_position
from superstep.state.snapshots.memory_snapshot import Handles
from superstep.state.verify import newest
from superstep.train.run_folder.folder_watch import FolderWatch
from superstep.train.run_folder.run_paths import RunFolder
from superstep.train.weights.model import flops_per_token, operations


def own_address(hosts: Hosts) -> str:
    """The address of this host from which host 0 can be reached.

    Raises:
        UserError: there is none.
    """
    try:
        return address_to(hosts.meet)
    except OSError as error:
        raise UserError(f"--meet = {hosts.meet[0]}:{hosts.meet[1]} cannot be reached ({error}).") from error


def on_hosts(run: Resolved, hosts: Hosts, tokens: Tokens, address: str, console: Console) -> int:
    """Train on the ranks of several hosts; the exit status of this host's launcher.

    Args:
        run: of ``share_out``.
        hosts: that share its ranks.
        tokens: makes or opens them on host 0.
        address: of this host.
        console: shows the run.

    Raises:
        SuperstepError: the run ended before its last step.
    """
    console.say(f"host {hosts.number} of {hosts.count}, {address}; host 0 is asked at {hosts.meet[0]}:{hosts.meet[1]}")
    here = _Here(run, hosts, address, console)
    if hosts.number == 0:
        for count in sorted(here.plans, reverse=True)[1:]:
            console.say(f"on {count} host{'s' * (count > 1)}: {plan_text(here.plans[count])}")
    return _led(here, tokens) if hosts.number == 0 else _followed(here)


def share_out(run: Resolved, hosts: Hosts) -> Resolved:
    """The run with automatic settings for several hosts filled in.

    Raises:
        ConfigError: the hosts cannot share the ranks evenly.
    """
    world = run.plan.mesh.world
    if world % hosts.count:
        fits = [count for count in range(2, world + 1) if world % count == 0]
        raise ConfigError(
            f"--hosts = {hosts.count} does not divide the plan's {world} ranks; "
            + (f"give one of {fits}, or change the plan." if fits else "one rank needs one host: leave --hosts out.")
        )
    if sys.platform != "linux":
        raise ConfigError("--hosts needs Linux; start the run by torchrun.")
    state = run.config.state
    peers = state.peers if state.peers is not None else int(state.snapshot_every is not None)
    if peers > 1 or (peers and state.snapshot_every is None):
        raise ConfigError(
            f"state.peers = {peers}: one other host has copies of snapshots, or none; set 0, or 1 and "
            "state.snapshot_every."
        )
    return replace(run, config=replace(run.config, state=replace(state, peers=peers)))


class _Here:
    """This host's part of the run: its ranks, and the memory that outlives them."""

    def __init__(self, run: Resolved, hosts: Hosts, address: str, console: Console) -> None:
        self.resolved, self.hosts, self.address, self.console = run, hosts, address, console
        self.size = run.plan.mesh.world // hosts.count
        self.plans = plans_of(run, hosts.count)
        self.name = f"{hosts.number} ({os.uname().nodename})"
        self.job: TrainJob | None = None
        self._watch: FolderWatch | None = None
        self.is_stopped = False
        meet = f"{hosts.meet[0]}:{hosts.meet[1]}"
        self.verb = f"train --hosts {hosts.count} --host {hosts.number} --meet {meet}"
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
            self.job = replace(_job(self.resolved, given.facts), verb=self.verb)
        if self._watch is None and self.job.folder.root.is_dir():
            self._watch = watch_of(self.job)
        crew = given.go.crew(self.hosts.count)
        at = crew.index(self.hosts.number)
        if given.go.sources:
            return launch_here("cpu", self._writes(given, self.job, at), cut, troubled)[1]
        job = self._planned(self.job, len(crew))
        kind = choose(job.run.config.plan.device, self.size)
        self.keeper.begin(given)
        planned = replace(self._complete_job(job, given), snapshots=self._snapshots(at))
        party = RankWorld(
            size=self.size, worker=rank, args=(planned, self.console), meeting=self._meeting(given, at, self.size)
        )
        try:
            value, is_done = launch_here(kind, party, cut, troubled)
        finally:
            self.keeper.rest()
            self.console.restore()
        self.is_stopped = bool(value)
        return is_done

    def _meeting(self, given: Orders, at: int, size: int) -> Rendezvous:
        """The rendezvous of ``size`` ranks of each host; this is the ``at``-th participating host."""
        world = size * len(given.go.crew(self.hosts.count))
        return Rendezvous(store=given.store, first=size * at, world=world, host=self.name)

    def _writes(self, given: Orders, job: TrainJob, at: int) -> RankWorld:
        """A rank that writes this host's parts of a checkpoint."""
        go, number = given.go, self.hosts.number
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
        return RankWorld(size=1, worker=write_parts, args=(parts,), meeting=self._meeting(given, at, 1))

    def _planned(self, job: TrainJob, hosts: int) -> TrainJob:
        """The job with the plan for ``hosts`` hosts."""
        if hosts == self.hosts.count:
            return job
        plan = self.plans[hosts]
        run = replace(plan, config=replace(plan.config, state=job.run.config.state))
        traced = operations(run)
        return replace(job, run=run, requested=job.run, operations=traced, flops_per_token=flops_per_token(run, traced))

    def _snapshots(self, at: int) -> Handles | None:
        has_some = self.resolved.config.state.snapshot_every is not None
        return replace(self.keeper.own, first=self.size * at) if has_some else None

    def _complete_job(self, job: TrainJob, given: Orders) -> TrainJob:
        go, path = given.go, given.facts["checkpoint"]
        recovered = None
        if go.lost is not None:
            step = None if go.state is None else go.state[0]
            recovered = Recovery(step, go.lost.text, go.lost.at_s, is_gain=go.lost.is_gain)
        checkpoint = None if path is None else Path(path)
        return replace(job, checkpoint=checkpoint, recovered=recovered, epoch=go.epoch)


def _facts(job: TrainJob, go: StartRanks) -> Message:
    """Facts of the run for ranks of other hosts, with absolute paths."""
    checkpoint = job.checkpoint if go.epoch == 1 else newest(job.folder.checkpoints)
    return {
        "dir": str(job.folder.root.resolve()),
        "corpus": str(job.corpus.resolve()),
        "checkpoint": None if checkpoint is None else str(checkpoint.resolve()),
        "was_complete": job.was_complete,
        "began_at_s": job.began_at_s,
        "earlier_s": job.earlier_s,
    }


def _job(run: Resolved, facts: Message) -> TrainJob:
    """The job of the ranks on a host that does not lead."""
    state = replace(run.config.state, dir=facts["dir"])
    run, traced = replace(run, config=replace(run.config, state=state)), operations(run)
    return TrainJob(
        run=run,
        folder=RunFolder(root=Path(facts["dir"])),
        corpus=Path(facts["corpus"]),
        checkpoint=None,
        was_complete=facts["was_complete"],
        operations=traced,
        flops_per_token=flops_per_token(run, traced),
        began_at_s=facts["began_at_s"],
        earlier_s=facts["earlier_s"],
    )


def _led(here: _Here, tokens: Tokens) -> int:
    """Host 0: it answers before it has prepared, which may take long."""
    hosts, config, console = here.hosts, here.resolved.config, here.console
    stores: list[TcpStore] = []

    def prepare(go: StartRanks) -> tuple[Address, Message]:
        assert here.job is not None
        stores[:] = [TcpStore(here.address)]
        return stores[0].address, _facts(here.job, go)

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
            f"--meet = {hosts.meet[0]}:{hosts.meet[1]} is where host 0 is asked, and that is here, but it cannot be: "
            f"{error.strerror}; give an address of this host and a free port."
        ) from error
    last: RunOver | None = None
    try:
        with prepared_job(here.resolved, tokens, console, hosts=hosts.count) as job:
            if job is None:
                last = RunOver()
                return 0
            here.job = job = replace(job, verb=here.verb)
            lead.begin()
            try:
                last = attend(0, here.name, lead.orders, lead.told, here, console.say)
            except BaseException as error:
                last = _left(error)  # before the message on how this host resumes
                if (status := ended(error, job.folder, console, job.verb)) is not None:
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


def _followed(here: _Here) -> int:
    """Any other host."""
    hosts = here.hosts
    door = HostListener((here.address, 0), hosts.secret, here.keeper.enters, here.console.say)
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


def _ending(over: RunOver, here: _Here) -> int:
    if over.cause is not None:
        error = raised(over.cause)
        if here.job is not None:
            ended(error, here.job.folder, here.console, here.job.verb)
        raise error
    if here.is_stopped and here.job is not None:
        return stopped(here.job.folder, here.console, here.job.verb)
    if here.job is not None:
        here.console.say(f"\nResults: {here.job.folder.root}")
    return 0
