"""NeededValues: the outputs and gradients that an instruction needs and another rank may have sent."""

from __future__ import annotations

from superstep.program import instructions as ins
from superstep.program.instructions import Instruction, Program, Wire

Value = tuple[Wire, int, int]
"""An output of a unit (wire "act") or its gradient ("grad"): wire, number of the value, microbatch."""


class NeededValues:
    """The values that each instruction of a program needs.

    A forward pass needs what the unit takes, a backward pass the gradient of what it returns. A send needs what it
    passes on. If later stages take one of the unit's inputs too, its backward pass adds to a gradient that begins with
    theirs, so it needs that as well.
    """

    def __init__(self, program: Program) -> None:
        returning = program.returning
        self._forward = program.taken
        self._backward = [
            (unit + 1, *(value for value in program.taken[unit] if value in returning[stage + 1]))
            for stage, units in enumerate(program.stages)
            for unit in units
        ]

    def __call__(self, i: Instruction) -> list[Value]:
        match i:
            case ins.Forward(unit, m):
                return [("act", value, m) for value in self._forward[unit]]
            case ins.Backward(unit, m) | ins.BackwardInput(unit, m):
                return [("grad", value, m) for value in self._backward[unit]]
            case ins.Send(wire, value, m):
                return [(wire, value, m)]
            case _:
                return []
