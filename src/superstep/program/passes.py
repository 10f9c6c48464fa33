"""Passes: functions from Program to Program, each adding one concern.

lower         tasks to units: a stage's forward is its units in order, its backward passes the same in reverse,
              without units in which and before which nothing is trained; a unit that no loss needs has neither
recompute     before a backward of a unit that kept only its input, compute the unit again
transfers     between stages on different ranks: receives one task ahead, sends as soon as there is something
reductions    gradients over dp as soon as they are final; tied and partial gradients after that
fetch         parameters from the shards before they are used; freed after, with ZeRO 3
snapshot      copies of the state, beside the first forward passes
step          the optimizer
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TypeAlias

from superstep.plan.resolution.resolve import Plan
from superstep.program import instructions as ins
from superstep.program.instructions import Instruction, Keep, Program, Wire, is_compute
from superstep.program.schedule import Order, StageTask

Of: TypeAlias = tuple[Wire | None, int, int]
"""A task: the wire of its result, its stage, its microbatch."""

Passing: TypeAlias = Mapping[Wire, Sequence[Sequence[int]]]
"""The values that pass between each stage and the one before, on each wire."""


def lower(plan: Plan, order: Order, encoding: tuple[int, ...] = (), *, is_training: bool) -> Program:
    has_backward, needed = plan.has_backward, plan.needed

    def keep(unit: int, m: int) -> Keep:
        if not is_training or not has_backward[unit]:
            return "nothing"
        if plan.kept:
            match plan.find_choice(unit, m):
                case "host" | "disk":
                    return "all"
                case choice:
                    return choice
        if not plan.recomputed[unit]:
            return "all"
        kept: dict[str, Keep] = {"none": "all", "selective": "selective", "full": "input", "auto": "all"}
        return kept[plan.recompute]

    def instructions(task: StageTask) -> Iterator[Instruction]:
        units, m = [u for u in plan.stages[task.stage] if u in needed], task.microbatch
        back = [u for u in reversed(units) if has_backward[u]]
        match task.kind:
            case "forward":
                yield from (ins.Forward(u, m, keep(u, m)) for u in units)
            case "backward":
                yield from (ins.Backward(u, m) for u in back)
            case "input":
                yield from (ins.BackwardInput(u, m) for u in back)
            case "weight":
                yield from (ins.BackwardWeight(u, m) for u in back)

    return Program(
        units=plan.units,
        stages=plan.stages,
        placement=plan.placement,
        params=plan.params,
        microbatches=plan.microbatches,
        zero=plan.zero,
        passes=("lower",),
        ranks=tuple(tuple(i for task in tasks for i in instructions(task)) for tasks in order),
        frozen=plan.frozen,
        inputs=plan.inputs,
        resting=plan.resting,
        sparse=plan.sparse,
        encoding=encoding,
    )


def add_recompute(program: Program) -> Program:
    """Compute a unit that kept only its input again right before its backward."""
    kept = {(i.unit, i.microbatch): i.keep for r in program.ranks for i in r if isinstance(i, ins.Forward)}

    def rank(instructions: tuple[Instruction, ...]) -> Iterator[Instruction]:
        for i in instructions:
            if isinstance(i, ins.Backward | ins.BackwardInput) and kept[i.unit, i.microbatch] == "input":
                yield ins.Recompute(i.unit, i.microbatch)
            yield i

    return _with_pass(program, "recompute", [tuple(rank(r)) for r in program.ranks])


def add_transfers(program: Program) -> Program:
    """Add a send and a receive of each value that passes between two stages on different ranks, with one channel for
    each direction.

    A receive is posted one task ahead of its use, so that it overlaps the compute of the task before.
    """

    stage_of = _stage_of(program)
    passing: Passing = {"act": program.passing, "grad": program.returning}

    def rank(number: int, instructions: tuple[Instruction, ...]) -> Iterator[Instruction]:
        tasks = [(of, list(members)) for of, members in groupby(instructions, key=lambda i: _task_of(stage_of, i))]
        receives = [_receives(program, passing, number, of) for of, _ in tasks]
        yield from receives[0] if receives else ()
        for i, (of, members) in enumerate(tasks):
            yield from receives[i + 1] if i + 1 < len(tasks) else ()
            yield from members
            yield from _sends(program, passing, number, of)

    return _with_pass(program, "transfers", [tuple(rank(n, r)) for n, r in enumerate(program.ranks)])


def _stage_of(program: Program) -> dict[int, int]:
    return {unit: stage for stage, units in enumerate(program.stages) for unit in units}


def _task_of(stage_of: Mapping[int, int], i: Instruction) -> Of:
    """The instruction's task: the wire of its result (none for weights' gradients), its stage, its microbatch."""
    assert isinstance(i, ins.Forward | ins.Recompute | ins.Backward | ins.BackwardInput | ins.BackwardWeight)
    wire: Wire | None = "act" if isinstance(i, ins.Forward) else None if isinstance(i, ins.BackwardWeight) else "grad"
    return wire, stage_of[i.unit], i.microbatch


def _receives(program: Program, passing: Passing, rank: int, task: Of) -> list[Instruction]:
    wire, stage, m = task
    source = stage - 1 if wire == "act" else stage + 1
    if wire is None or not program.is_elsewhere(source, m, rank):
        return []
    return [ins.Recv(wire, value, m, program.place(source, m)) for value in passing[wire][max(stage, source)]]


def _sends(program: Program, passing: Passing, rank: int, task: Of) -> list[Instruction]:
    wire, stage, m = task
    target = stage + 1 if wire == "act" else stage - 1
    if wire is None or not program.is_elsewhere(target, m, rank):
        return []
    return [ins.Send(wire, value, m, program.place(target, m)) for value in passing[wire][max(stage, target)]]


def add_reductions(program: Program, *, dp: int, tp: int, replicas: int = 1) -> Program:
    """Sum gradients over dp as soon as they are final.

    With ZeRO 0 and 1 a unit's gradient is final after its last Backward or BackwardWeight of the step. With 2 and 3 no
    rank may keep a full gradient (Rajbhandari 2020, sec. 5.2), so a unit is reduced after every microbatch, and settled
    into its shard one unit later, so that the reduction overlaps that unit's compute. Where a rank has several stages,
    a stage's gradients may wait until the run of its microbatches ends: breadth-first order makes the runs long and the
    reductions few (Lamy-Poirier 2023, sec. 4.2). With replicas, final shards are summed over them too.
    """

    def settle(number: int, instructions: tuple[Instruction, ...]) -> Iterator[Instruction]:
        finals = _finals(program, instructions)
        waiting: list[int] = []
        for at, i in enumerate(instructions):
            added = program.list_trained(i.unit) if isinstance(i, ins.Backward | ins.BackwardWeight) else ()
            if program.shards_gradients and set(added) & set(waiting):
                yield from (ins.Settle(w) for w in waiting)
                waiting.clear()
            yield i
            final = finals.get(at, []) if dp > 1 else []
            if program.shards_gradients and final:
                yield from (ins.Settle(w) for w in waiting)
                waiting.clear()
            yield from (ins.ReduceRows(u) if u in program.sparse else ins.Reduce(u) for u in final)
            waiting += final
        yield from (ins.Settle(w) for w in waiting)

    def rank(number: int, instructions: tuple[Instruction, ...]) -> Iterator[Instruction]:
        within = list(settle(number, instructions))
        last = {i.unit: at for at, i in enumerate(within) if isinstance(i, ins.Settle)} if replicas > 1 else {}
        for at, i in enumerate(within):
            yield i
            if isinstance(i, ins.Settle) and last.get(i.unit) == at:
                yield ins.ReduceReplicas(i.unit)
        held = [u for u in program.list_held_units(number) if u not in program.frozen]
        yield from (ins.Tie(u) for u in held if len(program.holders(u)) > 1)
        if tp > 1:
            yield ins.ReducePartial()

    return _with_pass(program, "reductions", [tuple(rank(n, r)) for n, r in enumerate(program.ranks)])


def _finals(program: Program, instructions: tuple[Instruction, ...]) -> dict[int, list[int]]:
    """Positions after which the gradient of a unit's parameters is final (for the step, or for its run)."""
    finals: dict[int, list[int]] = {}
    last: dict[int, int] = {}
    run_of: dict[int, int] = {}
    run = 0
    before: tuple[int, int] | None = None
    has_chunks = len(program.stages) > program.pp
    stage_of = _stage_of(program)
    for at, i in enumerate(instructions):
        if isinstance(i, ins.Forward):
            before = None
        if not isinstance(i, ins.Backward | ins.BackwardWeight):
            continue
        now = (stage_of[i.unit], 0 if has_chunks else i.microbatch)
        run += now != before
        before = now
        for unit in program.list_trained(i.unit):
            if program.shards_gradients and run_of.get(unit, run) != run:
                finals.setdefault(last[unit], []).append(unit)
            last[unit], run_of[unit] = at, run
    for unit, at in last.items():
        finals.setdefault(at, []).append(unit)
    return finals


