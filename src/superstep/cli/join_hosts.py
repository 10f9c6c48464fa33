"""Prepares this process's environment for a run on several hosts."""

from __future__ import annotations

import os

from superstep.cli.arguments.hosts import TORCHRUN
from superstep.launch.network_interface import interface_of
from superstep.run.hosts.hosts import Hosts, own_address


def join_hosts(hosts: Hosts) -> str:
    """The address of this host. Its ranks use the network interface that reaches the others.

    Raises:
        UserError: host 0 cannot be reached.
    """
    address = own_address(hosts)
    for name in (*TORCHRUN, "LOCAL_RANK", "LOCAL_WORLD_SIZE"):  # torchrun launches these launchers, not their ranks
        os.environ.pop(name, None)
    if (interface := interface_of(address)) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # exactly this one, not all with this prefix
    return address
