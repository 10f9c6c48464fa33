"""snapshot_bytes: the host memory of the copies of a rank's state.

weights and moments, fp32               4 bytes each · this rank's share of what is trained
slots                                   3: the newest complete one, the next, and one on its way to disk
with a copy on another host             4: the newest, the next, the one that other hosts have, the one they have next;
                                        and 3 for copies of a rank of another host
"""

from __future__ import annotations

from dataclasses import replace

from superstep.cost.program.buffers import FP32, share_numel
from superstep.cost.program.flops import rank_parameters
from superstep.plan.optimizers import MOMENTS
from superstep.plan.resolution.resolve import Resolved
from superstep.program.compile import compile_evaluation

SLOTS = 3
PEER_SLOTS = 4
"""Additional slots with a copy on another host: one of its own, three for another's."""


def snapshot_bytes(run: Resolved) -> int:
    """Bytes of the fullest rank; 0 without snapshots. Until the first checkpoint only two thirds are allocated."""
    return 0 if run.config.state.snapshot_every is None else slots_bytes(run)


def slots_bytes(run: Resolved) -> int:
    """Its bytes with snapshots."""
    slots = SLOTS + PEER_SLOTS * (run.config.state.peers or 0)
    # Who holds what is the same in the shortest program.
    program, owned = compile_evaluation(replace(run.plan, microbatches=1)), rank_parameters(run)
    shares = [sum(share_numel(run, owned[u]) for u in program.list_held_units(rank)) for rank in range(program.pp)]
    return slots * (1 + len(MOMENTS[run.config.train.optimizer])) * FP32 * max(shares)
