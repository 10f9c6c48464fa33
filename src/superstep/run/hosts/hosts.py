"""The hosts of a run, and how one of them is reached by the others."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """The hosts of a run, seen from one of them.

    Attributes:
        number: of this one.
        count: how many there are.
        meet: where host 0 is asked.
        secret: of the run.
        patience_s: how long a host is waited for.
        without_s: how long a lost one is, before an elastic run goes on without it.
    """

    number: int
    count: int
    meet: tuple[str, int]
    secret: bytes
    patience_s: float
    without_s: float
