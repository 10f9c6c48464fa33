"""The last recorded steps of every rank, as the trace of one step and for Perfetto.

The first is the file that a run writes with its checkpoints (``observe.trace``), the second is Chrome's trace format,
times in µs, with a process for each rank. A rank's threads are its compute, its transfers and collectives, its waits,
and its work outside programs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from superstep.observe.chrome_trace import LANES, US
from superstep.observe.doctor.observations import Note, RankObservation, RunObservation
from superstep.program.instructions import Instruction, lane
from superstep.program.text import read_instruction

WAITS, BESIDE = "waits", "beside"
ROWS = (*LANES, WAITS, BESIDE)


def newest_step(run: RunObservation) -> tuple[int, list[list[Note]]] | None:
    """The newest step that is complete on every pipeline rank, with the notes of each; None without one.

    Of the ranks that differ only in dp, cp and tp, the one with index 0 in each counts.
    """
    first = [rank for rank in run.ranks if (at := run.mesh.at(rank.rank)).dp == at.cp == at.tp == 0]
    if len(first) < run.mesh.pp:
        return None
    each = [steps_of(rank, run.program.ranks[run.mesh.at(rank.rank).pp]) for rank in first]
    common = set.intersection(*(set(steps) for steps in each))
    if not common:
        return None
    newest = max(common)
    return each[0][newest][0].step, [steps[newest] for steps in each]


def steps_of(rank: RankObservation, instructions: Sequence[Instruction]) -> dict[int, list[Note]]:
    """The notes of each complete run of this list, by run."""
    known: dict[str, Instruction] = {}

    def read(text: str) -> Instruction:
        if text not in known:
            known[text] = read_instruction(text)
        return known[text]

    wanted = list(instructions)
    return {
        run: notes
        for run, notes in sorted(rank.group_done_by_run().items())
        if len(notes) == len(wanted) and [read(note.what) for note in notes] == wanted
    }


def trace_of_step(step: int, ranks: Sequence[Sequence[Note]]) -> str:
    """The trace of one step, as ``observe.trace.load_trace`` reads it."""
    return json.dumps({"step": step, "ranks": [[[n.index, n.start_s, n.end_s] for n in notes] for notes in ranks]})


def perfetto_steps(run: RunObservation, *, name: str, steps: int) -> str:
    """The last steps for Perfetto, with all that ran between them; validations count as steps."""
    newest = max((note.run for rank in run.ranks for note in rank.notes), default=0)
    kept = {rank.rank: [n for n in rank.notes if n.run > newest - steps] for rank in run.ranks}
    start_s = min((note.ready_s for notes in kept.values() for note in notes), default=0.0)
    events: list[dict[str, Any]] = []
    for rank, notes in kept.items():
        events += _names(f"{name}: rank {rank}", rank)
        for note in notes:
            events += _slices(note, rank, start_s)
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":")) + "\n"


def _names(name: str, rank: int) -> Iterator[dict[str, Any]]:
    place = {"ph": "M", "pid": rank, "tid": 0}
    yield place | {"name": "process_name", "args": {"name": name}}
    yield place | {"name": "process_sort_index", "args": {"sort_index": rank}}
    for number, row in enumerate(ROWS):
        yield place | {"tid": number, "name": "thread_name", "args": {"name": row}}
        yield place | {"tid": number, "name": "thread_sort_index", "args": {"sort_index": number}}


def _slices(note: Note, rank: int, zero_s: float) -> Iterator[dict[str, Any]]:
    """A note's slice, and the wait before it. An unfinished one has no slice."""
    details: dict[str, float] = {"step": note.step, "run": note.run, "instruction": note.index}
    if note.index >= 0 and note.start_s > note.ready_s:
        yield _slice(rank, WAITS, f"for {note.what}", note.ready_s - zero_s, note.start_s - zero_s, details)
    if note.is_done:
        row = lane(read_instruction(note.what)) if note.index >= 0 else BESIDE
        details = details | {"waited_within_ms": 1e3 * note.within_s} if note.within_s else details
        yield _slice(rank, row, note.what, note.start_s - zero_s, note.end_s - zero_s, details)


def _slice(rank: int, row: str, name: str, start_s: float, end_s: float, details: dict[str, float]) -> dict[str, Any]:
    place: dict[str, Any] = {"ph": "X", "name": name, "cat": row, "pid": rank, "tid": ROWS.index(row)}
    return place | {"ts": start_s * US, "dur": (end_s - start_s) * US, "args": details}
