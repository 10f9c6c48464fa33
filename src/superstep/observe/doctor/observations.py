"""What is seen of a run at one moment, as values: what each rank last said, and what the system says of its process.

They are all that a diagnosis is made of (``observe.doctor.diagnose``). Those of a live run are read out of memory, and
those of one that has failed out of the file that it left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from superstep.plan.mesh import MeshShape
from superstep.program.instructions import Instruction, Program

Doing: TypeAlias = Literal["apart", "waits", "works"]
"""A rank is apart from any program, waits for what an instruction needs of another rank, or works on it."""

DATA, CHECKPOINT, VALIDATION, REPORT = "data", "checkpoint", "validation", "report"
"""What a rank may do beside its programs: wait for a batch, write a checkpoint, validate, tell what it has done."""

Memory: TypeAlias = tuple[float, int]
"""Seconds of the host's clock, and the bytes that a process had resident then."""


@dataclass(frozen=True, slots=True)
class Note:
    """One instruction as it ran on one rank, or something that it did beside its programs.

    Attributes:
        run: which run of a program since the process began, from 1 on; all ranks count alike.
        step: the step that it was part of, or followed.
        index: of the instruction in its list; -1 of what is beside a program.
        what: in words.
        ready_s: when the rank came to it, in seconds of the host's monotonic clock.
        start_s: when what it needs was there; 0.0 where that never was.
        end_s: when it was done; 0.0 where it never was, because something was raised.
        within_s: of the time between, what it waited for other ranks.
    """

    run: int
    step: int
    index: int
    what: str
    ready_s: float
    start_s: float
    end_s: float
    within_s: float = 0.0

    @property
    def is_done(self) -> bool:
        """Whether it came to its end."""
        return self.end_s > 0.0

    @property
    def own_s(self) -> float:
        """What it took without waiting."""
        return max(0.0, self.end_s - self.start_s - self.within_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSeen:
    """One rank.

    Attributes:
        rank: its number.
        process: the number of its process; 0 where that is not known.
        state: of it, as the system has it: R, S, D, T, t, Z; empty where it has gone.
        doing: what it last said that it does.
        what: the instruction, or what it does beside a program, in words; empty where nothing is known.
        run, step, index: where that is; see ``Note``.
        since_s: for how long it has been so.
        longest_s: the longest that it has worked on this instruction before.
        has_raised: whether that has raised an error, and the rank has left its program for it.
        has_moved: whether it went on while it was looked at.
        looked_s: for how long it was seen to stand; 0.0 where there was one look.
        is_held: some code keeps Python's lock: its other threads do not run.
        is_on_gpu: whether it computes on a GPU: where it is and since when is then its GPU's, and what its main thread
            does says nothing.
        is_asleep: its main thread was on no processor while it was looked at.
        cpu_s: that its main thread had of a processor meanwhile.
        starved: of the time that it could have run, the share in which it waited for a processor.
        follows: the instructions of the program that it runs, or ran last.
        notes: the last things it did, oldest first.
        memory: how its size went, oldest first.
        resident_bytes: what it has in memory.
        swapped_bytes: what it has on disk instead.
        faults_per_s: pages that it had to wait for the disk for.
        stacks: of its threads, each from the innermost call outwards, the main thread first.
    """

    rank: int
    process: int = 0
    state: str = "S"
    doing: Doing = "apart"
    what: str = ""
    run: int = 0
    step: int = 0
    index: int = 0
    since_s: float = 0.0
    longest_s: float = 0.0
    has_raised: bool = False
    has_moved: bool = False
    looked_s: float = 0.0
    is_held: bool = False
    is_on_gpu: bool = False
    is_asleep: bool = False
    cpu_s: float = 0.0
    starved: float = 0.0
    follows: tuple[Instruction, ...] = ()
    notes: tuple[Note, ...] = ()
    memory: tuple[Memory, ...] = ()
    resident_bytes: int = 0
    swapped_bytes: int = 0
    faults_per_s: float = 0.0
    stacks: tuple[tuple[str, ...], ...] = ()

    @property
    def brief(self) -> str:
        """What it does, without what only a program's reader wants to know."""
        return self.what.partition(" keep=")[0]

    @property
    def at(self) -> tuple[int, int]:
        """How far it is: what is less is behind."""
        return (self.run + 1, 0) if self.doing == "apart" else (self.run, self.index)

    def done_by_run(self) -> dict[int, list[Note]]:
        """The instructions that came to their end, by the number of the run of a program that they are of."""
        notes: dict[int, list[Note]] = {}
        for note in self.notes:
            if note.index >= 0 and note.is_done:
                notes.setdefault(note.run, []).append(note)
        return notes


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """Where the run writes.

    Attributes:
        free_bytes: that are left for it; None where that is not known.
        needed_bytes: what it writes next, as far as that is known: a checkpoint as large as the newest.
    """

    free_bytes: int | None = None
    needed_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSeen:
    """A run.

    Attributes:
        program: of its steps.
        mesh: of its ranks.
        ranks: those that something is known of, by number.
        is_live: whether its processes are there.
        fault: why it ended, where it is not.
        host: of the ranks; empty where it is not known.
        disk: where it writes.
    """

    program: Program
    mesh: MeshShape
    ranks: tuple[RankSeen, ...]
    is_live: bool = True
    fault: str = ""
    host: str = ""
    disk: Disk = Disk()
