"""Access to a local server: the Host header of a request, and its key.

A foreign page can let its own name resolve to this machine (DNS rebinding), and the browser then lets it read a local
server's answers. It cannot change the Host header that the browser sends.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass

LOCALHOST = "localhost"
HEADER = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:\d{1,5})?", re.IGNORECASE)
"""A name or an address, and a port."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostNames:
    """The names that a server accepts. ``address``: where it listens. ``names``: its further names."""

    address: str = LOCALHOST
    names: Sequence[str] = ()

    def accept(self, headers: Sequence[str]) -> bool:
        """Whether a request with these Host headers is for this server; exactly one is required. On an address that
        other machines reach, without names, any is accepted.
        """
        match = HEADER.fullmatch(headers[0]) if len(headers) == 1 else None
        if match is None:
            return False
        if not self.names and not _is_loopback(self.address):
            return True
        name = match[1].strip("[]").lower()
        return _is_loopback(name) or name in (known.lower() for known in (self.address, *self.names))


def _is_loopback(name: str) -> bool:
    """Whether a name or an address always leads to the machine itself, whatever a name server says."""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == LOCALHOST


def bearer_key(authorization: str) -> str:
    """The key in an Authorization header, ``Bearer KEY``; empty for any other form."""
    kind, _, key = authorization.partition(" ")
    return key.strip() if kind.lower() == "bearer" else ""


def is_same_key(given: str, key: str) -> bool:
    """Compare a key with the server's in constant time. An empty key never matches."""
    return bool(given) and hmac.compare_digest(given.encode(), key.encode())
