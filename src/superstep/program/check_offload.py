"""check_offload: the rules of offloads and reloads, of a program and of a step that ran.

What a unit keeps leaves once, after its forward pass, and comes back once, before anything reads it. On a clock, a
reload begins after its offload has ended and ends before the pass that reads it begins, and a computation that waits
for freed memory begins after what lay there has left.
"""

from __future__ import annotations

from superstep.program import instructions as ins
from superstep.program.instructions import Instruction, Program
from superstep.program.issue_order import InvalidProgram
from superstep.program.offload import Key, find_ended_offloads
from superstep.program.text import describe
from superstep.program.timeline import Timeline, TimelineEvent


def check_offload(program: Program) -> None:
    """Raises InvalidProgram: names the first rank and instruction that breaks a rule, and the rule."""
    for number, instructions in enumerate(program.ranks):
        places = _Places()
        for at, i in enumerate(instructions):
            if broken := places.run(i):
                raise InvalidProgram(f"rank {number}, instruction {at} ({describe(i)}): {broken}")
        if places.away:
            unit, m = min(places.away)
            raise InvalidProgram(f"rank {number}, at the end: what u{unit} kept of m{m} is never reloaded")


class _Places:
    """Where the kept activations of a rank are."""

    def __init__(self) -> None:
        self.kept: set[Key] = set()
        self.away: set[Key] = set()
        self.moved: set[Key] = set()

    def run(self, i: Instruction) -> str:
        """Advance over one instruction; returns the broken rule, or nothing."""
        match i:
            case ins.Forward(unit, m, keep):
                self.kept |= {(unit, m)} if keep != "nothing" else set()
            case ins.Offload(unit, m):
                return self._offload((unit, m))
            case ins.Reload(unit, m):
                if (unit, m) not in self.away:
                    return "only what was offloaded is reloaded, once"
                self.away.discard((unit, m))
            case ins.Recompute(unit, m) | ins.Backward(unit, m) | ins.BackwardInput(unit, m):
                if (unit, m) in self.away:
                    return "what the unit kept was offloaded, and is not reloaded before it"
                if not isinstance(i, ins.Recompute):
                    self.kept.discard((unit, m))
        return ""

    def _offload(self, key: Key) -> str:
        if key not in self.kept:
            return "the unit keeps nothing that could be offloaded"
        if key in self.moved:
            return "what a unit keeps is offloaded once"
        self.moved.add(key)
        self.away.add(key)
        return ""


def check_copies(timeline: Timeline) -> None:
    """The same of a step that ran, by its clock. Raises InvalidProgram."""
    for rank in range(timeline.program.pp):
        _check_rank(timeline.of(rank), find_ended_offloads(timeline.program, rank))


def _check_rank(events: list[TimelineEvent], ended: dict[int, tuple[Key, ...]]) -> None:
    left: dict[Key, float] = {}
    back: dict[Key, float] = {}
    for e in events:
        i = e.instruction
        broken = ""
        if isinstance(i, ins.Offload | ins.Reload | ins.Recompute | ins.Backward | ins.BackwardInput):
            key = i.unit, i.microbatch
            if isinstance(i, ins.Offload):
                left[key] = e.end_s
            elif isinstance(i, ins.Reload):
                back[key] = e.end_s
                broken = "it begins before its offload has ended" if e.start_s < left[key] else ""
            elif e.start_s < back.get(key, e.start_s):
                broken = "it begins before its reload has ended"
        if not broken and any(e.start_s < left[key] for key in ended.get(e.index, ())):
            broken = "it begins before the memory that it waits for is free"
        if broken:
            raise InvalidProgram(f"rank {e.rank}, instruction {e.index} ({describe(i)}): {broken}")
