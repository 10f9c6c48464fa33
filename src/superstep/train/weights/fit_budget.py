"""fit_budget: a run within ``plan.memory``, or why it is not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from superstep.comm.device import gpus
from superstep.cost.program.budget.choose_kept import BudgetResult, KeptPlan, apply_kept, choose_kept, count_choices
from superstep.cost.program.time.op_prices import MachineRates
from superstep.cost.program.time.operation import UnitOperations
from superstep.cost.program.time.predict import memory_of_phases, price_operations
from superstep.engine.measure.probe_rates import probe_rates
from superstep.errors import ConfigError
from superstep.hardware.cpu_core import CORE
from superstep.observe.number_format import bytes_text
from superstep.plan.resolution.budget import find_budget, find_place
from superstep.plan.resolution.resolve import Resolved

MIB = 2**20
GPU = MachineRates(gemm_flops_per_s=4e14, memory_bytes_per_s=2e12, link_bytes_per_s=2e11, link_latency_s=2e-5)
"""Orders of magnitude of a GPU. Where units are kept or computed again, only the ratio of both rates matters."""
CPU = MachineRates(
    gemm_flops_per_s=dict(CORE.flops_per_s)["fp32"],
    memory_bytes_per_s=CORE.memory_bytes_per_s,
    link_bytes_per_s=CORE.link_bytes_per_s,
    link_latency_s=2e-5,
)


def fit_budget(run: Resolved, traced: Sequence[UnitOperations] | None) -> Resolved:
    """The run, with automatic choices of what its units keep made.

    Args:
        run: with a ``plan.memory``.
        traced: operations of its units; None for those of formulas, and where they are not known.

    Raises:
        ConfigError: it takes more than its budget, the least possible is more, or its memory is not known.
    """
    if traced is None and run.decoder is None:
        raise ConfigError(
            f"plan.memory = '{run.config.plan.memory}' and {run.config.model.label}: its units cannot be traced, so "
            "their memory is not known; leave plan.memory out."
        )
    if run.plan.recompute != "auto" or run.plan.kept:
        _require_budget(run, traced)
        return run
    result = choose_kept(run, price_operations(run, _find_prices(run), traced))
    if result.best is None:
        raise ConfigError(_refusal(run, result))
    return apply_kept(run, result.best.kept)


def _find_prices(run: Resolved) -> MachineRates:
    """Of this machine where copies to a disk are weighed; else the usual ratio of rates, the same everywhere."""
    config = run.config
    is_gpu = bool(gpus()) and config.plan.device != "cpu"
    if find_place(config.plan) != "disk":
        return GPU if is_gpu else CPU
    rates = probe_rates(config.numerics.compute, Path(config.state.dir), run.plan.mesh.world)
    return replace(GPU, disk_bytes_per_s=rates.disk_bytes_per_s) if is_gpu else rates


def _require_budget(run: Resolved, traced: Sequence[UnitOperations] | None) -> None:
    limit_bytes, plan = find_budget(run.config.plan), run.config.plan
    assert limit_bytes is not None, "the run has a budget"
    size = max(rank.bytes for rank in memory_of_phases(run, traced))
    if size <= limit_bytes:
        return
    less = " or plan.recompute to 'auto'," if plan.recompute != "auto" else " or leave plan.kept out,"
    raise ConfigError(
        f"plan.memory = '{plan.memory}' is less than the {bytes_text(size)} that a rank takes with plan.recompute = "
        f"'{plan.recompute}'; set plan.memory to '{_round_up(size)}' or more,{less} or use more ranks."
    )


def _refusal(run: Resolved, result: BudgetResult) -> str:
    least = result.least
    return (
        f"plan.memory = '{run.config.plan.memory}' is less than any choice takes: the least is "
        f"{bytes_text(least.bytes)}, {_describe(run, least)}; set plan.memory to '{_round_up(least.bytes)}' or more, a "
        "smaller plan.microbatch, a higher plan.zero, or use more ranks."
    )


def _describe(run: Resolved, least: KeptPlan) -> str:
    """The plan that takes least."""
    choices = count_choices(least.kept)
    if "input" in choices and least.name == "input of all":
        return "with plan.recompute = 'full'"
    if set(choices) == {find_place(run.config.plan)}:
        return f"with all activations on the {find_place(run.config.plan)}"
    listed = ", ".join(f"{choice} {count}" for choice, count in choices.items())
    return f"of the {sum(choices.values())} activations of units and microbatches kept: {listed}"


def _round_up(size: int) -> str:
    return f"{math.ceil(size / MIB)}MiB"
