"""The engine's view of a model: a list of units, and for each parameter its name, axes and initial values.

A unit is the piece that a pipeline stage holds whole and that ZeRO-3 fetches whole: the embedding, one block, the head.
Its module takes what the unit before returns, or the outputs and fields that ``inputs`` names, and returns one tensor.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from superstep.kernels.packed.pack import pack
from superstep.model.by_place.batch_norm import freeze_statistics
from superstep.model.by_place.dropout import compute_by_place, run_with_noise
from superstep.model.decoder import flash
from superstep.numerics.noise import EVALUATION, SamplePlace
from superstep.plan.block_weights import BlockFormat
from superstep.plan.model.outline import Factor, Outline
from superstep.plan.model.shape import ModelShape

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""An output and the targets to the sum of the loss over counted targets."""


@dataclass(frozen=True, slots=True)
class WeightedLosses:
    """Several losses of one output: their sum, each times its weight.

    Attributes:
        losses: by name.
        weights: by name; 1 where it is left out.
    """

    losses: Mapping[str, Loss]
    weights: Mapping[str, float] = field(default_factory=dict)

    def __call__(self, out: Tensor, targets: Tensor) -> Tensor:
        parts = [loss(out, targets) * self.weights.get(name, 1.0) for name, loss in self.losses.items()]
        return functools.reduce(torch.add, parts)


