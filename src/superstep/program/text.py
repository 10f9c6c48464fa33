"""The text form of a program: one instruction a line, to read, compare and keep. It round-trips.

program zero=3 microbatches=2 placement=0 passes=lower,transfers,fetch
unit 0 embed reads 0 stage 0
unit 1 head reads 1,0 stage 0
rank 0
  fetch u0
  forward u0 m0 keep=all
"""

from __future__ import annotations

import re
from collections.abc import Callable

from superstep.errors import UserError
from superstep.program import instructions as ins
from superstep.program.instructions import Instruction, Keep, Program, Wire


def describe(instruction: Instruction) -> str:  # noqa: C901 - one case for each instruction
    """One instruction as one line."""
    match instruction:
        case ins.Forward(unit, m, keep):
            return f"forward u{unit} m{m} keep={keep}"
        case ins.Recompute(unit, m):
            return f"recompute u{unit} m{m}"
        case ins.Backward(unit, m):
            return f"backward u{unit} m{m}"
        case ins.BackwardInput(unit, m):
            return f"backward-input u{unit} m{m}"
        case ins.BackwardWeight(unit, m):
            return f"backward-weight u{unit} m{m}"
        case ins.Offload(unit, m) | ins.Reload(unit, m):
            return f"{type(instruction).__name__.lower()} u{unit} m{m}"
        case ins.Send(wire, unit, m, peer):
            return f"send {wire} u{unit} m{m} to {peer}"
        case ins.Recv(wire, unit, m, peer):
            return f"recv {wire} u{unit} m{m} from {peer}"
        case ins.ReduceRows(unit) | ins.ReduceReplicas(unit):
            return f"reduce-{type(instruction).__name__.removeprefix('Reduce').lower()} u{unit}"
        case (
            ins.Fetch(unit) | ins.Free(unit) | ins.Reduce(unit) | ins.Settle(unit) | ins.Tie(unit) | ins.Snapshot(unit)
        ):
            return f"{type(instruction).__name__.lower()} u{unit}"
        case ins.ReducePartial():
            return "reduce-partial"
        case ins.Step():
            return "step"


def write_program(program: Program) -> str:
    lines = [
        f"program zero={program.zero} microbatches={program.microbatches} "
        f"placement={','.join(map(str, program.placement))} passes={','.join(program.passes)}"
        + (f" encoding={','.join(map(str, program.encoding))}" if program.encoding else ""),
        *(
            f"unit {u} {name} reads {','.join(map(str, program.params[u]))} stage {program.stage_of(u)}"
            + (f" takes {','.join(map(str, program.inputs[u])) or '-'}" if program.inputs else "")
            + (" sparse" if u in program.sparse else "")
            + (" resting" if u in program.resting else " frozen" if u in program.frozen else "")
            for u, name in enumerate(program.units)
        ),
    ]
    for number, instructions in enumerate(program.ranks):
        lines.append(f"rank {number}")
        lines += [f"  {describe(i)}" for i in instructions]
    return "\n".join(lines) + "\n"


