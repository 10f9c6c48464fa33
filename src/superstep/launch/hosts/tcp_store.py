"""The store where the ranks of an epoch meet; the lead keeps it, so that it outlives them."""

from __future__ import annotations

import socket

import torch.distributed as dist

from superstep.launch.hosts.messages import Address
from superstep.launch.rendezvous import TIMEOUT


class TcpStore:
    """A store at a free port of an address; it ends with this object."""

    def __init__(self, address: str) -> None:
        # Of a socket that listens at one address only: torch's own would at all of the host's.
        listening = socket.create_server((address, 0))
        self.address: Address = listening.getsockname()[:2]
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            address,
            self.address[1],
            is_master=True,
            wait_for_workers=False,
            timeout=TIMEOUT,
            master_listen_fd=listening.detach(),
        )
