"""Catalogue: seconds of a plan's instructions on chips of the catalogue, by the closed form's formulas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from superstep.cost.closed.block import E, LayerSeconds, block_seconds
from superstep.cost.closed.estimate import embedding_s, head_s, update_traffic_bytes
from superstep.cost.closed.parallel_degrees import Layout
from superstep.cost.program.buffers import has_fused_loss, share_numel
from superstep.cost.program.flops import UnitParameters
from superstep.cost.program.memory.activations import unit_bytes
from superstep.cost.program.time.instruction_seconds import CollectiveRanks
from superstep.cost.program.time.simulate import UnitSeconds
from superstep.hardware.cluster import Collective
from superstep.hardware.collectives import RankGroup, all_reduce_s, gather_s, send_s
from superstep.hardware.units import Array
from superstep.plan.config import Place
from superstep.plan.resolution.resolve import Resolved
from superstep.planner.price import Pricing
from superstep.program.peak_memory import UnitBytes

KINDS = ("compute", "again", "tensor", "context", "experts")
"""The parts of a pass's seconds."""
NOTHING = UnitSeconds(forward_s=0.0, backward_s=0.0)


@dataclass(frozen=True, slots=True)
class ClosedFormSource:
    """``InstructionPrices`` for one plan, from the constants of a catalogue. ``kinds``: for each of KINDS, the part of
    every unit's passes.
    """

    run: Resolved
    layout: Layout
    pricing: Pricing
    kinds: Mapping[str, tuple[UnitSeconds, ...]]

    @property
    def parameter_bytes(self) -> float:
        """Computing is in bf16."""
        return E

    @property
    def gradient_bytes(self) -> float:
        """As the software sums them."""
        return float(self.pricing.stack.gradient_bytes)

    def passes(self, unit: int) -> UnitSeconds:
        parts = [self.kinds[kind][unit] for kind in KINDS]
        return UnitSeconds(
            **{each.name: sum(getattr(part, each.name) for part in parts) for each in fields(UnitSeconds)}
        )

    def boundary_bytes(self, unit: int) -> float:
        """The residual stream between two blocks, as tensor parallelism cuts it."""
        plan, config = self.run.plan, self.run.config
        tokens = plan.microbatch * config.data.sequence_tokens / plan.mesh.cp
        return E * tokens * self.run.shape.width / (plan.mesh.tp if plan.sequence_parallel else 1)

    def collective_s(self, collective: Collective, size: float, over: CollectiveRanks) -> float:
        """By the closed form of a group with its stride; raises AssertionError for a collective that no program has."""
        if over.count == 1 or not size:
            return 0.0
        links, group = (
            self.pricing.rates.links,
            RankGroup(np.asarray(float(over.count)), np.asarray(float(over.stride))),
        )
        match collective:
            case "all-gather" | "reduce-scatter":
                return _number(gather_s(np.asarray(size), group, links))
            case "all-reduce":
                return _number(all_reduce_s(np.asarray(size), group, links))
            case "send":
                return _number(send_s(np.asarray(size), group.stride, links))
            case _:
                raise AssertionError(f"{collective} lies within a unit")

    def list_sizes(self) -> Sequence[UnitBytes]:
        return unit_bytes(self.run)

    def move_s(self, place: Place, size: float, *, is_out: bool) -> float:
        """Raises AssertionError: the search keeps activations on the device."""
        raise AssertionError(f"no plan of a search moves activations to the {place}")

    def settle_s(self, size: float) -> float:
        """Two reads and a write."""
        return 3 * size / float(self.pricing.rates.memory_bytes_per_s)

    def update_s(self, units: Sequence[UnitParameters]) -> float:
        """The update of the rank's share."""
        share = sum(share_numel(self.run, unit) for unit in units)
        return (
            update_traffic_bytes(self.run.config.train.optimizer) * share / float(self.pricing.rates.memory_bytes_per_s)
        )


def catalogue_seconds(run: Resolved, layout: Layout, pricing: Pricing) -> ClosedFormSource:
    """The seconds of a run's units on the chips of ``pricing``."""
    is_mixture = run.shape.moe is not None
    block = _block(run, block_seconds(pricing.model, layout, pricing.rates, pricing.stack, is_mixture=is_mixture))
    first, last = _embedding(layout, pricing), _head(run, layout, pricing)
    return ClosedFormSource(
        run,
        layout,
        pricing,
        {
            kind: (first if is_compute else NOTHING, *[block[kind]] * run.shape.layers, last if is_compute else NOTHING)
            for kind in KINDS
            for is_compute in [kind == "compute"]
        },
    )


def _block(run: Resolved, block: LayerSeconds) -> dict[str, UnitSeconds]:
    forward, again = _number(block.forward_s), _number(block.attention_s)
    tensor, context, experts = map(_number, (block.tensor_s, block.context_s, block.experts_s))
    is_selective = run.plan.recompute == "selective"
    return {
        "compute": UnitSeconds(
            forward_s=forward, backward_s=_number(block.backward_s), weight_s=_number(block.weight_s)
        ),
        "again": UnitSeconds(
            forward_s=0.0, backward_s=again if is_selective else 0.0, again_s=again, recompute_s=forward
        ),
        "tensor": UnitSeconds(forward_s=tensor, backward_s=tensor, recompute_s=tensor),
        "context": UnitSeconds(forward_s=context, backward_s=2 * context, recompute_s=context),
        "experts": UnitSeconds(forward_s=experts, backward_s=experts, recompute_s=experts),
    }


def _embedding(layout: Layout, pricing: Pricing) -> UnitSeconds:
    seconds = _number(embedding_s(pricing.model, layout, pricing.rates))
    return UnitSeconds(forward_s=seconds / 3, backward_s=seconds * 2 / 3, weight_s=seconds * 2 / 3)


def _head(run: Resolved, layout: Layout, pricing: Pricing) -> UnitSeconds:
    whole = _number(head_s(pricing.model, layout, pricing.rates, pricing.stack))
    if has_fused_loss(run):
        # The gradient is made in the forward pass.
        return UnitSeconds(forward_s=whole, backward_s=0.0)
    return UnitSeconds(forward_s=whole / 3, backward_s=whole * 2 / 3, weight_s=whole / 3)


def _number(value: Array) -> float:
    return float(np.asarray(value).reshape(-1)[0])
