"""Settings of emulated GPUs, and the order of their tasks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Order = Literal["issued", "seeded", "latest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of all devices of a process.

    Attributes:
        devices: their number.
        device_bytes: the memory of each.
        seed: of the order of tasks in different streams, and of the pauses between them.
        delay_us: the longest pause before a task; one in four has one.
        order: ``issued``, ``seeded``, or ``latest``: no kernel runs until the host waits, or issues nothing for 20 ms;
            then as ``seeded``. All of them report the same races, as these are detected when a call is issued.
        raises: whether a race is an error of the second call; else it is only recorded.
    """

    devices: int = 1
    device_bytes: int = 4 << 30
    seed: int = 0
    delay_us: int = 0
    order: Order = "seeded"
    raises: bool = True
