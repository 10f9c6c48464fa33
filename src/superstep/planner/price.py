"""Pricing: the seconds and bytes of many plans at once, and their lower bounds.

The parts of an estimate are decided level by level, as listed in ``space``: what a core decides is the same on every
schedule and sharding of it, so the sum of the decided parts is a bound of the whole.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from superstep.cost.closed import framework_memory as keeping
from superstep.cost.closed.estimate import Estimate, estimate
from superstep.cost.closed.framework import SUPERSTEP, price_of
from superstep.cost.closed.framework_arrays import Stack
from superstep.cost.closed.framework_memory import KeptMemory
from superstep.cost.closed.memory import FRAGMENTATION, Footprint, footprint
from superstep.cost.closed.model_numbers import DecoderNumbers, array, decoder_of
from superstep.cost.closed.parallel_degrees import SCHEDULES
from superstep.cost.closed.rates import ChipRates
from superstep.cost.program.buffers import ELEMENT_BYTES
from superstep.hardware.units import Array
from superstep.plan.optimizers import MOMENT_BYTES, MOMENTS, OptimizerName
from superstep.planner.plan_columns import Plans
from superstep.planner.search_problem import SearchProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class Pricing:
    """Prices the plans of a problem."""

    model: DecoderNumbers
    rates: ChipRates
    stack: Stack
    keeping: KeptMemory
    memory_bytes: float
    optimizer: OptimizerName

    def seconds(self, plans: Plans) -> Estimate:
        return estimate(self.model, plans.layout, self.rates, self.stack, optimizer=self.optimizer)

    def predict_memory(self, plans: Plans) -> Footprint:
        return footprint(self.model, plans.layout, self.stack, self.keeping)

    def bytes(self, plans: Plans) -> Array:
        """The bytes that each plan's allocator holds."""
        return np.broadcast_to(self.predict_memory(plans).reserved, (len(plans),))

    def core_bound_s(self, cores: Plans) -> Array:
        """Lower bound of the seconds of a core's plans: the work, and the traffic within a stage."""
        return np.broadcast_to(by_core_s(self.seconds(cores)), (len(cores),))

    def schedule_bound_s(self, plans: Plans) -> Array:
        """Lower bound of the seconds of a plan's shardings: the core's, the bubble, and the traffic between stages."""
        return np.broadcast_to(by_schedule_s(self.seconds(plans)), (len(plans),))

    def core_bound_bytes(self, cores: Plans) -> Array:
        """Lower bound of the bytes of a core's plans: one microbatch in flight, all states sharded over all data ranks.
        Layers are divided differently where both ends are on one rank, as with zb-v.
        """
        ones = np.ones(len(cores))
        alone = replace(cores, microbatches=ones)
        folded = replace(alone, schedule=ones * SCHEDULES.index("zb-v"), chunks=2 * ones)
        return np.minimum(self.schedule_bound_bytes(alone), self.schedule_bound_bytes(folded))

    def schedule_bound_bytes(self, plans: Plans) -> Array:
        """Lower bound of the bytes of a plan's shardings: its activations, all states sharded over all data ranks.
        Gradients in fp32 are as large as one moment, or as the master weights beside them; no buffers count.
        """
        ones = np.ones(len(plans))
        held = self.predict_memory(replace(plans, zero=ones, replicas=ones))
        states = held.optimizer * (1 + 1 / (self.keeping.masters + self.keeping.moments))
        return np.broadcast_to(states + (1 + FRAGMENTATION) * held.activations, (len(plans),))


def pricing_of(problem: SearchProblem) -> Pricing:
    """Prices the plans of a problem, as the engine would run them. Raises ConfigError where the chip does not multiply
    in the problem's format.

    The closed form counts two bytes for a number. Where it has four, memory and links are taken at half their rate.
    """
    train = problem.base.train
    rates, stack = price_of(problem.cluster, replace(SUPERSTEP, compute=problem.compute), problem.efficiency)
    # The engine sends beside compute, as the software that this was fitted on.
    stack = replace(stack, overlap_pipeline=array(problem.efficiency["hidden.transfers"]))
    if problem.compute == "fp32":
        # Gradients are fp32 either way.
        rates, stack = in_fp32(rates, problem.cluster.chip.peak("fp32") or 0.0), replace(stack, gradient_bytes=array(2))
    return Pricing(
        model=decoder_of(problem.shape, problem.sequence_tokens),
        rates=rates,
        stack=stack,
        keeping=keeping.superstep(
            element_bytes=ELEMENT_BYTES[problem.compute],
            moments=len(MOMENTS[train.optimizer]) * MOMENT_BYTES[train.moments] / MOMENT_BYTES["fp32"],
            masters=float(problem.base.numerics.master == "fp32"),
        ),
        memory_bytes=problem.memory_bytes,
        optimizer=problem.base.train.optimizer,
    )


def in_fp32(rates: ChipRates, peak_flops_per_s: float) -> ChipRates:
    """Rates for numbers with twice the bytes."""
    links = replace(
        rates.links,
        link_bytes_per_s=rates.links.link_bytes_per_s / 2,
        network_bytes_per_s=rates.links.network_bytes_per_s / 2,
    )
    return replace(
        rates,
        memory_bytes_per_s=rates.memory_bytes_per_s / 2,
        half_flops_per_s=rates.product_flops_per_s,
        peak_half_flops_per_s=array(peak_flops_per_s),
        links=links,
    )


def by_core_s(parts: Estimate) -> Array:
    """The parts of a step that its core decides."""
    return parts.compute_s + parts.recompute_s + parts.tensor_s + parts.context_s + parts.experts_s


def by_schedule_s(parts: Estimate) -> Array:
    """The parts of a step that its core and its schedule decide."""
    return by_core_s(parts) + parts.transfers_s + parts.bubble_s
