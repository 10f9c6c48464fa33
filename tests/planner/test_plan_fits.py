"""What a search for plans proposes for a GPU is what training accepts there, communicators among it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planning import problem_of
from superstep.comm.device import Device
from superstep.cost.closed.memory import COMMUNICATOR_BYTES, CONTEXT_BYTES, USABLE
from superstep.planner.ranking.plan_request import PlanRequest, memory_of
from superstep.planner.ranking.rank_layouts import first_plans, refine
from superstep.run.memory_check import require_fit

GPU = Device("cuda", 0)
GIB = 2**30
MOE = {"sequence": 2048, "layers": 4, "batch": 16}
DENSE = {"sequence": 2048, "batch": 32}


@pytest.mark.parametrize(
    ("model", "chips", "gib", "asked"),
    [
        ("llama3.2-1b", 8, 6.0, DENSE),
        ("llama3.2-1b", 8, 8.0, DENSE),
        ("llama3.2-1b", 8, 12.0, DENSE),
        ("llama3.2-1b", 32, 4.0, DENSE),
        ("qwen3-30b-a3b", 8, 16.0, MOE),
        ("qwen3-30b-a3b", 8, 20.0, MOE),
    ],
)
def test_a_gpu_has_room_for_every_plan_that_is_proposed(model, chips, gib, asked):
    """A chip that has no byte more than is asked for, its context and the usual reserve."""
    problem = problem_of(model, chips=chips, chip="H100", **asked)
    free_bytes = gib * GIB + COMMUNICATOR_BYTES
    chip = replace(problem.cluster.chip, memory_bytes=(free_bytes + CONTEXT_BYTES) / USABLE + 1)
    cluster = replace(problem.cluster, chip=chip)
    problem = replace(problem, cluster=cluster, memory_bytes=memory_of(cluster, gib))
    ranked = refine(first_plans([problem], PlanRequest()))
    proposed = [*ranked.plans, *(each.plan for each in ranked.neighbours)]
    assert proposed
    for each in proposed:
        # Nothing of the units themselves is asked of our own decoder.
        require_fit(each.run, GPU, (), limit_bytes=int(free_bytes))
