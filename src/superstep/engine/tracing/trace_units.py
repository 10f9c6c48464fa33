"""Operations of every unit of a run, traced from its own modules on fake tensors.

The modules are those that a rank would build, cut and changed by the plan; tensors have shapes and no memory, and
process groups send nothing. So operations, their sizes, and activations kept for the backward pass are not estimated
but observed, for our decoder as for any model. Where sizes depend on data, such as rows of experts, every expert gets
its even share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.testing._internal.distributed.fake_pg import FakeStore

from superstep.comm.backend import GLOO
from superstep.comm.device import Device
from superstep.comm.mesh import Group, Mesh, ParameterReplicas
from superstep.cost.program.gradient_flow import flow_of
from superstep.cost.program.time.operation import Axis, UnitOperations
from superstep.engine.build import assemble
from superstep.engine.flat.buffers import UnitBuffers, buffer_dtype
from superstep.engine.flat.layout import lay_out
from superstep.engine.layers.grad_accumulation import input_gradients
from superstep.engine.layers.implementation import Choice
from superstep.engine.parallel.expert import ExpertParallel, build_exchange
from superstep.engine.rank_units import RankUnits
from superstep.engine.tracing.operation_trace import OperationRecorder, TracedOperations
from superstep.model.mixture.expert_dispatch import DispatchContext
from superstep.model.unit import UnitSpec, start_graph
from superstep.numerics.dtypes import DTYPES
from superstep.numerics.noise import SamplePlace
from superstep.numerics.objective import LossTarget
from superstep.plan.mesh import Coordinate
from superstep.plan.resolution.resolve import Resolved

FIRST = Coordinate(pp=0, dp=0, cp=0, tp=0)


def operations_of(run: Resolved, specs: Sequence[UnitSpec]) -> tuple[UnitOperations, ...]:
    """Every unit's operations on one microbatch, on the first rank, in model order.

    Blocks of our own decoder are alike but for the rule of their attention, so one of each rule is traced. Exact mode
    is traced as fast mode: its sums need values, which do not exist here. No process group may exist yet.
    """
    # A compiler's changes to a unit are not traced either: its operations are those of eager mode.
    numerics = replace(run.config.numerics, compile=False)
    if run.decoder is None and run.config.plan.device == "cuda" and numerics.kernels == "auto":
        numerics = replace(numerics, kernels="torch")  # those of a GPU keep more than a CPU's own
    config = replace(run.config, numerics=numerics)
    run = replace(run, plan=replace(run.plan, grain=None), config=config)
    last, units = len(specs) - 1, _speaking(run, specs)
    with _alone(run, Device("cpu")) as mesh, FakeTensorMode(allow_non_fake_inputs=True):
        machine, exchange = _machine(run, specs, mesh, units)
        recorder = OperationRecorder(_axes(mesh))
        exchange.now = DispatchContext(sequences=tuple(range(run.plan.microbatch)), step=0)
        traced = {unit: _Unit(run, machine, exchange, unit, recorder).operations() for unit in units}
    return tuple(traced[_alike(run, unit, last)] for unit in range(last + 1))


def layers_of(run: Resolved, specs: Sequence[UnitSpec], device: Device) -> dict[int, tuple[Choice, ...]]:
    """The implementations of each unit's layers, on the first rank; of our own decoder's blocks, those of the first. No
    process group may exist yet.
    """
    with _alone(run, device) as mesh, FakeTensorMode(allow_non_fake_inputs=True):
        machine, _ = _machine(run, specs, mesh, _speaking(run, specs))
    return dict(machine.chosen)


def _speaking(run: Resolved, specs: Sequence[UnitSpec]) -> Sequence[int]:
    """The traced units: of our own decoder embedding, the first block of each kind and head."""
    last = len(specs) - 1
    return sorted({_alike(run, unit, last) for unit in range(last + 1)})


def _alike(run: Resolved, unit: int, last: int) -> int:
    """The first unit with the same operations."""
    if run.decoder is None or unit in (0, last):
        return unit
    kinds = [(run.decoder.mixer(layer), flow_of(run, layer + 1)) for layer in range(unit)]
    return 1 + kinds.index(kinds[-1])


@contextmanager
def _alone(run: Resolved, device: Device) -> Iterator[Mesh]:
    """The mesh of the first rank, with only the groups that a unit uses; they send nothing."""
    shape, has_experts = run.plan.mesh, "experts" in run.plan.families
    sequence = shape.cp * shape.tp
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=max(shape.world, 1))
    try:

        def group(size: int) -> Group | None:
            return dist.new_group(list(range(size))) if size > 1 else None

        yield Mesh(
            shape=shape,
            rank=0,
            at=FIRST,
            device=device,
            transport=GLOO,
            world=None,
            sharers={f: _sharers(shape.shards(f)) for f in run.plan.families},
            cp=group(shape.cp),
            tp=group(shape.tp),
            ep=group(shape.ep) if has_experts else None,
            sequence=group(sequence) if has_experts else None,
            pp=None,
            channels={},
            ties={},
        )
    finally:
        dist.destroy_process_group()


def _sharers(shards: int) -> ParameterReplicas:
    return ParameterReplicas(shards=shards, shard=0, replica=0, fetch=None, reduce=None, replicas=None)


def _axes(mesh: Mesh) -> dict[str, Axis]:
    """The axis of each group, by its name."""
    named: tuple[tuple[Group | None, Axis], ...] = (
        (mesh.cp, "cp"),
        (mesh.tp, "tp"),
        (mesh.ep, "ep"),
        (mesh.sequence, "sequence"),
    )
    return {group.group_name: axis for group, axis in named if group is not None}


def _machine(
    run: Resolved, specs: Sequence[UnitSpec], mesh: Mesh, traced_units: Sequence[int]
) -> tuple[RankUnits, ExpertParallel]:
    """The executor's units, with the traced ones on one pipeline rank."""
    plan = run.plan
    stages = tuple(tuple(unit for unit in units if unit in traced_units) for units in plan.stages)
    alone = replace(plan, stages=stages, placement=(0,) * len(stages), encoder="front")
    layouts = lay_out(
        tuple(specs),
        plan.mesh,
        FIRST,
        plan.rules,
        sequence_parallel=plan.sequence_parallel,
        padding=plan.padding,
        is_exact=plan.grain is not None,
    )
    needed = sorted({owner for unit in traced_units for owner in plan.params[unit]})
    buffers = {
        unit: tuple(
            UnitBuffers(
                layout,
                zero=0,
                shards=1,
                place=0,
                compute=buffer_dtype(layout.family, DTYPES[run.config.numerics.compute]),
                device=mesh.device,
                seed=0,
                moments=(),
                is_exact=plan.grain is not None,
                is_frozen=not plan.trains(layout.family),
            )
            for layout in layouts[unit]
        )
        for unit in needed
    }
    exchange = build_exchange(run, mesh)
    machine = assemble(replace(run, plan=alone), specs, mesh, buffers, exchange, lambda *_: None, None)
    return machine, exchange


