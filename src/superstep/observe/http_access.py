"""Who may ask a server of this machine: the Host header of a request, and the key that it shows.

A page of somebody else's can have its own name lead to this machine (DNS rebinding), and the browser then lets it read
what a server here answers. It cannot change the name that the browser sends along.
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
    """The names that a server answers to.

    Attributes:
        address: that it listens on.
        names: by which it is known besides.
    """

    address: str = LOCALHOST
    names: Sequence[str] = ()

    def accept(self, headers: Sequence[str]) -> bool:
        """Whether a request with these Host headers, of which there is to be one, is for this server. On an address
        that others reach, without names, any is.
        """
        match = HEADER.fullmatch(headers[0]) if len(headers) == 1 else None
        if match is None:
            return False
        if not self.names and not _is_loopback(self.address):
            return True
        name = match[1].strip("[]").lower()
        return _is_loopback(name) or name in (known.lower() for known in (self.address, *self.names))


def _is_loopback(name: str) -> bool:
    """Whether a name or an address leads to the machine that it is used on, whatever a name server says."""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == LOCALHOST


def bearer_key(authorization: str) -> str:
    """The key in an Authorization header, ``Bearer KEY``; empty where it has another form."""
    kind, _, key = authorization.partition(" ")
    return key.strip() if kind.lower() == "bearer" else ""


def is_same_key(given: str, key: str) -> bool:
    """Whether a key is the server's, in a time that does not tell how much of it is right. An empty one never is."""
    return bool(given) and hmac.compare_digest(given.encode(), key.encode())
