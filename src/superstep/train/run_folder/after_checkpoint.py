"""The trace of the last step, and the report of a written checkpoint."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from superstep.comm.clock_sync import offset_to_rank_0
from superstep.comm.device import Device
from superstep.comm.mesh import Mesh
from superstep.comm.objects import gather
from superstep.engine.instruction_timer import Recorder
from superstep.errors import DiskFault
from superstep.state.all_or_none import Peers
from superstep.train.run_folder.run_paths import RunFolder, write_whole


@dataclass(frozen=True, slots=True)
class WrittenCheckpoint:
    """A written checkpoint.

    Attributes:
        path: of its folder.
        bytes: of its tensors; 0 where it already existed.
        problems: one line each: a trace that could not be written, an old checkpoint that could not be deleted.
    """

    path: Path
    bytes: int
    problems: tuple[str, ...]


def trace_of(record: Recorder, step: int, *, mesh: Mesh, device: Device) -> str:
    """Times of each instruction of the last step. Every rank calls this together."""
    at = mesh.at
    offset_s = offset_to_rank_0(device).seconds
    mine = [(ran.index, ran.start_s + offset_s, ran.end_s + offset_s) for ran in record.ran()]
    parts = gather(mine if at.dp == at.cp == at.tp == 0 else None, list[tuple[int, float, float]] | None)
    return json.dumps({"step": step, "ranks": [part for part in parts if part is not None]})


def write_trace(peers: Peers, folder: RunFolder, trace: str) -> tuple[str, ...]:
    """Write the trace, on rank 0. Every rank calls this together.

    Returns:
        Problems: a run continues without a trace.
    """
    problems: tuple[str, ...] = ()
    if peers.rank == 0:
        try:
            write_whole(folder.trace, trace)
        except DiskFault as fault:
            problems = (fault.message,)
    return peers.gather(problems, tuple[str, ...])[0]
