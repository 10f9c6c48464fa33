"""Observations of a run at one moment: each rank's last report, and the system's report of its process.

They are the only input of a diagnosis (``observe.doctor.diagnose``). Those of a live run come from memory, those of a
failed one from its failure file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from superstep.plan.mesh import MeshShape
from superstep.program.instructions import Instruction, Program

Doing: TypeAlias = Literal["apart", "waits", "works"]
"""A rank is outside any program, waits for another rank's data, or runs an instruction."""

DATA, CHECKPOINT, VALIDATION, REPORT = "data", "checkpoint", "validation", "report"
"""A rank's work outside programs: wait for a batch, write a checkpoint, validate, report a step."""

Memory: TypeAlias = tuple[float, int]
"""Seconds on the host's clock, and a process's resident bytes at that time."""


@dataclass(frozen=True, slots=True)
class Note:
    """One run of an instruction on a rank, or of work outside programs.

    Attributes:
        run: which run of a program since the process began, from 1; the same count on all ranks.
        step: which it was part of, or followed.
        index: of the instruction in its list; -1 outside a program.
        what: in words.
        ready_s: when the rank came to it, on the host's monotonic clock.
        start_s: when its inputs were there; 0.0 if never.
        end_s: when it was done; 0.0 if an error was raised.
        within_s: waiting for other ranks between start and end.
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
        return self.end_s > 0.0

    @property
    def own_s(self) -> float:
        """Seconds from start to end without waits."""
        return max(0.0, self.end_s - self.start_s - self.within_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankObservation:
    """One rank.

    Attributes:
        process: its process id; 0 if unknown.
        state: of the process: R, S, D, T, t, Z; empty where it has gone.
        doing: as last reported.
        what: the instruction, or the work outside a program, in words; empty if unknown.
        run, step, index: of that; see ``Note``.
        since_s: how long it has been so.
        longest_s: its longest earlier run of this instruction.
        has_raised: whether the instruction raised an error, which ended the program.
        has_moved: whether it made progress while observed.
        looked_s: how long no progress was observed; 0.0 after one look.
        is_held: whether some code holds the GIL, so that its other threads do not run.
        is_on_gpu: whether it computes on a GPU: place and times are then the GPU's, and its main thread says nothing.
        is_asleep: whether its main thread was on no processor while observed.
        cpu_s: its main thread's processor time meanwhile.
        starved: share of its runnable time that it waited for a processor.
        follows: the instructions of its current or last program.
        notes: oldest first.
        memory: its size over time, oldest first.
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
        """What it does, without details of the program's text."""
        return self.what.partition(" keep=")[0]

    @property
    def at(self) -> tuple[int, int]:
        """Its progress: ranks with a smaller value are behind."""
        return (self.run + 1, 0) if self.doing == "apart" else (self.run, self.index)

    def group_done_by_run(self) -> dict[int, list[Note]]:
        """Finished instructions, by their run of a program."""
        notes: dict[int, list[Note]] = {}
        for note in self.notes:
            if note.index >= 0 and note.is_done:
                notes.setdefault(note.run, []).append(note)
        return notes


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """The disk that the run writes to.

    Attributes:
        free_bytes: None if unknown.
        needed_bytes: the next write, as far as known: a checkpoint as large as the newest.
    """

    free_bytes: int | None = None
    needed_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunObservation:
    """Observations of a run.

    Attributes:
        program: of its steps.
        ranks: the observed ones, by number.
        is_live: whether its processes exist.
        fault: why a failed run ended.
        host: of the ranks; empty if unknown.
    """

    program: Program
    mesh: MeshShape
    ranks: tuple[RankObservation, ...]
    is_live: bool = True
    fault: str = ""
    host: str = ""
    disk: Disk = Disk()
