"""Where a verb that answers over HTTP listens, and how it ends."""

from __future__ import annotations

from dataclasses import dataclass

from superstep.errors import ConfigError

GRACE_S = 25.0
"""Less than the 30 s that Kubernetes gives."""

MOST_GRACE_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PortOptions:
    """Where to answer."""

    host: str = "127.0.0.1"
    """The address to listen on; the ordinary one is seen by this machine alone."""
    port: int = 8000
    """The port to listen on; 0 takes a free one."""
    allowed_hosts: tuple[str, ...] = ()
    """Names that a request's Host header may have beside loopback's; an address that others reach takes any where none
    is named."""
    grace_s: float = GRACE_S
    """Seconds that answers under way have once the server is told to end; new requests are refused meanwhile."""


def check_port(options: PortOptions) -> None:
    """Refuse what no server can do.

    Raises:
        ConfigError: naming the flag.
    """
    if not 0 <= options.port <= 65535:
        raise ConfigError(f"--port = {options.port} must be from 0 to 65535.")
    if not 0 <= options.grace_s <= MOST_GRACE_S:
        raise ConfigError(f"--grace-s = {options.grace_s:g} must be from 0 to {MOST_GRACE_S:g}.")
