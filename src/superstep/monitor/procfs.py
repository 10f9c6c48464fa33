"""What Linux reports of a process or a thread, from its folder below /proc."""

from __future__ import annotations

from pathlib import Path


def status_in(place: Path) -> dict[str, str]:
    """The lines of ``status`` by name. Raises OSError where the process has gone."""
    lines = (place / "status").read_text(encoding="utf-8").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


def is_held(process: int) -> bool:
    """Whether the system lets no thread of a process go on, or end: each has ended or waits for a disk or a mount."""
    try:
        states = {stat_in(thread)[0] for thread in Path(f"/proc/{process}/task").iterdir()}
    except OSError:
        return False
    return b"D" in states <= {b"D", b"Z", b"X"}


def stat_in(place: Path) -> list[bytes]:
    """The words of ``stat`` from the state on: after the name, which may hold anything. Raises OSError likewise."""
    stat = (place / "stat").read_bytes()
    return stat[stat.rfind(b")") + 2 :].split()
