"""The bubble of a schedule by the papers' formulas: idle over busy time, for stages of equal length.

p ranks, v stages on each, m microbatches; F, B and W are the seconds of a stage's forward pass, and of the two halves
of its backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass

from superstep.plan.config import Schedule

FORMULAS: dict[Schedule, str] = {
    "gpipe": "(p - 1) / m",
    "1f1b": "(p - 1) / m",
    "interleaved": "(p - 1) / (v·m)",
    "breadth-first": "(p - 1) / (v·m)",
    "zb-h1": "(p - 1)·(F + B - W) / (m·(F + B + W))",
    "zb-v": "(p - 1) / (6·m)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSeconds:
    """Seconds of a stage's passes over one microbatch."""

    forward_s: float
    input_s: float
    weight_s: float


def compute_closed_bubble(
    schedule: Schedule, *, pp: int, chunks: int, microbatches: int, passes: PassSeconds, group: int | None = None
) -> float:
    """Idle over busy time (Narayanan 2021, sec. 2.2; Qi 2023, sec. 2.1 and 6).

    ``group`` is breadth-first's: each group fills and drains the pipeline again.
    """
    fill = pp - 1
    match schedule:
        case "gpipe" | "1f1b":
            return fill / microbatches
        case "interleaved":
            return fill / (chunks * microbatches)
        case "breadth-first":
            return fill / (chunks * (group or microbatches))
        case "zb-h1":
            whole_s = passes.forward_s + passes.input_s + passes.weight_s
            open_s = passes.forward_s + passes.input_s - passes.weight_s
            return fill * open_s / (microbatches * whole_s) if whole_s else 0.0
        case "zb-v":
            return fill / (6 * microbatches)