def add_fetch(program: Program, *, dp: int, prefetch: int) -> Program:
    """Fetch parameters from the shards before they are used.

    ZeRO 1 and 2 keep whole parameters, which the last step left stale outside the own shard: each unit is fetched once,
    all issued at the start in the order of use; units that no phase trains are never stale. ZeRO 3 fetches the next
    ``prefetch`` units ahead of their use, and frees a unit when its next use is farther away.
    """
    if dp == 1 or not program.shards_optimizer:
        return _with_pass(program, "fetch", list(program.ranks))
    if not program.shards_parameters:
        return _with_pass(program, "fetch", [(*_fetch_all(program, r), *r) for r in program.ranks])
    return _with_pass(program, "fetch", [tuple(_fetch_ahead(program, r, prefetch)) for r in program.ranks])


def _fetch_all(program: Program, instructions: tuple[Instruction, ...]) -> list[Instruction]:
    used = dict.fromkeys(u for units in _uses(program, instructions) for u in units)
    return [ins.Fetch(u) for u in used if u not in program.fixed]


def _uses(program: Program, instructions: tuple[Instruction, ...]) -> list[tuple[int, ...]]:
    """For each compute instruction in order, the units that own the parameters that it reads.

    BackwardWeight is left out: it multiplies inputs with output gradients and reads no parameter.
    """
    return [
        program.params[i.unit]
        for i in instructions
        if isinstance(i, ins.Forward | ins.Recompute | ins.Backward | ins.BackwardInput)
    ]


