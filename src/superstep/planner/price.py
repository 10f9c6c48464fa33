"""Pricing: the seconds and bytes of many plans at once, and bounds that they cannot be below.

The parts of an estimate are decided level by level, as ``space`` lists the levels: what a core decides is the same on
every schedule and every sharding of it, so the sum of what is decided is a bound of the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

import numpy as np

from superstep.cost.decoder import Array, Decoder, array, decoder_of
from superstep.cost.efficiency import FITTED, Efficiency, rates_on
from superstep.cost.estimate import Estimate, estimate
from superstep.cost.layout import Layout
from superstep.cost.rates import Rates
from superstep.cost.stack import Stack, superstep
from superstep.planner.plans import Plans
from superstep.planner.problem import Problem


class Held(Protocol):
    """Bytes on the fullest rank, by category."""

    @property
    def parameters(self) -> Array: ...
    @property
    def gradients(self) -> Array: ...
    @property
    def optimizer(self) -> Array: ...
    @property
    def activations(self) -> Array: ...
    @property
    def buffers(self) -> Array: ...


HeldBy: TypeAlias = Callable[[Decoder, Layout, Stack], Held]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pricing:
    """What prices the plans of a problem.

    Attributes:
        held: the closed form of memory; ``cost.footprint.footprint``.
    """

    model: Decoder
    rates: Rates
    stack: Stack
    held: HeldBy
    memory_bytes: float

    def seconds(self, plans: Plans) -> Estimate:
        """The step of each plan."""
        return estimate(self.model, plans.layout, self.rates, self.stack)

    def held_by(self, plans: Plans) -> Held:
        """The bytes of each plan, by category."""
        return self.held(self.model, plans.layout, self.stack)

    def bytes(self, plans: Plans) -> Array:
        """The bytes of each plan."""
        held = self.held_by(plans)
        total: Array = held.parameters + held.gradients + held.optimizer + held.activations + held.buffers
        return np.broadcast_to(total, (len(plans),))

    def core_bound_s(self, cores: Plans) -> Array:
        """Seconds that no plan of a core is below: the work, and the traffic within a stage."""
        return np.broadcast_to(by_core_s(self.seconds(cores)), (len(cores),))

    def schedule_bound_s(self, plans: Plans) -> Array:
        """Seconds that no sharding of a plan is below: those, the bubble, and the traffic between stages."""
        return np.broadcast_to(by_schedule_s(self.seconds(plans)), (len(plans),))

    def core_bound_bytes(self, cores: Plans) -> Array:
        """Bytes that no plan of a core is below: everything sharded, one microbatch in flight, no buffers."""
        least = replace(
            cores, zero=np.full(len(cores), 3.0), replicas=np.ones(len(cores)), microbatches=np.ones(len(cores))
        )
        held = self.held_by(least)
        return np.broadcast_to(
            held.parameters + held.gradients + held.optimizer + held.activations, (len(cores),)
        )


def pricing_of(problem: Problem, held: HeldBy, efficiency: Efficiency = FITTED) -> Pricing:
    """What prices the plans of a problem, as the engine would run them.

    The closed forms count two bytes for a number. Where it has four, memory and links are taken at half their rate,
    and ``held`` is told of numbers twice as long.

    Raises:
        ConfigError: the chip does not multiply in the problem's format.
    """
    rates = rates_on(problem.cluster, rate=problem.compute, attention="flash-2", efficiency=efficiency)
    stack = superstep()
    if problem.compute == "fp32":
        rates, stack, held = in_fp32(rates), replace(stack, gradient_bytes=array(2)), _held_in_fp32(held)
    return Pricing(
        model=decoder_of(problem.shape, problem.sequence_tokens),
        rates=rates,
        stack=stack,
        held=held,
        memory_bytes=problem.memory_bytes,
    )


def in_fp32(rates: Rates) -> Rates:
    """Rates at which twice the bytes of what is counted move."""
    links = replace(
        rates.links,
        link_bytes_per_s=rates.links.link_bytes_per_s / 2,
        network_bytes_per_s=rates.links.network_bytes_per_s / 2,
    )
    return replace(
        rates,
        memory_bytes_per_s=rates.memory_bytes_per_s / 2,
        half_flops_per_s=rates.product_flops_per_s,
        links=links,
    )


@dataclass(frozen=True, slots=True)
class _Twice:
    """Bytes in fp32, from those with numbers of two bytes: no master weights beside the parameters."""

    half: Held

    @property
    def parameters(self) -> Array:
        return 2 * self.half.parameters

    @property
    def gradients(self) -> Array:
        return self.half.gradients

    @property
    def optimizer(self) -> Array:
        return self.half.optimizer * 2 / 3

    @property
    def activations(self) -> Array:
        return 2 * self.half.activations

    @property
    def buffers(self) -> Array:
        return 2 * self.half.buffers


def _held_in_fp32(held: HeldBy) -> HeldBy:
    return lambda model, layout, stack: _Twice(held(model, layout, stack))


def by_core_s(parts: Estimate) -> Array:
    """The parts of a step that its core decides."""
    return parts.compute_s + parts.recompute_s + parts.tensor_s + parts.context_s + parts.experts_s


def by_schedule_s(parts: Estimate) -> Array:
    """The parts of a step that its core and its schedule decide."""
    return by_core_s(parts) + parts.transfers_s + parts.bubble_s
