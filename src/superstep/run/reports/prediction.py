"""Prediction of a run's parts for its ledger: seconds by part, bytes by kind and by mesh axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from superstep.comm.device import Device
from superstep.cost.mfu_peak import peak_flops
from superstep.cost.program.time.op_prices import MeasuredMachine
from superstep.cost.program.time.operation import UnitOperations
from superstep.cost.program.time.predict import Prediction, pair_phases
from superstep.cost.program.time.traffic import traffic
from superstep.observe.page.report import split_step
from superstep.plan.resolution.resolve import Resolved
from superstep.program.compile import compile_step

Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True)
class PredictionParts:
    """Parts of a prediction; empty without one.

    Attributes:
        spent_s: of the step, means over the ranks; they add up to ``Prediction.step_s``.
        bytes: of the peak of the fullest rank.
        traffic_bytes: of a step's collectives, by mesh axis, on the rank with the most.
    """

    spent_s: Mapping[str, float] = field(default_factory=dict)
    bytes: Mapping[str, int] = field(default_factory=dict)
    traffic_bytes: Mapping[str, int] = field(default_factory=dict)


def foretold(
    run: Resolved, operations: Sequence[UnitOperations] | None, prediction: Prediction | None
) -> PredictionParts:
    """The prediction of a run, as far as it is known before its start."""
    carried: Mapping[str, int] = {}
    if operations is not None:
        phases = [
            traffic(phase, compile_step(phase.plan), its_operations)
            for phase, its_operations in pair_phases(run, operations)
            if its_operations is not None
        ]
        each = [_sum_by_name(of_rank) for of_rank in zip(*phases, strict=True)]
        carried = max(each, key=lambda rank: sum(rank.values()))
    if prediction is None:
        return PredictionParts(traffic_bytes=carried)
    fullest = max(prediction.memory, key=lambda rank: rank.bytes)
    within = {
        "parameters, gathered": fullest.peak.params_bytes,
        "gradients, not yet reduced": fullest.peak.gradient_bytes,
        "activations": fullest.peak.kept_bytes,
        "between units": fullest.peak.boundary_bytes,
        "workspace": fullest.peak.workspace_bytes,
    }
    staying = {
        "parameters": fullest.params,
        "gradients": fullest.gradients,
        "optimizer": fullest.optimizer,
        "batch": fullest.batch,
    }
    sizes = {name: size for name, size in (staying | within).items() if size}
    spent_s = _sum_by_name([split_step(timeline) for timeline in prediction.timelines])
    if prediction.before_s:
        spent_s["log-probabilities"] = prediction.before_s
    return PredictionParts(spent_s, sizes, carried)


def _sum_by_name(phases: Sequence[Mapping[str, Number]]) -> dict[str, Number]:
    """What the phases of a step spend, together."""
    names = dict.fromkeys(name for phase in phases for name in phase)
    return {name: sum(phase.get(name, 0) for phase in phases) for name in names}


def peak_of(run: Resolved, device: Device, machine: MeasuredMachine | None) -> float | None:
    """The reference FLOP/s of MFU: configured, from the data sheet, or on a CPU the measured rate."""
    if run.config.observe.peak_flops is not None:
        return run.config.observe.peak_flops
    if device.kind == "cpu":
        return None if machine is None else machine.gemm_flops_per_s
    return peak_flops(device.name, run.config.numerics.compute)
