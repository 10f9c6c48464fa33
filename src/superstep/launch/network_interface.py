"""The address and the interface by which this host reaches another."""

from __future__ import annotations

import fcntl
import socket
import struct

_SIOCGIFADDR = 0x8915
_ADDRESS = slice(20, 24)


def address_to(there: tuple[str, int]) -> str:
    """This host's address on the way to another; sends nothing. Raises OSError where there is no route, or no such
    host.
    """
    family, kind, protocol, _, at = socket.getaddrinfo(*there, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(at)
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """The interface that has an IPv4 address; None where Linux does not say."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has no such address
                continue
            if socket.inet_ntoa(reply[_ADDRESS]) == address:
                return name
    return None
