"""What Linux tells of a process, or of a thread, in its folder below /proc."""

from __future__ import annotations

from pathlib import Path


def status_in(place: Path) -> dict[str, str]:
    """The lines of ``status``, by their names. Raises OSError where it has gone."""
    lines = (place / "status").read_text(encoding="utf-8").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


def stat_in(place: Path) -> list[bytes]:
    """The words of ``stat`` from its state on: behind the name, which may hold anything. Raises OSError likewise."""
    stat = (place / "stat").read_bytes()
    return stat[stat.rfind(b")") + 2 :].split()
