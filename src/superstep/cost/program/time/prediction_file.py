"""The file with the inputs of a run's prediction: the same prediction can be computed from it again."""

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
        plan: the plan that the ranks run. The configuration may have a plan for more ranks, if hosts were lost.
        machine: the machine, as the ranks measured it when they started.
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
    """Read the file; raises ConfigError if it cannot be read, or a value is missing, unknown or wrong."""
    return build(PredictedFrom, read_tables(path))
