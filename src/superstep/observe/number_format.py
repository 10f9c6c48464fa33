"""Numbers for readers. Quantities are in base units everywhere else."""

from __future__ import annotations

from collections.abc import Sequence


def count_text(number: float) -> str:
    """Three digits and a decimal unit: 950, 12.3k, 7.11M, 8.03B."""
    return _scale(number, (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)), "")


def rate_text(flops_per_s: float) -> str:
    """Three digits and a decimal unit: 173 GFLOP/s, 0.99 PFLOP/s."""
    return _scale(
        flops_per_s, ((" PFLOP/s", 1e15), (" TFLOP/s", 1e12), (" GFLOP/s", 1e9), (" MFLOP/s", 1e6)), " FLOP/s"
    )


def bytes_text(size: float) -> str:
    """Three digits and a binary unit: 61.4 MiB, 1.25 GiB."""
    return _scale(size, ((" TiB", 2.0**40), (" GiB", 2.0**30), (" MiB", 2.0**20), (" KiB", 2.0**10)), " B")


def seconds_text(seconds: float) -> str:
    """A short time: 12.5 ms, 1.25 s, 310 s."""
    return _digits(seconds) + " s" if seconds >= 1 else _digits(seconds * 1e3) + " ms"


def duration_text(seconds: float) -> str:
    """A long time as a clock shows it: 1:23, 2:05:09, 3d 04:10."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02}:{minute:02}"
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def sparkline(values: Sequence[float], *, is_ascii: bool = False) -> str:
    """One character for each value, from the lowest value to the ninth decile.

    Higher values are drawn at that decile's height: the first steps' fall, or one spike, would flatten the rest.
    """
    marks = "_.-=+*#@" if is_ascii else "▁▂▃▄▅▆▇█"
    if not values:
        return ""
    ordered = sorted(values)
    low, high = ordered[0], ordered[len(ordered) * 9 // 10]
    if low == high:
        return marks[0] * len(values)
    return "".join(marks[round((min(value, high) - low) / (high - low) * (len(marks) - 1))] for value in values)


def _scale(number: float, units: tuple[tuple[str, float], ...], unit: str) -> str:
    for larger, scale in units:
        if number >= scale:
            return _digits(number / scale) + larger
    return f"{number:.0f}{unit}"


def _digits(number: float) -> str:
    """Three digits, more only before the point."""
    return f"{number:.3g}" if number < 999.5 else f"{number:.0f}"
