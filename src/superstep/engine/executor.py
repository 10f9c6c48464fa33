"""The executor: a program's instructions, interpreted on one rank.

Each unit is an autograd graph of its own: it starts at a detached input and ends at its output, so that a unit's
gradients are final after its backward and can be reduced at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from superstep.comm.collectives import DONE, PendingCollective, receive, send, together
from superstep.engine.activations.offloader import Offloader
from superstep.engine.attention.choose_attention import SequenceView
from superstep.engine.flat.sync import fetch, reduce, reduce_partial, reduce_replicas, tie
from superstep.engine.layers.grad_accumulation import Sum, input_gradients
from superstep.engine.rank_units import RankUnits
from superstep.engine.step_context import StepContext, StepResult
from superstep.engine.values.unit_values import Key, UnitValues
from superstep.model.unit import INPUT, start_graph
from superstep.monitor.status_page import HeartbeatReceiver, NoHeartbeats
from superstep.program import instructions as ins
from superstep.program.instructions import Instruction, Program, Wire
from superstep.program.needed_values import NeededValues, Value
from superstep.program.received import find_received_values


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of a program's run.

    Attributes:
        loss: summed over this rank's tokens, fp64; zero on ranks without the head.
        step: of the program's ``Step``, if it has one.
    """

    loss: Tensor
    step: StepResult | None


@dataclass
class _Flight:
    """The state of one run of a program."""

    context: StepContext
    sights: Sequence[SequenceView]
    values: UnitValues
    loss: Tensor
    step: StepResult | None = None
    kept: dict[Key, tuple[list[Tensor], GradientEdge | None]] = field(default_factory=dict)
    put_off: dict[Key, list[Sum]] = field(default_factory=dict)
    arriving: dict[Value, PendingCollective] = field(default_factory=dict)
    fetching: dict[int, PendingCollective] = field(default_factory=dict)
    reducing: dict[int, PendingCollective] = field(default_factory=dict)
    leaving: dict[Value, tuple[PendingCollective, Tensor]] = field(default_factory=dict)
    copying: dict[int, PendingCollective] = field(default_factory=dict)
    moving: PendingCollective = DONE


