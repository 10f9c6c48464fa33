"""The hosts of a run, their addresses, and the ranks that each of them has."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

from superstep.errors import ConfigError, UserError
from superstep.launch.network_interface import address_to
from superstep.plan.resolution.resolve import Resolved


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """The hosts of a run, from the view of one of them.

    Attributes:
        number: of this one.
        count: number of hosts.
        meet: address of host 0.
        secret: of the run.
        patience_s: how long to wait for a host.
        without_s: how long to wait for a lost host, before an elastic run continues without it.
    """

    number: int
    count: int
    meet: tuple[str, int]
    secret: bytes
    patience_s: float
    without_s: float


def share_out(run: Resolved, hosts: int) -> Resolved:
    """The run with automatic settings for several hosts filled in.

    Raises:
        ConfigError: the hosts cannot share the ranks evenly.
    """
    world = run.plan.mesh.world
    if world % hosts:
        fits = [count for count in range(2, world + 1) if world % count == 0]
        raise ConfigError(
            f"--hosts = {hosts} does not divide the plan's {world} ranks; "
            + (f"give one of {fits}, or change the plan." if fits else "one rank needs one host: leave --hosts out.")
        )
    if sys.platform != "linux":
        raise ConfigError("--hosts needs Linux; start the run with torchrun.")
    state = run.config.state
    peers = state.peers if state.peers is not None else int(state.snapshot_every is not None)
    if peers > 1 or (peers and state.snapshot_every is None):
        raise ConfigError(
            f"state.peers = {peers}: one other host has copies of snapshots, or none; set 0, or 1 and "
            "state.snapshot_every."
        )
    return replace(run, config=replace(run.config, state=replace(state, peers=peers)))


def own_address(hosts: Hosts) -> str:
    """The address of this host from which host 0 can be reached.

    Raises:
        UserError: there is none.
    """
    try:
        return address_to(hosts.meet)
    except OSError as error:
        raise UserError(f"--meet = {hosts.meet[0]}:{hosts.meet[1]} cannot be reached ({error}).") from error
