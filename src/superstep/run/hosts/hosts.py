"""The hosts of a run, and their addresses."""

from __future__ import annotations

from dataclasses import dataclass


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
