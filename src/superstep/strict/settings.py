"""Settings of emulated GPUs, and the order of their tasks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Order = Literal["issued", "seeded", "latest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of all devices of a process.

    Attributes:
        devices: number of devices.
        device_bytes: memory of each device.
        seed: seed of the random order of tasks, and of the pauses between them.
        delay_us: longest pause before a task; one task in four has a pause.
        order: the order of tasks in different streams. ``issued``: as the host issued them. ``seeded``: random.
            ``latest``: no kernel runs until the host waits, or issues nothing for 20 ms; then as ``seeded``. All orders
            report the same races, because a race is detected when a call is issued.
        raises: whether the second call of a race raises an error; if not, the race is only recorded.
    """

    devices: int = 1
    device_bytes: int = 4 << 30
    seed: int = 0
    delay_us: int = 0
    order: Order = "seeded"
    raises: bool = True
