"""Address and shutdown of verbs that serve HTTP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from superstep.cli.flags.options import Bounds
from superstep.launch.stop_request import GRACE_S

MOST_GRACE_S = 86_400.0
PORTS = Bounds(least=0, most=65535)


@dataclass(frozen=True, slots=True, kw_only=True)
class PortOptions:
    """Options of a server's address."""

    host: str = "127.0.0.1"
    """The address to listen on; the default is reachable from this machine alone."""
    port: Annotated[int, PORTS] = 8000
    """The port to listen on; 0 takes a free one."""
    allowed_hosts: tuple[str, ...] = ()
    """Names that a request's Host header may have besides loopback's; an address that others can reach accepts any if
    none is named.
    """
    grace_s: Annotated[float, Bounds(least=0, most=MOST_GRACE_S)] = GRACE_S
    """Seconds for running answers once the server is told to end; new requests are refused meanwhile."""
