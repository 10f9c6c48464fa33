"""The ledger of a run: predictions before its first step, beside the measurements.

a step                    the prediction, the median of the steps
the recorded step         the prediction, the step of the run's trace; the parts below add up to both
  compute, waits, bubble  of the prediction, of the recorded step
tensors of a rank         the highest peak, by kind; measured on GPUs, a CPU process has more than tensors
traffic                   bytes of a step's collectives by mesh axis, on the rank with most; predicted only
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

FIRST_STEPS = 2
"""Steps left out of medians: they allocate memory, and compile."""

AXES = {
    "shards": "parameters and gradients, over the ranks that share them",
    "replicas": "gradients, over the copies of the shards",
    "tp": "activations, over tensor-parallel ranks",
    "cp": "keys, values and their gradients, over context-parallel ranks",
    "ep": "tokens to experts and back",
    "sequence": "the router's logits of whole sequences",
    "pp": "activations and their gradients, between pipeline stages",
    "tie": "gradients of the tied table",
}


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """One line of the ledger.

    Attributes:
        what: begins with a space where it is a part of the line above.
        predicted, measured: None if unknown.
    """

    what: str
    predicted: float | None
    measured: float | None
    unit: Literal["s", "bytes", "share"]

    def value(self) -> list[Any]:
        return [self.what, self.predicted, self.measured, self.unit]


def ledger(lines: Sequence[Mapping[str, Any]], ran: Mapping[str, float]) -> list[LedgerRow]:
    """The lines with a known value.

    Args:
        lines: the objects of a run's metrics.jsonl.
        ran: seconds of the recorded step, by part; empty without one.
    """
    newest = {line["event"]: line for line in lines}
    started, finished = newest.get("started", {}), newest.get("finished", {})
    steps = [line for line in lines if line["event"] == "step"][FIRST_STEPS:]
    predicted_s = started.get("predicted_spent_s") or {}
    bytes_of = started.get("predicted_bytes") or {}
    is_whole = started.get("memory") == "resident"
    step_s = started.get("predicted_step_s")
    rows = [
        LedgerRow("a step", step_s, finished.get("step_s") or _median(steps, "step_s"), "s"),
        *([LedgerRow("the recorded step", step_s, sum(ran.values()), "s")] if ran else []),
        *(
            LedgerRow(f" {name}", predicted_s.get(name), ran.get(name), "s")
            for name in dict.fromkeys([*predicted_s, *ran])
        ),
        LedgerRow(
            "a step's sampling" if "rolled" in newest else "a step's wait for its batch",
            None,
            _median(steps, "data_s"),
            "s",
        ),
        LedgerRow(
            "tensors of the fullest rank",
            started.get("predicted_memory_bytes"),
            finished.get("peak_bytes") or (None if is_whole or not steps else steps[-1].get("memory_bytes")),
            "bytes",
        ),
        *(LedgerRow(f" {name}", size, None, "bytes") for name, size in bytes_of.items()),
        LedgerRow(
            "the whole process of the fullest rank, torch and Python among it",
            None,
            steps[-1].get("memory_bytes") if is_whole and steps else None,
            "bytes",
        ),
        LedgerRow(
            "time that made headway", started.get("predicted_ettr"), newest.get("goodput", {}).get("ettr"), "share"
        ),
        LedgerRow("model FLOPs used", None, _median(steps, "mfu"), "share"),
    ]
    return [row for row in rows if row.predicted is not None or row.measured is not None]


def traffic(lines: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Mesh axis, kind of traffic, bytes of a step; the most first."""
    started: Mapping[str, Any] = next((line for line in reversed(lines) if line["event"] == "started"), {})
    predicted = (started.get("predicted_traffic_bytes") or {}).items()
    return [[axis, AXES.get(axis, ""), size] for axis, size in sorted(predicted, key=lambda one: -one[1])]


def _median(steps: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [line[name] for line in steps if line.get(name) is not None]
    return median(values) if values else None
