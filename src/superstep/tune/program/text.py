"""The text form of a program of iterations: one instruction per line. It round-trips.

iterations steps=2 groups=1 lag=0 placement=shared save_every=1 from=0 recorded= published=
lane ranks
  publish v0
  take v0
  sample g0 v0
"""

from __future__ import annotations

import re
from collections.abc import Callable

from superstep.errors import UserError
from superstep.tune.program import instructions as ins
from superstep.tune.program.instructions import Cursor, Instruction, Iterations, Lane, Placement, RlSchedule, Role


def describe(i: Instruction) -> str:
    """One instruction as one line."""
    match i:
        case ins.Sample(group, version):
            return f"sample g{group} v{version}"
        case ins.Grade(group):
            return f"grade g{group}"
        case ins.Train(step) | ins.Save(step):
            return f"{type(i).__name__.lower()} s{step}"
        case ins.Publish(version) | ins.Take(version) | ins.Retire(version):
            return f"{type(i).__name__.lower()} v{version}"
        case ins.Swap(to):
            return f"swap {to}"


def write_iterations(program: Iterations) -> str:
    """The whole program as text."""
    schedule, cursor = program.schedule, program.cursor
    head = (
        f"iterations steps={schedule.steps} groups={schedule.groups} lag={schedule.lag} placement={schedule.placement} "
        f"save_every={schedule.save_every} {_gaps(schedule)}from={cursor.step} recorded={_numbers(cursor.recorded)} "
        f"published={_numbers(cursor.published)}"
    )
    lines = [head]
    for lane, instructions in program.lanes:
        lines += [f"lane {lane}", *(f"  {describe(i)}" for i in instructions)]
    return "\n".join(lines) + "\n"


def _gaps(schedule: RlSchedule) -> str:
    return f"gaps={','.join(map(str, schedule.gaps))} " if schedule.gaps else ""


def _numbers(numbers: frozenset[int]) -> str:
    return ",".join(map(str, sorted(numbers)))


_ROLES: dict[str, Role] = {"sample": "sample", "train": "train"}
_PLACEMENTS: dict[str, Placement] = {"shared": "shared", "apart": "apart"}
_LANES: dict[str, Lane] = {"ranks": "ranks", "sampler": "sampler", "grader": "grader", "trainer": "trainer"}
_FORMS: tuple[tuple[str, Callable[[re.Match[str]], Instruction]], ...] = (
    (r"sample g(\d+) v(\d+)", lambda f: ins.Sample(int(f[1]), int(f[2]))),
    (r"grade g(\d+)", lambda f: ins.Grade(int(f[1]))),
    (r"train s(\d+)", lambda f: ins.Train(int(f[1]))),
    (r"save s(\d+)", lambda f: ins.Save(int(f[1]))),
    (r"publish v(\d+)", lambda f: ins.Publish(int(f[1]))),
    (r"take v(\d+)", lambda f: ins.Take(int(f[1]))),
    (r"retire v(\d+)", lambda f: ins.Retire(int(f[1]))),
    (r"swap (sample|train)", lambda f: ins.Swap(_ROLES[f[1]])),
)


def read_instruction(text: str) -> Instruction:
    """Parse the text of ``describe``.

    Raises:
        UserError: the text is no instruction.
    """
    for pattern, make in _FORMS:
        match = re.fullmatch(pattern, text)
        if match:
            return make(match)
    raise UserError(f"'{text}' is no instruction of an iteration.")


_HEAD = (
    r"iterations steps=(\d+) groups=(\d+) lag=(\d+) placement=(shared|apart) save_every=(\d+) "
    r"(?:gaps=([\d,]+) )?from=(\d+) recorded=([\d,]*) published=([\d,]*)"
)


def read_iterations(text: str) -> Iterations:
    """Parse the text of ``write_iterations``.

    Raises:
        UserError: a line is invalid; names its number.
    """
    lines = text.splitlines()
    head = re.fullmatch(_HEAD, lines[0] if lines else "")
    if head is None:
        raise UserError("line 1: iterations start with 'iterations steps=S groups=G lag=L placement=P ...'.")
    lanes: list[tuple[Lane, list[Instruction]]] = []
    for number, line in enumerate(lines[1:], start=2):
        if (lane := re.fullmatch(r"lane (\w+)", line)) and lane[1] in _LANES:
            lanes.append((_LANES[lane[1]], []))
        elif line.startswith("  ") and lanes:
            try:
                lanes[-1][1].append(read_instruction(line.strip()))
            except UserError as error:
                raise UserError(f"line {number}: {error}") from None
        else:
            raise UserError(f"line {number}: '{line}' is neither a lane nor an instruction.")
    return Iterations(
        schedule=RlSchedule(
            steps=int(head[1]),
            groups=int(head[2]),
            lag=int(head[3]),
            placement=_PLACEMENTS[head[4]],
            save_every=int(head[5]),
            gaps=tuple(sorted(_set(head[6] or ""))),
        ),
        cursor=Cursor(step=int(head[7]), recorded=_set(head[8]), published=_set(head[9])),
        lanes=tuple((lane, tuple(instructions)) for lane, instructions in lanes),
    )


def _set(text: str) -> frozenset[int]:
    return frozenset(int(n) for n in text.split(",") if n)