def _targets(run: Resolved, machine: RankUnits) -> Tensor:
    """The targets of a microbatch on a rank."""
    rows = run.plan.microbatch
    if run.samples is not None:
        places, *dims = run.samples.target.dims or (1,)
        shape = (places // run.plan.mesh.cp, *dims) if run.samples.target.dims else ()
        return torch.zeros(rows, *shape, dtype=getattr(torch, run.samples.target.dtype))
    tokens = machine.boundaries[0].shape[1] if run.plan.mesh.cp > 1 else run.config.data.sequence_tokens
    losses = 1 if run.plan.mtp_weight is None else 2
    return torch.zeros(losses * rows, tokens, dtype=torch.long)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Passed:
    """One forward pass: inputs, output without its graph, its operations and its kept memory."""

    inputs: Sequence[Tensor]
    y: Tensor
    noted: TracedOperations
    input_bytes: int


class _Unit:
    """One unit's passes."""

    def __init__(
        self, run: Resolved, machine: RankUnits, exchange: ExpertParallel, unit: int, recorder: OperationRecorder
    ) -> None:
        self._run, self._machine, self._exchange = run, machine, exchange
        self._unit, self._recorder = unit, recorder
        is_selective = run.plan.recompute == "selective" and run.plan.recomputed[unit]
        self._compute = (machine.selective if is_selective else machine.compute)[unit]
        self._targets = _targets(run, machine)
        self._gradient_values = [number + 1 for number, is_back in enumerate(run.plan.has_backward) if is_back]
        # One document fills the sequence: other documents are not known yet, and would reduce the work.
        starts = torch.zeros(run.plan.microbatch, run.targets_of_row, dtype=torch.long) if run.has_documents else None
        self._sight = replace(machine.sight(starts), place=SamplePlace(is_training=True))

    def operations(self) -> UnitOperations:
        """Operations of all passes."""
        self._forward()  # makes the rotary tables, which stay
        once, end = self._forward()
        kept_bytes = once.input_bytes + once.noted.alive_bytes(but=self._own(once))
        gradient = torch.ones_like(once.y)
        if end is None:
            return UnitOperations(
                forward=once.noted.operations,
                backward=(),
                weight=(),
                input_bytes=once.input_bytes,
                kept_bytes=once.input_bytes,
                peak_bytes=once.noted.peak_bytes,
                output_bytes=once.y.nbytes,
            )
        with self._recorder.noting(beside=once.noted) as backward:
            torch.autograd.backward(end, gradient)
        input_gradients_bytes = sum(x.grad.nbytes for x in once.inputs if x.grad is not None)
        # The backward in two parts: first the input's gradient, then the weights'.
        again, end = self._forward()
        assert end is not None
        parameters, sums = self._machine.parameters[self._unit], self._machine.sums
        with self._recorder.noting() as halfway:
            input_grads, later = input_gradients(again.inputs, end, gradient, parameters, sums)
        del end
        gone = [*self._own(again), *input_grads]
        between_bytes = again.noted.alive_bytes(but=gone) + halfway.alive_bytes(but=gone)
        with self._recorder.noting() as weight, torch.no_grad():
            for add in later:
                add()
        return UnitOperations(
            forward=once.noted.operations,
            backward=backward.operations,
            weight=weight.operations,
            input_bytes=once.input_bytes,
            kept_bytes=kept_bytes,
            peak_bytes=once.noted.peak_bytes,
            between_bytes=between_bytes,
            backward_peak_bytes=max(0, backward.peak_bytes - input_gradients_bytes),
            output_bytes=once.y.nbytes,
        )

    def _forward(self) -> tuple[_Passed, GradientEdge | None]:
        """A forward pass, and the end of its graph; a frozen first unit has none."""
        machine, sources = self._machine, self._machine.sources[self._unit]
        examples = [machine.fields[of] if isinstance(of, str) else machine.boundaries[of] for of in sources]
        taken = [torch.zeros(each.shape, dtype=each.dtype) for each in examples]
        inputs = start_graph(
            taken,
            sources,
            has_parameters=bool(machine.buffers[self._unit]),
            gradient_values=self._gradient_values,
        )
        with self._recorder.noting() as noted:
            y = self._compute(inputs, self._sight)
            if self._unit == len(self._run.plan.units) - 1:
                y = self._machine.loss(y, LossTarget(self._targets), 1.0)
        self._exchange.take_counts()  # drops the counts
        # A sample's fields are views of the batch, which is counted once.
        own = [x for x, of in zip(inputs, sources, strict=True) if self._run.samples is None or isinstance(of, int)]
        passed = _Passed(inputs=inputs, y=y.detach(), noted=noted, input_bytes=sum(x.nbytes for x in own))
        return passed, get_gradient_edge(y) if y.requires_grad else None

    def _own(self, passed: _Passed) -> list[Tensor]:
        """Tensors that exist anyway, and are accounted for elsewhere."""
        buffers = [b for each in self._machine.buffers.values() for b in each]
        return [*passed.inputs, passed.y, self._targets, *(t for b in buffers for t in (b.full, b.gradient))]
