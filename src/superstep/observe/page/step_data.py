"""A step as columns for the page's script: an entry for each instruction of each pipeline rank.

    {"ranks": [{"kind": [0, 2, ...], "unit": [...], "start": [...], "took": [...], ...}, ...], ...}

``kind`` numbers ``KINDS``; ``unit``, ``microbatch`` and ``peer`` are -1 where an instruction has none. Times are whole
nanoseconds since the step began: ``start`` is the difference to the instruction before, ``took`` is absolute. ``level``
numbers ``levels``: the change of each category of memory when the instruction is issued. A program has many
instructions and few different changes, so columns of small numbers compress well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from superstep.cost.program.memory.memory import RankBytes
from superstep.cost.program.time.operation import Operations, UnitOperations, messages
from superstep.observe.page.bubble import FORMULAS, PassSeconds, compute_closed_bubble
from superstep.plan.resolution.resolve import Plan
from superstep.program import instructions as ins
from superstep.program.instructions import Instruction, Program
from superstep.program.peak_memory import Peak, UnitBytes, course
from superstep.program.timeline import Timeline

Columns: TypeAlias = dict[str, list[int]]

KINDS: tuple[type[Instruction], ...] = (
    ins.Forward,
    ins.Recompute,
    ins.Backward,
    ins.BackwardInput,
    ins.BackwardWeight,
    ins.Settle,
    ins.Tie,
    ins.ReducePartial,
    ins.Step,
    ins.Free,
    ins.Fetch,
    ins.Reduce,
    ins.ReduceReplicas,
    ins.Send,
    ins.Recv,
    ins.Snapshot,
    ins.ReduceRows,
    ins.Offload,
    ins.Reload,
)
LANES = ("compute", "fetch", "reduce", "act", "grad", "snapshot", "out", "in")
NS = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDrawing:
    """A step and what is drawn beside it.

    Attributes:
        timeline: the program on a clock.
        memory: the persistent bytes of each pipeline rank.
        sizes: bytes that units add and drop.
        operations: of each unit; None if unknown.
        measured: the same program as it ran, if it did.
        measured_step: which step of the run.
        before_s: time before the program, see ``Prediction``.
    """

    plan: Plan
    timeline: Timeline
    memory: Sequence[RankBytes]
    sizes: Sequence[UnitBytes]
    operations: Sequence[UnitOperations] | None = None
    measured: Timeline | None = None
    measured_step: int = 0
    before_s: float = 0.0


def step_value(drawn: StepDrawing) -> dict[str, Any]:
    program, plan = drawn.timeline.program, drawn.plan
    deltas: dict[tuple[int, ...], int] = {}
    value = {
        "schedule": plan.schedule,
        "chunks": plan.chunks,
        "zero": plan.zero,
        "microbatches": program.microbatches,
        "mesh": {axis: getattr(plan.mesh, axis) for axis in ("pp", "dp", "cp", "tp", "ep", "replicas")},
        "context": plan.context,
        "units": list(program.units),
        "stages": [list(units) for units in program.stages],
        "placement": list(program.placement),
        "params": [list(units) for units in program.params],
        "held": [list(program.list_held_units(rank)) for rank in range(program.pp)],
        "frozen": list(program.frozen),
        "ranks": [_instructions(program, rank, deltas, drawn.sizes) for rank in range(program.pp)],
        "memory": [
            {"parameters": held.params, "gradients": held.gradients, "optimizer": held.optimizer}
            for held in drawn.memory
        ],
        "messages": _messages(drawn.operations),
        "predicted": _times(drawn.timeline, plan),
    }
    value["levels"] = [list(delta) for delta in deltas]
    if drawn.before_s:
        value["before_ns"] = round(drawn.before_s * NS)
    if drawn.measured is not None:
        value["measured"] = _times(drawn.measured, plan) | {"step": drawn.measured_step}
    return value


def fields(instruction: Instruction) -> tuple[int, int, int, int]:
    return (
        KINDS.index(type(instruction)),
        getattr(instruction, "unit", -1),
        getattr(instruction, "microbatch", -1),
        getattr(instruction, "peer", -1),
    )


def _instructions(
    program: Program, rank: int, deltas: dict[tuple[int, ...], int], sizes: Sequence[UnitBytes]
) -> Columns:
    kinds, units, microbatches, peers = (list(column) for column in zip(*map(fields, program.ranks[rank]), strict=True))
    levels, last = [], (0, 0, 0, 0, 0)
    for peak in course(program, rank, sizes):
        now = _parts(peak)
        delta = tuple(b - a for a, b in zip(last, now, strict=True))
        levels.append(deltas.setdefault(delta, len(deltas)))
        last = now
    # A transfer's wire is told by its lane.
    wires = [int(getattr(i, "wire", "act") == "grad") for i in program.ranks[rank]]
    return {
        "kind": kinds,
        "unit": units,
        "microbatch": microbatches,
        "peer": peers,
        "wire": wires,
        "level": levels,
    }


def _parts(peak: Peak) -> tuple[int, int, int, int, int]:
    return peak.params_bytes, peak.gradient_bytes, peak.kept_bytes, peak.boundary_bytes, peak.workspace_bytes


def _times(timeline: Timeline, plan: Plan) -> dict[str, Any]:
    """When each instruction ran and each rank waited, and sums over the step."""
    zero_s = timeline.start_s
    of_rank: list[list[tuple[int, float, float]]] = [[] for _ in range(timeline.program.pp)]
    for e in timeline.events:
        of_rank[e.rank].append((e.index, e.start_s - zero_s, e.end_s - zero_s))
    ranks = []
    for events, waits in zip(of_rank, timeline.find_waits(), strict=True):
        starts = [round(start * NS) for _, start, _ in sorted(events)]
        ends = [round(end * NS) for _, _, end in sorted(events)]
        ranks.append(
            {
                "start": _differences(starts),
                "took": [end - start for start, end in zip(starts, ends, strict=True)],
                "wait": _differences([round((w.start_s - zero_s) * NS) for w in waits]),
                "waited": [round((w.end_s - zero_s) * NS) - round((w.start_s - zero_s) * NS) for w in waits],
                "for": [LANES.index(w.lane) if w.lane else -1 for w in waits],
            }
        )
    spent = timeline.measure_uses()
    return {
        "step_ns": round(timeline.step_s * NS),
        "bubble": timeline.bubble(),
        "closed": compute_closed_form(timeline, plan),
        "formula": FORMULAS[plan.schedule],
        "busy_ns": [round(s.busy_s * NS) for s in spent],
        "bubble_ns": [round(s.bubble_s * NS) for s in spent],
        "exposed_ns": [{lane: round(t * NS) for lane, t in s.exposed_s.items() if t} for s in spent],
        "ranks": ranks,
    }


def _differences(numbers: Sequence[int]) -> list[int]:
    return [b - a for a, b in zip([0, *numbers], numbers, strict=False)]


def compute_closed_form(timeline: Timeline, plan: Plan) -> float:
    """The papers' formula, with the mean seconds of this step's passes."""
    took = dict.fromkeys((ins.Forward, ins.Recompute, ins.Backward, ins.BackwardInput, ins.BackwardWeight), 0.0)
    for e in timeline.events:
        if type(e.instruction) in took:
            took[type(e.instruction)] += e.end_s - e.start_s
    passes = PassSeconds(
        forward_s=took[ins.Forward],
        input_s=took[ins.Recompute] + took[ins.Backward] + took[ins.BackwardInput],
        weight_s=took[ins.BackwardWeight],
    )
    return compute_closed_bubble(
        plan.schedule,
        pp=plan.mesh.pp,
        chunks=plan.chunks,
        microbatches=plan.microbatches,
        passes=passes,
        group=plan.microbatch_group,
    )


def _messages(operations: Sequence[UnitOperations] | None) -> list[dict[str, list[list[Any]]]]:
    """What each unit's passes send to ranks of their own stage: collective, axis, bytes, count."""
    return [{"forward": _list_sent(unit.forward), "backward": _list_sent(unit.backward)} for unit in (operations or ())]


def _list_sent(operations: Operations) -> list[list[Any]]:
    amounts: dict[tuple[str, str, int], int] = {}
    for one in messages(operations):
        key = (one.collective, one.axis, one.bytes)
        amounts[key] = amounts.get(key, 0) + one.count
    return [[*key, count] for key, count in amounts.items()]