_KEEPS: dict[str, Keep] = {"all": "all", "selective": "selective", "input": "input", "nothing": "nothing"}
_WIRES: dict[str, Wire] = {"act": "act", "grad": "grad"}
_FORMS: tuple[tuple[str, Callable[[re.Match[str]], Instruction]], ...] = (
    (
        r"forward u(\d+) m(\d+) keep=(all|selective|input|nothing)",
        lambda f: ins.Forward(int(f[1]), int(f[2]), _KEEPS[f[3]]),
    ),
    (r"recompute u(\d+) m(\d+)", lambda f: ins.Recompute(int(f[1]), int(f[2]))),
    (r"backward u(\d+) m(\d+)", lambda f: ins.Backward(int(f[1]), int(f[2]))),
    (r"backward-input u(\d+) m(\d+)", lambda f: ins.BackwardInput(int(f[1]), int(f[2]))),
    (r"backward-weight u(\d+) m(\d+)", lambda f: ins.BackwardWeight(int(f[1]), int(f[2]))),
    (
        r"send (act|grad) u(\d+) m(\d+) to (\d+)",
        lambda f: ins.Send(_WIRES[f[1]], int(f[2]), int(f[3]), int(f[4])),
    ),
    (
        r"recv (act|grad) u(\d+) m(\d+) from (\d+)",
        lambda f: ins.Recv(_WIRES[f[1]], int(f[2]), int(f[3]), int(f[4])),
    ),
    (r"fetch u(\d+)", lambda f: ins.Fetch(int(f[1]))),
    (r"free u(\d+)", lambda f: ins.Free(int(f[1]))),
    (r"reduce u(\d+)", lambda f: ins.Reduce(int(f[1]))),
    (r"reduce-rows u(\d+)", lambda f: ins.ReduceRows(int(f[1]))),
    (r"settle u(\d+)", lambda f: ins.Settle(int(f[1]))),
    (r"reduce-replicas u(\d+)", lambda f: ins.ReduceReplicas(int(f[1]))),
    (r"tie u(\d+)", lambda f: ins.Tie(int(f[1]))),
    (r"reduce-partial", lambda f: ins.ReducePartial()),
    (r"snapshot u(\d+)", lambda f: ins.Snapshot(int(f[1]))),
    (r"offload u(\d+) m(\d+)", lambda f: ins.Offload(int(f[1]), int(f[2]))),
    (r"reload u(\d+) m(\d+)", lambda f: ins.Reload(int(f[1]), int(f[2]))),
    (r"step", lambda f: ins.Step()),
)


def read_instruction(text: str) -> Instruction:
    """Read what ``describe`` wrote; raises UserError for other text."""
    for pattern, make in _FORMS:
        match = re.fullmatch(pattern, text)
        if match:
            return make(match)
    raise UserError(f"'{text}' is no instruction.")


_UNIT = re.compile(r"unit (\d+) (\S+) reads ([\d,]+) stage (\d+)( takes ([\d,]+|-))?( sparse)?( frozen| resting)?")


def read_program(text: str) -> Program:
    """Read what ``write_program`` wrote; raises UserError with the number of a line that is not part of a program."""
    lines = text.splitlines()
    form = r"program zero=(\d) microbatches=(\d+) placement=(\d+(?:,\d+)*) passes=([\w,]*)(?: encoding=(\d+(?:,\d+)*))?"
    head = re.fullmatch(form, lines[0] if lines else "")
    if head is None:
        raise UserError("line 1: a program starts with 'program zero=Z microbatches=M placement=R,... passes=...'.")
    names: list[str] = []
    params: list[tuple[int, ...]] = []
    stages: dict[int, list[int]] = {}
    ranks: list[list[Instruction]] = []
    frozen: list[int] = []
    resting: list[int] = []
    sparse: list[int] = []
    inputs: list[tuple[int, ...]] = []
    for number, line in enumerate(lines[1:], start=2):
        if unit := _UNIT.fullmatch(line):
            names.append(unit[2])
            params.append(tuple(int(p) for p in unit[3].split(",")))
            stages.setdefault(int(unit[4]), []).append(int(unit[1]))
            inputs += [tuple(int(u) for u in unit[6].split(",") if u != "-")] if unit[5] else []
            sparse += [int(unit[1])] if unit[7] else []
            frozen += [int(unit[1])] if unit[8] else []
            resting += [int(unit[1])] if unit[8] == " resting" else []
        elif line == f"rank {len(ranks)}":
            ranks.append([])
        elif line.startswith("  ") and ranks:
            try:
                ranks[-1].append(read_instruction(line.strip()))
            except UserError as error:
                raise UserError(f"line {number}: {error}") from None
        else:
            raise UserError(f"line {number}: '{line}' is neither a unit, the next rank, nor an instruction.")
    return Program(
        units=tuple(names),
        stages=tuple(tuple(stages[s]) for s in sorted(stages)),
        placement=tuple(int(rank) for rank in head[3].split(",")),
        params=tuple(params),
        microbatches=int(head[2]),
        zero=int(head[1]),
        passes=tuple(p for p in head[4].split(",") if p),
        ranks=tuple(tuple(r) for r in ranks),
        frozen=tuple(frozen),
        inputs=tuple(inputs),
        resting=tuple(resting),
        sparse=tuple(sparse),
        encoding=tuple(int(rank) for rank in (head[5] or "").split(",") if rank),
    )