@dataclass(frozen=True, slots=True)
class PackedPart:
    """The blocks of a matrix, or their scales, as a parameter of bytes.

    Attributes:
        matrix: the name of the matrix.
        shape: of it.
        block_format: of its blocks.
        is_scales: whether these are the scales.
    """

    matrix: str
    shape: tuple[int, int]
    block_format: BlockFormat
    is_scales: bool

    def pack(self, matrix: Tensor) -> Tensor:
        """The bytes of the matrix."""
        return pack(matrix, self.block_format)[self.is_scales]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec:
    """One parameter of a unit."""

    name: str
    """The global tensor's Hugging Face name, e.g. ``model.layers.3.self_attn.q_proj.weight``. Two units that name the
    same tensor share it: they are tied.
    """
    axes: tuple[str | None, ...]
    """A logical axis for each dim, e.g. ``("heads", "embed")``; None for a dim without one."""
    std: float | None
    """Initial values are normal(0, std); None means ones, 0 zeros."""
    values: Tensor | None = field(default=None, compare=False)
    """Given initial values: the same on every rank."""
    bound: float | None = None
    """If set, initial values are uniform between -bound and bound, instead of ``std``."""
    factor: Factor | None = None
    """The factor of an adapter; None for the model's own parameter."""
    is_statistic: bool = False
    """Whether it is a running statistic: its update adds its gradient, and nothing else."""
    is_sparse: bool = False
    """Whether it is the table of an ``nn.Embedding`` with ``sparse=True``: only the rows that a step touches have a
    gradient.
    """
    is_frozen: bool = False
    """Whether it is not trained; the run's configuration sets it too."""
    sign_step: float | None = None
    """Of a statistic: its update adds its gradient's sign times this, instead."""
    stack: tuple[str, ...] = ()
    """Names of the global tensors of one shape along the first dim, such as those of experts; ``name`` is unused then.
    """
    sections: tuple[int, ...] = ()
    """Rows of each part of the first dim that is cut on its own, such as those of queries, keys and values; () for one.
    """
    packed: PackedPart | None = None
    """Of bytes of a frozen matrix in blocks: which; None for numbers."""

    @property
    def each(self) -> tuple[ParamSpec, ...]:
        """One spec for each global tensor: itself, or those of its stack."""
        return tuple(replace(self, name=name, axes=self.axes[1:], stack=()) for name in self.stack) or (self,)

    def views(self, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The global tensors of a whole parameter, by name, as views."""
        return zip(self.stack, whole, strict=True) if self.stack else iter([(self.name, whole)])


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSpec:
    """One unit of a model: its constructor and its parameters."""

    name: str
    """``embed``, ``block.0``, ..., ``head``: also the place of the unit's module inside the whole decoder."""
    build: Callable[[], nn.Module]
    """Makes the module, on the device of the surrounding ``with torch.device(...)``."""
    params: Mapping[str, ParamSpec]
    """The spec of each parameter of the module, by its name there."""
    inputs: tuple[str, ...] = ()
    """Names of units before it, and of fields of the batch: the arguments of forward, in this order. If empty, forward
    takes the output of the unit before; that of the first unit takes the input of the batch.
    """
    takes: tuple[str, ...] = ()
    """Keyword arguments of the module's forward that the engine passes: ``attend``, ``positions``, ``scan``, ``noise``,
    ``numbers``.
    """
    loss: Loss | None = None
    """Of the last unit: its output and the targets to the sum of the loss over counted targets; None means the cross
    entropy of logits [..., V] and class numbers [...].
    """
    losses: Mapping[str, Loss] = field(default_factory=dict)
    """Of the last unit, where a step has several phases: the loss of each by its name, in their order."""
    phase: str = ""
    """The phase in which the unit is trained, of a step of several."""
    is_encoder: bool = False
    """Whether it is part of an encoder, which ``plan.encoder`` places."""
    phase_inputs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Of the last unit: its ``inputs`` in some phases. What does not lead to them is not computed there."""
    decoder: ModelShape | None = None
    """The decoder that the unit is part of, if it is one of ours behind encoders: its layers are known."""


INPUT = "the batch's input"
"""The field of a first unit that names none."""

Source: TypeAlias = int | str
"""An argument of a unit: the number of a value (what unit ``v - 1`` returns), or the name of a field of the batch."""

Fields: TypeAlias = Mapping[str, Tensor]
"""A batch by field; ``INPUT`` is the one that a first unit without ``inputs`` takes."""


def list_phases(specs: Sequence[UnitSpec]) -> tuple[str, ...]:
    """The names of the phases of a step, in their order; () for a step of one."""
    return tuple(specs[-1].losses)


def in_phase(specs: Sequence[UnitSpec], phase: str) -> tuple[UnitSpec, ...]:
    """The units with the loss of one phase."""
    *others, last = specs
    inputs = last.phase_inputs.get(phase, last.inputs)
    return (*others, replace(last, loss=last.losses[phase], losses={}, inputs=inputs, phase_inputs={}))


def list_losses(specs: Sequence[UnitSpec]) -> tuple[str, ...]:
    """The names of the losses that have weights, over all phases."""
    last = specs[-1]
    several = [loss for loss in (last.loss, *last.losses.values()) if isinstance(loss, WeightedLosses)]
    return tuple(name for each in several for name in each.losses)


def weigh_losses(specs: Sequence[UnitSpec], weights: Mapping[str, float]) -> tuple[UnitSpec, ...]:
    """The units with weights of their losses, by name."""

    def weigh(loss: Loss) -> Loss:
        return replace(loss, weights=weights) if isinstance(loss, WeightedLosses) else loss

    *others, last = specs
    losses = {phase: weigh(loss) for phase, loss in last.losses.items()}
    return (*others, replace(last, loss=None if last.loss is None else weigh(last.loss), losses=losses))


def mark_frozen(specs: Sequence[UnitSpec], outline: Outline) -> tuple[UnitSpec, ...]:
    """The units with the parameters frozen that are frozen in their outline."""
    frozen = {p.name for unit in outline.units for p in unit.parameters if p.is_frozen}
    return tuple(
        replace(
            spec,
            params={
                local: replace(param, is_frozen=True) if param.name in frozen else param
                for local, param in spec.params.items()
            },
        )
        for spec in specs
    )


def step_of_statistic(spec: ParamSpec, gradient: Tensor) -> Tensor:
    """What a step adds to a running statistic."""
    return gradient if spec.sign_step is None else gradient.sign() * spec.sign_step


def name_fields(x: Tensor | Fields) -> Fields:
    """The fields of a batch, of which a tensor alone is the input."""
    return {INPUT: x} if isinstance(x, Tensor) else x


def list_sources(units: Sequence[UnitSpec]) -> tuple[tuple[Source, ...], ...]:
    """The arguments of each unit."""
    values = {unit.name: number + 1 for number, unit in enumerate(units)}
    return tuple(
        tuple(values.get(name, name) for name in unit.inputs) or ((number,) if number else (INPUT,))
        for number, unit in enumerate(units)
    )


def takes_only_fields(sources: Sequence[Source]) -> bool:
    """Whether a unit takes no value: its arguments are whole on every rank, and need no gradient."""
    return all(isinstance(of, str) for of in sources)


def start_graph(
    taken: Sequence[Tensor],
    sources: Sequence[Source],
    *,
    has_parameters: bool,
    gradient_values: Collection[int] | None = None,
) -> list[Tensor]:
    """A unit's arguments as the leaves of its graph. A value gets a gradient; a field only where the unit has nothing
    else for a graph.

    Args:
        taken: the arguments.
        sources: of them.
        has_parameters: whether the unit has any.
        gradient_values: the values with a gradient; None means all.
    """
    is_rooted = has_parameters or not takes_only_fields(sources)

    def has_gradient(of: Source) -> bool:
        if isinstance(of, str):
            return not is_rooted
        return gradient_values is None or of in gradient_values

    return [
        x.detach().requires_grad_(x.is_floating_point() and has_gradient(of))
        for x, of in zip(taken, sources, strict=True)
    ]


GIVEN: Mapping[str, Any] = {"attend": flash, "positions": None, "scan": None, "noise": None, "numbers": None}
"""Keyword arguments of a unit on one device. Each forward has a ``numerics.noise.Noise`` of its own."""


def initial(spec: ParamSpec, shape: Sequence[int], seed: int) -> Tensor:
    """The initial values of the whole global tensor, fp32 on the CPU; of a matrix in blocks their bytes.

    They are a function of the seed and the global name alone, so every layout starts with the same bits: a rank draws
    the whole tensor and keeps its slice. Each tensor of a stack is drawn by its own name. Given values are used for any
    seed.
    """
    if spec.packed is not None:
        matrix = replace(spec, name=spec.packed.matrix, packed=None)
        return spec.packed.pack(initial(matrix, spec.packed.shape, seed))
    if spec.values is not None:
        return spec.values.detach().to("cpu", torch.float32)
    if spec.stack:
        return torch.stack([initial(one, shape[1:], seed) for one in spec.each])
    if spec.std is None and spec.bound is None:
        return torch.ones(tuple(shape), dtype=torch.float32, device="cpu")
    digest = hashlib.blake2b(f"{seed}:{spec.name}".encode(), digest_size=8).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest, "little", signed=True))
    values = torch.empty(tuple(shape), dtype=torch.float32, device="cpu")
    if spec.bound is not None:
        return values.uniform_(-spec.bound, spec.bound, generator=generator)
    assert spec.std is not None
    return values.normal_(0.0, spec.std, generator=generator)


def parameters(whole: nn.Module, units: Iterable[UnitSpec]) -> dict[str, tuple[ParamSpec, nn.Parameter]]:
    """The parameters of a whole model, which holds each unit under its name; a tied one once."""
    return {
        spec.name: (spec, whole.get_parameter(f"{unit.name}.{local}"))
        for unit in units
        for local, spec in unit.params.items()
    }


def global_tensors(whole: nn.Module, units: Iterable[UnitSpec]) -> dict[str, Tensor]:
    """The global tensors of a whole model by their names: its parameters, or views of them."""
    return {name: view for spec, param in parameters(whole, units).values() for name, view in spec.views(param)}


def global_specs(units: Iterable[UnitSpec]) -> dict[str, ParamSpec]:
    """The spec of each global tensor, by its name."""
    return {one.name: one for unit in units for spec in unit.params.values() for one in spec.each}


class UnitGraph(nn.Module):
    """Units, each after those whose outputs it takes: a whole model on one device, with shared parameters.

    ``parts`` holds the parameters by their global names, with the initial values of ``seed``.
    """

    def __init__(self, units: Sequence[UnitSpec], seed: int) -> None:
        super().__init__()
        self.units = nn.ModuleList(unit.build() for unit in units)
        phases = {"": list(units)} | {phase: in_phase(units, phase) for phase in list_phases(units)}
        self.sources = {phase: list_sources(its_units) for phase, its_units in phases.items()}
        self.noises = [(f"{unit.name}.", compute_by_place(part)) for unit, part in zip(units, self.units, strict=True)]
        self.given = [{name: GIVEN[name] for name in unit.takes} for unit in units]
        self.parts: dict[str, tuple[ParamSpec, nn.Parameter]] = {}
        for unit, module in zip(units, self.units, strict=True):
            freeze_statistics(module, [local for local, spec in unit.params.items() if spec.is_frozen])
            for local, spec in unit.params.items():
                path, _, leaf = local.rpartition(".")
                _, param = self.parts.setdefault(spec.name, (spec, module.get_parameter(local)))
                param.requires_grad_(not spec.is_frozen)
                setattr(module.get_submodule(path), leaf, param)
                with torch.no_grad():
                    param.copy_(initial(spec, param.shape, seed))

    def forward(
        self,
        x: Tensor | Fields,
        *,
        place: SamplePlace = EVALUATION,
        phase: str = "",
        **others: Any,  # noqa: ANN401
    ) -> Tensor:
        """The output of the last unit, for the input of the batch or for all its fields.

        Args:
            x: the input, or each field by name.
            place: of the rows' random numbers.
            phase: of a step of several, whose last unit may have inputs of its own.
            others: keyword arguments of units, instead of those of ``GIVEN``.
        """
        fields = name_fields(x)
        values: list[Tensor] = []
        parts = zip(self.units, self.sources[phase], self.given, self.noises, strict=True)
        for module, sources, given, (prefix, current) in parts:
            taken = [fields[of] if isinstance(of, str) else values[of - 1] for of in sources]
            here = given | {name: value for name, value in others.items() if name in given}
            values.append(run_with_noise(module, current, taken, here, place, prefix))
        return values[-1]
