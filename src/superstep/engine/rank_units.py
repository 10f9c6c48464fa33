"""RankUnits: one rank's units, as the executor runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from superstep.comm.mesh import Mesh
from superstep.engine.activations.offloader import Cache as Cache
from superstep.engine.attention.choose_attention import SequenceView
from superstep.engine.build_modules import Compute, Loss
from superstep.engine.flat.buffers import UnitBuffers
from superstep.engine.layers.grad_accumulation import Adder, GradientSums
from superstep.engine.layers.implementation import Choice, names_of
from superstep.engine.step_context import StepContext
from superstep.model.custom.inspect import UnitOutput
from superstep.model.unit import Source
from superstep.numerics.fixed_point import RangeExcess
from superstep.numerics.noise import SamplePlace


@dataclass(frozen=True, kw_only=True)
class RankUnits:
    """One rank's units for the executor.

    Attributes:
        mesh: place and groups.
        buffers: of every unit this rank holds, one for each family of its parameters.
        trained: buffers with gradients.
        sources: the arguments of each unit.
        compute: unit number to its module, for the units this rank computes.
        chosen: implementations of their layers.
        parameters: of each of these modules, with the function that adds to the gradient of each.
        sums: of their layers, for additions to gradient buffers.
        selective: modules that keep less for the backward pass.
        caches: filled with what these keep.
        loss: of the last unit's output; only its holder uses it.
        loss_dtype: of its result.
        fields: shape and dtype of each field of the batch.
        boundaries: shape and dtype of the input, and of what each unit returns.
        begin: called with the number of a microbatch before any computation with it.
        excess: overflows of exact sums.
        sight: attention and positions of a microbatch, by its document starts.
        place: gives the place of the random numbers of a microbatch, by its number.
    """

    mesh: Mesh
    buffers: Mapping[int, tuple[UnitBuffers, ...]]
    trained: Mapping[int, tuple[UnitBuffers, ...]]
    sources: Sequence[Sequence[Source]]
    compute: Mapping[int, Compute]
    chosen: Mapping[int, tuple[Choice, ...]]
    parameters: Mapping[int, Sequence[tuple[nn.Parameter, Adder]]]
    sums: GradientSums
    selective: Mapping[int, Compute]
    caches: list[Cache]
    loss: Loss
    loss_dtype: torch.dtype
    fields: Mapping[str, UnitOutput]
    boundaries: Sequence[UnitOutput]
    begin: Callable[[StepContext, int], None]
    excess: RangeExcess
    sight: Callable[[Tensor | None], SequenceView]
    place: Callable[[StepContext, int], SamplePlace]

    @property
    def layers(self) -> str:
        """Implementations of the layers, on one line."""
        return names_of(choice for chosen in self.chosen.values() for choice in chosen)

    def list_fixed(self) -> Iterator[Tensor]:
        """Parameters, and their gradients."""
        for buffers in self.buffers.values():
            for each in buffers:
                yield from (each.full, each.gradient, *each.params.values())
