"""Offload: what units keep for their backward passes lies elsewhere between their passes.

The lane ``out`` moves one unit after the other. The second pass of a unit after an offload waits for it, and so does
the first where the next offload has begun, so a rank's memory holds the unit that is computed, one that is leaving, and
those that have come back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TypeAlias

from superstep.program import instructions as ins
from superstep.program.instructions import Instruction, Program

Key: TypeAlias = tuple[int, int]
"""A unit and a microbatch."""

Computing: TypeAlias = ins.Forward | ins.Recompute | ins.Backward | ins.BackwardInput | ins.BackwardWeight

LEAST_AWAY = 1
"""Passes of units between an offload and its reload, below which what is kept stays where it is: it would come back as
soon as it has left.
"""


def add_offload(program: Program, moves: Callable[[int, int], bool], *, ahead: int) -> Program:
    """Offload what the units keep of microbatches that ``moves`` is true of after each forward pass, and reload it
    ``ahead`` passes of units before the first instruction that needs it.
    """
    ranks = tuple(tuple(_move(instructions, moves, ahead)) for instructions in program.ranks)
    return replace(program, passes=(*program.passes, "offload"), ranks=ranks)


def _move(
    instructions: tuple[Instruction, ...], moves: Callable[[int, int], bool], ahead: int
) -> Iterator[Instruction]:
    passes = list_passes(instructions)
    number_of = {place: number for number, place in enumerate(passes)}
    left: dict[Key, int] = {}
    reloads: dict[int, list[Key]] = {}
    for place, i in enumerate(instructions):
        if isinstance(i, ins.Forward):
            left[i.unit, i.microbatch] = number_of[place]
        elif place in number_of and isinstance(i, ins.Recompute | ins.Backward | ins.BackwardInput):
            key = i.unit, i.microbatch
            number = number_of[place] - ahead
            if moves(*key) and number - left[key] - 1 >= LEAST_AWAY:
                reloads.setdefault(passes[number], []).append(key)
    moved = {key for keys in reloads.values() for key in keys}
    for place, i in enumerate(instructions):
        yield from (ins.Reload(*key) for key in reloads.get(place, ()))
        yield i
        if isinstance(i, ins.Forward) and (i.unit, i.microbatch) in moved:
            yield ins.Offload(i.unit, i.microbatch)


def list_passes(instructions: tuple[Instruction, ...]) -> list[int]:
    """Where each pass of a unit begins. A backward pass begins with its recomputation."""
    places: list[int] = []
    again: Key | None = None
    for place, i in enumerate(instructions):
        if isinstance(i, Computing):
            key = i.unit, i.microbatch
            if key != again:
                places.append(place)
            again = key if isinstance(i, ins.Recompute) else None
    return places


def find_ended_offloads(program: Program, rank: int) -> dict[int, tuple[Key, ...]]:
    """By an instruction's place: the offloads that a rank waits for before it, so that their memory is free."""
    under_way: list[Key] = []
    is_passed = False
    passes = set(list_passes(program.ranks[rank])) if list_moved(program) else set()
    ended: dict[int, tuple[Key, ...]] = {}
    for place, i in enumerate(program.ranks[rank]):
        count = 0
        match i:
            case ins.Offload(unit, m):
                under_way.append((unit, m))
                is_passed = False
            case ins.Reload(unit, m) if (unit, m) in under_way[-1:]:
                count = len(under_way)
            case _ if isinstance(i, ins.Reload | Computing):
                count = len(under_way) - (not is_passed)
                is_passed = is_passed or place in passes
        if count > 0:
            ended[place] = tuple(under_way[:count])
            del under_way[:count]
    return ended


def list_moved(program: Program) -> frozenset[Key]:
    """The units and microbatches of a program that are offloaded."""
    return frozenset((i.unit, i.microbatch) for r in program.ranks for i in r if isinstance(i, ins.Offload))


def find_most_away(program: Program, rank: int, sizes: Mapping[int, int]) -> int:
    """The most bytes of a rank that are elsewhere at a time, given those that each unit moves of a microbatch."""
    away = most = 0
    moved = list_moved(program)
    for i in program.ranks[rank]:
        if isinstance(i, ins.Offload):
            away += sizes[i.unit]
            most = max(most, away)
        elif isinstance(i, ins.Backward | ins.BackwardInput) and (i.unit, i.microbatch) in moved:
            away -= sizes[i.unit]
    return most
