"""A run on several hosts: a launcher on each; host 0's leads and prepares, and all others follow.

host 0      the run directory, the tokens ─ Lead ─┐
                                                  ├─ attend: ranks of this host, again and again, until it is over
host 1, ..  ────────────────────────────  Member ─┘
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from superstep.errors import SuperstepError, UserError
from superstep.launch.hosts.coordinator import Coordinator
from superstep.launch.hosts.coordinator_state import CoordinatorState
from superstep.launch.hosts.copy_schedule import ScheduleKeeper
from superstep.launch.hosts.events import Cause, RunOver, StartRanks
from superstep.launch.hosts.follow_orders import attend, make_error
from superstep.launch.hosts.listener import SecureListener
from superstep.launch.hosts.member import Member
from superstep.launch.hosts.messages import HELLO, Address
from superstep.launch.hosts.tcp_store import TcpStore
from superstep.plan.resolution.resolve import Resolved
from superstep.run.console import Console
from superstep.run.exit_messages import end_by_signal, end_by_stop
from superstep.run.hosts.hosted_run import HostedRun, J
from superstep.run.hosts.hosts import Hosts
from superstep.run.hosts.this_host import ThisHost
from superstep.run.reports.plan_line import plan_text
from superstep.state.checkpoint import read_position
from superstep.state.verify import newest
from superstep.train.run_folder.run_paths import RunFolder


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
    here = ThisHost(kind, hosts, address, console)
    if hosts.number == 0:
        for count in sorted(here.plans, reverse=True)[1:]:
            console.say(f"on {count} host{'s' * (count > 1)}: {plan_text(here.plans[count])}")
    return _lead(here) if hosts.number == 0 else _follow(here)


def _lead(here: ThisHost[J]) -> int:
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
        with here.kind.prepare() as job:
            if job is None:
                last = RunOver()
                return 0
            here.job = job
            lead.begin()
            try:
                last = attend(0, here.name, lead.orders, lead.handle_event, here, console.say)
            except BaseException as error:
                last = _make_end(error)  # before the message on how this host resumes
                if (status := end_by_signal(error, job.folder, console, here.verb)) is not None:
                    return status
                raise
            return _ending(last, here)
    except SuperstepError as error:
        last = last or _make_end(error)
        raise
    finally:
        lead.close(last or RunOver(Cause("host 0 has left the run")))


def _make_end(error: BaseException) -> RunOver:
    """The message to other hosts when host 0 ends by an error of its own."""
    text = f"host 0: {error}" if isinstance(error, SuperstepError) else "host 0 has left the run"
    return RunOver(Cause(text, is_mistake=isinstance(error, UserError)))


def _follow(here: ThisHost[J]) -> int:
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
        return _ending(
            attend(hosts.number, here.name, member.orders, member.handle_event, here, here.console.say), here
        )
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


def _ending(over: RunOver, here: ThisHost[J]) -> int:
    if over.cause is not None:
        error = make_error(over.cause)
        if here.job is not None:
            end_by_signal(error, here.job.folder, here.console, here.verb)
        raise error
    if here.is_stopped and here.job is not None:
        return end_by_stop(here.job.folder, here.console, here.verb)
    if here.job is not None:
        here.console.say(f"\nResults: {here.job.folder.root}")
    return 0
