"""snapshot_bytes: the host memory of the copies of a rank's state.

master weights and moments              their bytes, 4 each in fp32 · this rank's share of what is trained
slots                                   3: the newest complete one, the next, and one on its way to disk
with a copy on another host             4: the newest, the next, the one that other hosts have, the one they have next;
                                        and 3 for copies of a rank of another host
"""

from __future__ import annotations

from dataclasses import replace

from superstep.cost.program.buffers import ELEMENT_BYTES, list_trained_families, moment_bytes, share_numel
from superstep.cost.program.flops import UnitParameters, rank_parameters
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
    return slots * max(
        sum(_state_bytes(run, owned[unit]) for unit in program.list_held_units(rank)) for rank in range(program.pp)
    )


def _state_bytes(run: Resolved, unit: UnitParameters) -> int:
    """Bytes of a unit's master weights and moments on a rank."""
    masters = ELEMENT_BYTES[run.config.numerics.master] * share_numel(run, unit)
    return masters + sum(moment_bytes(run, unit, family) for family in list_trained_families(run))
