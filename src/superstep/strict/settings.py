"""What an emulated GPU has, and how it orders what runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Order = Literal["issued", "seeded", "latest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Of all devices of a process.

    Attributes:
        devices: how many there are.
        device_bytes: the memory of each.
        seed: of the order in which tasks of different streams run, and of the pauses between them.
        delay_us: the longest pause before a task; one in four has one.
        order: ``issued``, ``seeded``, or ``latest``: no kernel runs until the host waits for something, or issues
            nothing for 20 ms, and then as drawn. What is named is the same in all, since it is found when a call is
            issued.
        raises: whether a race is an error of the call that makes it; else it is only noted.
    """

    devices: int = 1
    device_bytes: int = 4 << 30
    seed: int = 0
    delay_us: int = 0
    order: Order = "seeded"
    raises: bool = True
