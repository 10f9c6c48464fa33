"""traffic: bytes of a step's collectives by mesh axis, from the plan and its program.

    over      collectives                                              bytes of each, whole tensor on one rank
    shards    Fetch, Reduce                                            e · P, 4 · P for the P elements of a buffer
    replicas  ReduceReplicas                                           4 · P / shards
    tie       Tie                                                      4 · the shard of the tied table
    pp        Send                                                     of the boundary
    tp        regions entered and left; ReducePartial; cut logits      T·D·e; 4 · partial; three times 4·T
    cp, ep    keys round a ring, heads exchanged, rows to experts      see ``cost.program.time.unit_operations``
    sequence  the router's logits of whole sequences                   B·S·logits·4

A step's last sum, of the gradient's norm and the loss, goes over all ranks and is 16 bytes; it is not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from superstep.cost.program.buffers import (
    FP32,
    element_bytes,
    family_numel,
    list_trained_families,
    share_numel,
    zero_stage,
)
from superstep.cost.program.flops import rank_parameters
from superstep.cost.program.time.instruction_seconds import partial_elements
from superstep.cost.program.time.operation import Axis, Operations, UnitOperations, count_value_bytes, messages
from superstep.plan.resolution.resolve import Resolved
from superstep.program import instructions as ins
from superstep.program.instructions import Instruction, Program


@dataclass(frozen=True, slots=True)
class AxisTraffic:
    axis: Axis
    bytes: int


def traffic(run: Resolved, program: Program, units: Sequence[UnitOperations]) -> tuple[dict[Axis, int], ...]:
    """For each pipeline rank, the bytes of its collectives in one step by axis, counted at each of its places as in
    ``hardware.cluster.CollectiveRate``.
    """
    amounts = []
    for rank, instructions in enumerate(program.ranks):
        total: Counter[Axis] = Counter()
        for instruction in instructions:
            for carried in _count_carried_bytes(run, program, units, rank, instruction):
                total[carried.axis] += carried.bytes
        amounts.append({axis: size for axis, size in total.items() if size})
    return tuple(amounts)


def _count_carried_bytes(
    run: Resolved, program: Program, units: Sequence[UnitOperations], rank: int, i: Instruction
) -> Iterator[AxisTraffic]:
    match i:
        case ins.Forward(unit) | ins.Recompute(unit):
            yield from _within(units[unit].forward)
        case ins.Backward(unit) | ins.BackwardInput(unit):
            yield from _within(units[unit].backward)
        case ins.Send(unit=value):
            yield AxisTraffic("pp", count_value_bytes(units, value))
        case ins.Fetch(unit) | ins.Reduce(unit):
            yield from _over_shards(run, unit, is_fetch=isinstance(i, ins.Fetch))
        case ins.ReduceReplicas(unit):
            owned = rank_parameters(run)[unit]
            yield AxisTraffic("replicas", sum(FP32 * share_numel(run, owned, (f,)) for f in run.plan.families))
        case ins.Tie(unit):
            yield AxisTraffic("tie", FP32 * share_numel(run, rank_parameters(run)[unit]))
        case ins.ReducePartial():
            held = [rank_parameters(run)[unit] for unit in program.list_held_units(rank)]
            # Of a sharded gradient each rank sums its own part: the mean over them.
            ways = run.plan.mesh.shards("dense") if zero_stage(run).shards_optimizer else 1
            yield AxisTraffic("tp", FP32 * partial_elements(run, held) // ways)
        case _:
            pass


def _within(operations: Operations) -> Iterator[AxisTraffic]:
    return (AxisTraffic(message.axis, message.count * message.bytes) for message in messages(operations))


def _over_shards(run: Resolved, unit: int, *, is_fetch: bool) -> Iterator[AxisTraffic]:
    owned = rank_parameters(run)[unit]
    for family in run.plan.families if is_fetch else list_trained_families(run):
        if run.plan.mesh.shards(family) > 1 and (zero_stage(run, family).shards_optimizer or not is_fetch):
            element = element_bytes(run, family) if is_fetch else FP32
            yield AxisTraffic("shards", element * family_numel(run, owned, family))
