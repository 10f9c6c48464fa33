"""The file with the inputs of a run's prediction, from which it can be predicted again with the same result."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from superstep.cost.program.time.op_prices import MeasuredMachine
from superstep.plan.config import PlanConfig
from superstep.plan.config_io import build, read_tables, write_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedFrom:
    """The inputs of ``predict`` beside the run's configuration.

    Attributes:
        is_weighed: whether each step first computes the log-probabilities of its batch.
        plan: of the ranks; the configuration's own may be for more ranks than are left.
        machine: as the ranks measured it at their start.
    """

    is_weighed: bool
    plan: PlanConfig
    machine: MeasuredMachine


def write_predicted_from(value: PredictedFrom) -> str:
    cluster = value.machine.cluster
    tables = {
        "plan": value.plan,
        "machine": value.machine,
        "machine.cluster": cluster,
        "machine.cluster.chip": cluster.chip,
    }
    lines = write_fields(value)
    for name, table in tables.items():
        lines += ["", f"[{name}]", *write_fields(table)]
    return "\n".join([*lines, ""])


def read_predicted_from(path: Path) -> PredictedFrom:
    """Read such a file; raises ConfigError where it cannot be read, or a value is missing, unknown or wrong."""
    return build(PredictedFrom, read_tables(path))
