"""The order of a program's instructions: one valid order, and which of two comes first in every order."""

from __future__ import annotations

from collections.abc import Mapping

from superstep.tune.program.instructions import Instruction, InvalidIterations, Iterations, Lane, Place
from superstep.tune.program.text import describe

Clock = Mapping[Lane, int]
"""For each lane, the number of its instructions that have certainly ended."""


def issue_order(program: Iterations) -> list[Place]:
    """Every instruction's place, each after its dependencies.

    Raises:
        InvalidIterations: there is a deadlock; the message names the waiting instructions.
    """
    at: dict[Lane, int] = {lane: 0 for lane, _ in program.lanes}
    done: set[Instruction] = set()
    order: list[Place] = []
    is_moving = True
    while is_moving:
        is_moving = False
        for lane, instructions in program.lanes:
            while at[lane] < len(instructions) and done.issuperset(program.uses(instructions[at[lane]])):
                done.add(instructions[at[lane]])
                order.append((lane, at[lane]))
                at[lane] += 1
                is_moving = True
    waits = [_wait(program, lane, at[lane], done) for lane, all_of in program.lanes if at[lane] < len(all_of)]
    if waits:
        raise InvalidIterations("deadlock: " + "; ".join(waits))
    return order


def _wait(program: Iterations, lane: Lane, at: int, done: set[Instruction]) -> str:
    i = program.lane(lane)[at]
    missing = next(used for used in program.uses(i) if used not in done)
    return f"{lane} waits for '{describe(missing)}' at instruction {at} ({describe(i)})"


def clocks(program: Iterations) -> dict[Place, Clock]:
    """For each instruction, what has certainly ended once it has, itself included (Mattern 1989's vector clocks).

    One instruction precedes another in every run if it is within the other's clock; if neither is, they may run at the
    same time.
    """
    clocks_by_place: dict[Place, Clock] = {}
    instructions = dict(program)
    for place in issue_order(program):
        lane, at = place
        behind = [program.places[used] for used in program.uses(instructions[place])]
        if at:
            behind.append((lane, at - 1))
        clock: dict[Lane, int] = {}
        for other in behind:
            clock = {name: max(clock.get(name, 0), clocks_by_place[other].get(name, 0)) for name, _ in program.lanes}
        clock[lane] = at + 1
        clocks_by_place[place] = clock
    return clocks_by_place


def is_before(clock: Mapping[Place, Clock], one: Place, other: Place) -> bool:
    """Whether ``one`` has ended in every run before ``other`` begins."""
    return one != other and clock[other].get(one[0], 0) > one[1]
