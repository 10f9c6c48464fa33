"""Problems for the planner's tests: small models on small clusters, whose spaces can be priced whole."""

from __future__ import annotations

from dataclasses import replace

from superstep.hardware.cluster_file import cluster
from superstep.plan.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from superstep.planner.price import pricing_of
from superstep.planner.search import PricedProblem
from superstep.planner.search_problem import SearchProblem


def problem_of(
    name="demo",
    *,
    chips=8,
    chip="A100",
    batch=32,
    sequence=256,
    compute="bf16",
    memory=None,
    rules=(),
    domain=None,
    **model,
) -> SearchProblem:
    """A run of a named size, ``model`` its fields, with a layout to find."""
    found = cluster(f"8x{chip}")
    found = replace(found, chips=chips, domain=domain or found.domain)
    return SearchProblem(
        base=RunConfig(
            model=ModelConfig(name=name, **model),
            data=DataConfig(sequence_tokens=sequence),
            train=TrainConfig(batch_sequences=batch),
        ),
        cluster=found,
        compute=compute,
        memory_bytes=found.chip.memory_bytes if memory is None else memory,
        rules=rules,
    )


def side_of(problem: SearchProblem) -> PricedProblem:
    """A problem with what prices it."""
    return PricedProblem(problem=problem, pricing=pricing_of(problem))


def everything(side: PricedProblem):
    """All plans of a small space."""
    space = side.space
    return space.with_shardings(space.with_schedules(space.cores()))
