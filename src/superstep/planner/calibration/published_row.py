"""A file with a published step: a run.toml with the step's seconds and cluster.

[published]
step_s = 9.4                 seconds of a step
cluster = "64xH100"          where it ran; by default the cluster of the plan
software = "NeMo 24.05"      name with version; by default Superstep
year = 2024.4                when it ran
[model] ... [data] ... [train] ... [plan] ...
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from superstep.cost.closed.efficiency import Efficiency
from superstep.cost.closed.estimate import estimate
from superstep.cost.closed.framework import price_of
from superstep.cost.closed.known_frameworks import shorthand, usual_attention
from superstep.cost.closed.model_numbers import array, decoder_of
from superstep.errors import ConfigError
from superstep.hardware.cluster import Cluster
from superstep.hardware.cluster_file import cluster as cluster_of
from superstep.hardware.units import Array
from superstep.plan.config import Dtype, RunConfig
from superstep.plan.config_io import build, read_tables
from superstep.plan.resolution.resolve import Resolved, resolve
from superstep.planner.calibration.calibrate_observation import Guide, slopes_of
from superstep.planner.plan_columns import Plans, plans_of
from superstep.planner.price import pricing_of
from superstep.planner.search_problem import SearchProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedFigures:
    """The table ``[published]``."""

    step_s: float
    cluster: str = ""
    software: str = ""
    year: float = 2025.0


def is_published(path: Path) -> bool:
    return path.suffix == ".toml" and path.is_file() and "published" in read_tables(path)


def after_published(path: Path, cluster: Cluster, known: Guide) -> tuple[Guide, float]:
    """The calibration after a published step, and the step's predicted seconds over its measured ones. Raises
    ConfigError if a key, a chip, a format or a model is unknown, or the plan does not resolve.
    """
    tables = read_tables(path)
    figures = build(PublishedFigures, tables.pop("published"), "published.")
    if not figures.step_s > 0:
        raise ConfigError(f"{path}: published.step_s = {figures.step_s} must be above 0.")
    run = resolve(build(RunConfig, tables))
    where = cluster_of(figures.cluster) if figures.cluster else replace(cluster, chips=run.plan.mesh.world)
    if where.chips != run.plan.mesh.world:
        raise ConfigError(
            f"{path}: published.cluster = '{figures.cluster}' has {where.chips} chips, and the plan "
            f"{run.plan.mesh.world}; change one of them."
        )
    log_seconds = _log_seconds(run, where, figures)
    error = float(log_seconds(known.efficiency)) - float(np.log(figures.step_s))
    return known.after_step(slopes_of(log_seconds, known.efficiency), error), float(np.exp(error))


def step_slopes(run: Resolved, cluster: Cluster, efficiency: Efficiency) -> Array:
    """Slopes of the log of a step's seconds over the constants, for a run of Superstep."""
    return slopes_of(_log_seconds(run, cluster, PublishedFigures(step_s=1.0)), efficiency)


def _log_seconds(run: Resolved, cluster: Cluster, figures: PublishedFigures) -> Callable[[Efficiency], Array]:
    plans, compute = plans_of(run), run.config.numerics.compute
    if not figures.software:
        return lambda efficiency: _ours(run, plans, cluster, compute, efficiency)
    known = shorthand(figures.software, figures.year)
    software = replace(known.software, compute=compute, attention=usual_attention(known, figures.year))
    model = decoder_of(run.shape, run.config.data.sequence_tokens)
    # 0: as often as that software gathers and reduces, not as often as Superstep does.
    layout = replace(plans.layout, gathers=array(0), reductions=array(0))

    def theirs(efficiency: Efficiency) -> Array:
        return np.log(estimate(model, layout, *price_of(cluster, software, efficiency)).step_s).reshape(())

    return theirs


def _ours(run: Resolved, plans: Plans, cluster: Cluster, compute: Dtype, efficiency: Efficiency) -> Array:
    problem = SearchProblem(base=run.config, cluster=cluster, compute=compute, memory_bytes=0.0, efficiency=efficiency)
    return np.log(pricing_of(problem).seconds(plans).step_s).reshape(())
