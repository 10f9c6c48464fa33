"""What surrounds a checkpoint of a session: the trace of the last step, and what rank 0 does beside."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from superstep.errors import Fault
from superstep.observe.append_file import unwritable
from superstep.runtime.clock import offset_to_rank_0
from superstep.runtime.device import Device
from superstep.runtime.launch import gather
from superstep.runtime.mesh import Mesh
from superstep.runtime.recorder import Recorder
from superstep.state.folders import checkpoints
from superstep.state.together import Peers, together
from superstep.train.run_folder import RunFolder, write_whole


def trace_of(record: Recorder, step: int, *, mesh: Mesh, device: Device) -> str:
    """When each instruction of the last step ran. Every rank calls this together."""
    at = mesh.at
    offset_s = offset_to_rank_0(device).seconds
    mine = [(ran.index, ran.start_s + offset_s, ran.end_s + offset_s) for ran in record.ran()]
    parts = gather(mine if at.dp == at.cp == at.tp == 0 else None)
    return json.dumps({"step": step, "ranks": [part for part in parts if part is not None]})


def settle(peers: Peers, folder: RunFolder, trace: str, *, step: int, then: Callable[[], None] = lambda: None) -> None:
    """Write the trace, and do what is then to do. Every rank calls this together.

    Raises:
        Fault: it cannot be done: on every rank the same.
    """

    def work() -> None:
        write_whole(folder.trace, trace)
        then()

    def unsettled(error: Exception) -> Fault:
        known = error if isinstance(error, OSError) else OSError(0, repr(error))
        return unwritable(folder.checkpoints, known, step=step)

    # Rank 0 alone writes and deletes here; no rank goes on before it has, and all stop where it could not.
    together(peers, lambda: work() if peers.rank == 0 else None, unsettled)


def is_there(peers: Peers, place: Path) -> bool:
    """Whether a run that was recovered saved a checkpoint before a rank was lost. Every rank calls this together."""

    def unreadable(error: Exception) -> Fault:
        return Fault(f"{place.parent} cannot be read ({error}); mend that, then resume.")

    return together(peers, lambda: not peers.rank and place in checkpoints(place.parent), unreadable)[0]