def _fetch_ahead(program: Program, instructions: tuple[Instruction, ...], prefetch: int) -> Iterator[Instruction]:
    uses = _uses(program, instructions)
    windows = (_window(uses, k, prefetch) for k in range(len(uses)))
    resident: list[int] = []
    for i in instructions:
        if is_compute(i):
            window = next(windows)
            for unit in [u for u in resident if u not in window]:
                resident.remove(unit)
                yield ins.Free(unit)
            for unit in [u for u in window if u not in resident]:
                resident.append(unit)
                yield ins.Fetch(unit)
        yield i
    yield from (ins.Free(unit) for unit in resident)


def _window(uses: list[tuple[int, ...]], k: int, prefetch: int) -> list[int]:
    """The units read by compute instruction k, and by the next ``prefetch`` after it that read others."""
    units = list(uses[k])
    ahead = 0
    for later in range(k + 1, len(uses)):
        fresh = [u for u in uses[later] if u not in units]
        if fresh and ahead == prefetch:
            break
        ahead += bool(fresh)
        units += fresh
    return units


def add_snapshot(program: Program) -> Program:
    """Copy the state of the last step beside the first forward passes.

    Only the step changes what a rank trains (master weights and moments), and it waits for the copies: so they may
    overlap everything. A unit's copy starts when the rank first computes with it, so that no forward pass shares the
    memory's bandwidth with all copies. A copy takes no device memory.
    """

    def rank(number: int, instructions: tuple[Instruction, ...]) -> Iterator[Instruction]:
        left = [u for u in program.list_held_units(number) if u not in program.fixed]
        for i in instructions:
            for unit in [u for u in left if is_compute(i) and u in program.params[_unit_of(i)]]:
                left.remove(unit)
                yield ins.Snapshot(unit)
            yield i
        yield from (ins.Snapshot(unit) for unit in left)

    return _with_pass(program, "snapshot", [tuple(rank(n, r)) for n, r in enumerate(program.ranks)])


def _unit_of(i: Instruction) -> int:
    assert isinstance(i, ins.Forward | ins.Recompute | ins.Backward | ins.BackwardInput)
    return i.unit


def add_step(program: Program) -> Program:
    """End the step with the optimizer's update."""
    return _with_pass(program, "step", [(*r, ins.Step()) for r in program.ranks])


def _with_pass(program: Program, name: str, ranks: list[tuple[Instruction, ...]]) -> Program:
    return replace(program, passes=(*program.passes, name), ranks=tuple(ranks))