class Executor:
    """Runs programs on one rank.

    Args:
        machine: the rank's units.
        step: the optimizer's update, called by the Step instruction with the loss so far.
        snapshot: starts copying the state of a unit, where a snapshot is due.
        offloader: moves what units keep.
        heart: receives the progress.
    """

    _flight: _Flight
    """The current run; set only within ``run``."""

    def __init__(
        self,
        machine: RankUnits,
        step: Callable[[StepContext, Tensor], StepResult],
        snapshot: Callable[[int], PendingCollective] = lambda _: DONE,
        heart: HeartbeatReceiver | None = None,
        offloader: Offloader | None = None,
    ) -> None:
        self._machine = machine
        self._heart = heart or NoHeartbeats()
        self._step = step
        self._snapshot = snapshot
        self._offloader = offloader or Offloader({}, machine.caches, machine.mesh.device.torch)
        self._program: Program | None = None
        self._needed: Callable[[Instruction], Sequence[Value]] = lambda _: ()
        self._received: Mapping[int, Sequence[Value]] = {}
        self._uses: Sequence[Mapping[int, int]] = ()
        self._gradient_values: frozenset[int] = frozenset()
        self._one = torch.ones((), dtype=machine.loss_dtype, device=machine.mesh.device.torch)

    def run(self, context: StepContext) -> RunResult:
        """Interpret this rank's list."""
        device = self._machine.mesh.device.torch
        program, place = context.program, self._machine.mesh.at.pp
        if program is not self._program:
            self._program, self._needed = program, NeededValues(program)
            self._gradient_values = program.gradient_values
            self._received, self._uses = find_received_values(program, place), program.count_uses(place)
        flight = self._flight = _Flight(
            context,
            [
                replace(
                    self._machine.sight(microbatch.starts),
                    place=self._machine.place(context, m),
                    numbers=microbatch.numbers,
                )
                for m, microbatch in enumerate(context.microbatches)
            ],
            UnitValues(self._uses),
            # fp64 whatever the unit's own dtype: there may be many microbatches.
            torch.zeros((), dtype=torch.float64, device=device),
        )
        instructions = program.ranks[place]
        self._offloader.begin(program, place, self._list_fixed)
        self._heart.begin(instructions, step=context.number)
        try:
            self._follow(instructions)
        finally:
            self._heart.rests()
            del self._flight  # its sights hold tables of positions
        return RunResult(flight.loss, flight.step)

    def _follow(self, instructions: Sequence[Instruction]) -> None:
        record = self._flight.context.record
        for index, instruction in enumerate(instructions):
            self._heart.waits(index)
            self._ready(instruction)
            self._release(self._received.get(index, ()))
            self._offloader.release(index)
            self._heart.works(index)
            if record is not None:
                record.begin()
            self._issue(instruction)
            if record is not None:
                record.end(instruction, self._under_way(instruction))
        self._heart.waits()
        self._release(tuple(self._flight.leaving))

    def _list_fixed(self) -> Iterator[Tensor]:
        """What never moves: parameters, their gradients, and the batch."""
        yield from self._machine.list_fixed()
        for microbatch in self._flight.context.microbatches:
            yield from (*microbatch.fields.values(), microbatch.targets)

    def _release(self, sent: Iterable[Value]) -> None:
        """Free the memory of sent tensors: now, or on a GPU once they are sent. All but the last of a step are."""
        for value in sent:
            pending, _ = self._flight.leaving.pop(value)
            pending.wait()

    def _ready(self, instruction: Instruction) -> None:
        """Wait for an instruction's inputs from other lanes."""
        flight = self._flight
        if isinstance(instruction, ins.Forward | ins.Recompute | ins.Backward | ins.BackwardInput):
            self._await_parameters(instruction.unit)
            if not isinstance(instruction, ins.Forward):
                self._offloader.ready(instruction.unit, instruction.microbatch)
        for value in self._needed(instruction):
            flight.arriving.pop(value, DONE).wait()
        match instruction:
            case ins.Settle(unit):
                flight.reducing.pop(unit).wait()
            case ins.Tie() | ins.ReducePartial() | ins.Step():
                together(list(flight.reducing.values())).wait()
                flight.reducing.clear()
                if isinstance(instruction, ins.Step):
                    together(list(flight.copying.values())).wait()
            case ins.Free(unit):
                flight.fetching.pop(unit, DONE).wait()
            case _:
                pass

    def _issue(self, instruction: Instruction) -> None:  # noqa: C901 - one case for each instruction
        match instruction:
            case ins.Forward(unit, m, keep):
                self._forward(unit, m, keeps_graph=keep in ("all", "selective"), is_selective=keep == "selective")
                if keep == "nothing":
                    del self._flight.kept[unit, m]
            case ins.Recompute(unit, m):
                self._recompute(unit, m)
            case ins.Backward(unit, m):
                self._backward(unit, m)
                self._offloader.finish(unit, m)
            case ins.BackwardInput(unit, m):
                self._backward_input(unit, m)
                self._offloader.finish(unit, m)
            case ins.BackwardWeight(unit, m):
                self._backward_weight(unit, m)
            case ins.Send(wire, unit, m, peer):
                self._send(wire, unit, m, peer)
            case ins.Recv(wire, unit, m, peer):
                self._recv(wire, unit, m, peer)
            case ins.Fetch(unit):
                self._flight.fetching[unit] = fetch(self._machine.buffers[unit], self._machine.mesh, unit)
            case ins.Free(unit):
                for buffers in self._machine.buffers[unit]:
                    buffers.drop_full()
            case ins.Reduce(unit):
                self._flight.reducing[unit] = reduce(self._machine.trained[unit], self._machine.mesh, unit)
            case ins.ReduceReplicas(unit):
                self._flight.reducing[unit] = reduce_replicas(self._machine.trained[unit], self._machine.mesh)
            case ins.Settle(unit):
                for buffers in self._machine.trained[unit]:
                    buffers.settle()
            case ins.Tie(unit):
                tie(self._machine.trained[unit], self._machine.mesh.ties[self._flight.context.program.holders(unit)])
            case ins.ReducePartial():
                assert self._machine.mesh.tp is not None
                reduce_partial((b for unit in self._machine.trained.values() for b in unit), self._machine.mesh.tp)
            case ins.Snapshot(unit):
                self._flight.copying[unit] = self._snapshot(unit)
            case ins.Offload(unit, m):
                self._flight.moving = self._offloader.offload(unit, m)
            case ins.Reload(unit, m):
                self._flight.moving = self._offloader.reload(unit, m)
            case ins.Step():
                self._flight.step = self._step(self._flight.context, self._flight.loss)

    def _under_way(self, instruction: Instruction) -> PendingCollective | None:
        """The collective that the instruction has just started."""
        match instruction:
            case ins.Fetch(unit):
                return self._flight.fetching[unit]
            case ins.Reduce(unit) | ins.ReduceReplicas(unit):
                return self._flight.reducing[unit]
            case ins.Snapshot(unit):
                return self._flight.copying[unit]
            case ins.Offload() | ins.Reload():
                return self._flight.moving
            case ins.Send(wire, unit, m):
                return self._flight.leaving[wire, unit, m][0]
            case ins.Recv(wire, unit, m):
                return self._flight.arriving[wire, unit, m]
            case _:
                return None

    def _forward(self, unit: int, m: int, *, keeps_graph: bool, is_selective: bool) -> None:
        flight = self._flight
        sources = self._machine.sources[unit]
        taken = [self._field(of, m) if isinstance(of, str) else flight.values.use(of, m) for of in sources]
        has_parameters, gradient_values = bool(self._machine.buffers[unit]), self._gradient_values
        inputs = start_graph(taken, sources, has_parameters=has_parameters, gradient_values=gradient_values)
        with self._offloader.collect(unit, m, inputs):
            y = self._compute(unit, m, inputs, keeps_graph=keeps_graph, is_selective=is_selective)
        flight.kept[unit, m] = (inputs, _edge(y) if keeps_graph else None)
        if unit == self._last_unit:
            flight.loss += y.detach()
        else:
            flight.values.hold(unit + 1, m, y.detach())

    def _field(self, name: str, m: int) -> Tensor:
        microbatch = self._flight.context.microbatches[m]
        values = microbatch.input if name == INPUT else microbatch.fields[name]
        return values.to(self._machine.fields[name].dtype)

    def _compute(
        self,
        unit: int,
        m: int,
        inputs: Sequence[Tensor],
        *,
        keeps_graph: bool,
        is_selective: bool,
        is_again: bool = False,
    ) -> Tensor:
        flight, context = self._flight, self._flight.context
        self._machine.begin(context, m)
        module = (self._machine.selective if is_selective else self._machine.compute)[unit]
        with torch.set_grad_enabled(keeps_graph):
            y = module(inputs, flight.sights[m])
            if context.see_output is not None:
                context.see_output(unit, y)
            if unit == self._last_unit:
                aim = context.metrics.aim(context.microbatches[m], m, is_observed=not is_again)
                y = self._machine.loss(y, aim, context.scale)
        return y

    def _recompute(self, unit: int, m: int) -> None:
        inputs, _ = self._flight.kept[unit, m]
        y = self._compute(unit, m, inputs, keeps_graph=True, is_selective=False, is_again=True)
        self._flight.kept[unit, m] = (inputs, _edge(y))

    def _backward(self, unit: int, m: int) -> None:
        self._ready_gradients(unit)
        inputs, edge, gradient = self._going_back(unit, m)
        if edge is not None:
            torch.autograd.backward(edge, gradient)
        for of, x in zip(self._machine.sources[unit], inputs, strict=True):
            if isinstance(of, int) and of in self._gradient_values:
                assert x.grad is not None
                self._flight.values.add_gradient(of, m, x.grad)
                x.grad = None

    def _backward_input(self, unit: int, m: int) -> None:
        inputs, edge, gradient = self._going_back(unit, m)
        self._flight.put_off[unit, m] = []
        if edge is not None:
            parts = self._machine.parameters[unit], self._machine.sums
            gradients, self._flight.put_off[unit, m] = input_gradients(inputs, edge, gradient, *parts)
            values = [of for of in self._machine.sources[unit] if isinstance(of, int) and of in self._gradient_values]
            if values:  # a unit without them may have the gradient of a field, which nobody takes
                for value, input_grad in zip(values, gradients, strict=True):
                    self._flight.values.add_gradient(value, m, input_grad)

    def _backward_weight(self, unit: int, m: int) -> None:
        self._ready_gradients(unit)
        with torch.no_grad():
            for add in self._flight.put_off.pop((unit, m)):
                add()

    def _ready_gradients(self, unit: int) -> None:
        for read in self._flight.context.program.list_trained(unit):
            for buffers in self._machine.trained[read]:
                buffers.ready_gradient()

    def _going_back(self, unit: int, m: int) -> tuple[list[Tensor], GradientEdge | None, Tensor]:
        """The unit's inputs, the end of its graph if anything in it has a gradient, and the gradient there."""
        self._machine.begin(self._flight.context, m)
        inputs, edge = self._flight.kept.pop((unit, m))
        gradient = self._one if unit == self._last_unit else self._flight.values.take_gradient(unit + 1, m)
        return inputs, edge, gradient

    @property
    def _last_unit(self) -> int:
        return len(self._flight.context.program.units) - 1

    def _send(self, wire: Wire, value: int, m: int, peer: int) -> None:
        values = self._flight.values
        tensor = (values.use(value, m) if wire == "act" else values.take_gradient(value, m)).contiguous()
        group, target = self._channel(self._machine.mesh.at.pp, peer, wire, peer)
        self._flight.leaving[wire, value, m] = send(tensor, group, target, self._tag(wire, value, m)), tensor

    def _recv(self, wire: Wire, value: int, m: int, peer: int) -> None:
        passed = self._machine.boundaries[value]
        tensor = torch.empty(passed.shape, dtype=passed.dtype, device=self._machine.mesh.device.torch)
        group, source = self._channel(peer, self._machine.mesh.at.pp, wire, peer)
        self._flight.arriving[wire, value, m] = receive(tensor, group, source, self._tag(wire, value, m))
        arrive = self._flight.values.hold if wire == "act" else self._flight.values.add_gradient
        arrive(value, m, tensor)

    def _channel(self, source: int, target: int, wire: Wire, peer: int) -> tuple[torch.distributed.ProcessGroup, int]:
        """The group of a transfer, and the peer's rank in it."""
        mesh = self._machine.mesh
        group = mesh.channels[source, target, wire] if mesh.transport.has_channels else mesh.pp
        assert group is not None
        # Not its place in the pipeline: a group sorts its ranks, so channels in both directions look alike.
        return group, torch.distributed.get_group_rank(group, mesh.peer(peer))

    def _tag(self, wire: Wire, value: int, m: int) -> int:
        return (value * len(self._flight.context.microbatches) + m) * 2 + (wire == "grad")

    def _await_parameters(self, unit: int) -> None:
        """Wait for the parameters that the unit reads."""
        for read in self._flight.context.program.params[unit]:
            self._flight.fetching.pop(read, DONE).wait()


def _edge(y: Tensor) -> GradientEdge | None:
    """The end of a unit's graph; a frozen first unit has none."""
    return get_gradient_edge(y) if y.requires_grad else None
