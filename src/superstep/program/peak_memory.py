"""high_water: the transient bytes within a step, from the program alone.

Parameters, gradients and optimizer states that stay from step to step do not count; what is fetched, accumulated and
dropped, kept for a backward, or on its way between units counts, and so does the workspace of an instruction.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from superstep.program import instructions as ins
from superstep.program.instructions import Instruction, Keep, Program
from superstep.program.needed_values import Value
from superstep.program.offload import find_ended_offloads
from superstep.program.received import find_received_values

Category: TypeAlias = Literal["params", "gradient", "kept", "boundary"]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitBytes:
    """A unit's bytes on one rank; activations are those of one microbatch.

    Attributes:
        params: the unit's own parameters, fetched, in the compute dtype; without those that the rank has whole.
        gradient: the full gradient buffers of the unit that are settled into their shard.
        kept_all: what stays for the backward pass, with the unit's inputs.
        kept_selective: the same without what selective recomputation computes again.
        kept_input: only the unit's inputs, where full recomputation starts.
        product_inputs: what BackwardInput leaves of it for BackwardWeight: the inputs of products with parameters.
        product_gradients: what it makes for BackwardWeight: the gradients of those products' outputs.
        boundary: what the unit before returns, on its way; its gradient on the way back is as large.
        forward_workspace: what its forward pass makes and drops, beside what it keeps and its output.
        backward_workspace: the same of its backward pass, beside what was kept and its input's gradient.
        input_workspace: the same of BackwardInput, with what it makes for BackwardWeight.
    """

    params: int
    gradient: int
    kept_all: int
    kept_selective: int
    kept_input: int
    product_inputs: int
    product_gradients: int
    boundary: int
    forward_workspace: int = 0
    backward_workspace: int = 0
    input_workspace: int = 0

    def count_kept(self, keep: Keep) -> int:
        """Bytes that a forward pass leaves for the backward pass."""
        match keep:
            case "all":
                return self.kept_all
            case "selective":
                return self.kept_selective
            case "input":
                return self.kept_input
            case "nothing":
                return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The transient bytes of a rank during one instruction, by category; as a peak, where their sum is highest.

    Attributes:
        index: the instruction; of a peak, the first with this sum.
        params_bytes: parameters fetched and not yet freed (ZeRO 3).
        gradient_bytes: gradients not yet settled into their shard (ZeRO 2 and 3).
        kept_bytes: kept for a backward pass, or for a BackwardWeight.
        boundary_bytes: inputs and gradients between units: received or computed, and not yet used, or sent and not yet
            known to be received.
        workspace_bytes: what the instruction itself makes and drops.
    """

    index: int = 0
    params_bytes: int = 0
    gradient_bytes: int = 0
    kept_bytes: int = 0
    boundary_bytes: int = 0
    workspace_bytes: int = 0

    @property
    def bytes(self) -> int:
        held = self.params_bytes + self.gradient_bytes + self.kept_bytes + self.boundary_bytes
        return held + self.workspace_bytes


def without_workspace(sizes: Sequence[UnitBytes]) -> tuple[UnitBytes, ...]:
    """The same sizes without workspaces: what exists before and after each instruction."""
    return tuple(replace(unit, forward_workspace=0, backward_workspace=0, input_workspace=0) for unit in sizes)


def high_water(program: Program, sizes: Sequence[UnitBytes]) -> tuple[Peak, ...]:
    """Each pipeline rank's peak, given one UnitBytes for each unit.

    An instruction's inputs and outputs exist together while it runs. A received value counts from the instruction that
    posts its receive to the one that uses it, a sent one from the instruction that computes it to the one before which
    the peer has answered (``received``).
    """
    return tuple(_peak(program, rank, sizes) for rank in range(program.pp))


def course(program: Program, rank: int, sizes: Sequence[UnitBytes]) -> tuple[Peak, ...]:
    """The transient bytes of a rank during each of its instructions, in order: one ``Peak`` for each."""
    return tuple(_level(*at) for at in _during(program, rank, sizes))


def _peak(program: Program, rank: int, sizes: Sequence[UnitBytes]) -> Peak:
    # The first of the highest.
    highest = max(_during(program, rank, sizes), key=lambda at: sum(at[1].values()) + at[2], default=None)
    return Peak() if highest is None else _level(*highest)


def _during(program: Program, rank: int, sizes: Sequence[UnitBytes]) -> Iterator[tuple[int, dict[Category, int], int]]:
    now = _Held(program, rank, sizes)
    for index, i in enumerate(program.ranks[rank]):
        now.begin(index, i)
        yield index, dict(now.bytes), now.workspace(i)
        now.end(i)


def _level(index: int, sizes: dict[Category, int], workspace: int) -> Peak:
    return Peak(
        index=index,
        params_bytes=sizes["params"],
        gradient_bytes=sizes["gradient"],
        kept_bytes=sizes["kept"],
        boundary_bytes=sizes["boundary"],
        workspace_bytes=workspace,
    )


def list_held_bytes(program: Program, rank: int, sizes: Sequence[UnitBytes]) -> tuple[dict[Category, int], ...]:
    """The bytes of each category on a rank after each of its instructions."""
    now = _Held(program, rank, sizes)
    changes = []
    for index, i in enumerate(program.ranks[rank]):
        now.begin(index, i)
        now.end(i)
        changes.append(dict(now.bytes))
    return tuple(changes)


class _Held:
    """What a rank holds between two instructions, with the bytes of each category."""

    def __init__(self, program: Program, rank: int, sizes: Sequence[UnitBytes]) -> None:
        self.program = program
        self.sizes = sizes
        self.received = find_received_values(program, rank)
        self.ended = find_ended_offloads(program, rank)
        self.away: dict[tuple[int, int], int] = {}
        self.are_params_transient = program.shards_parameters
        self.are_gradients_transient = program.shards_gradients and any(
            isinstance(i, ins.Reduce) for i in program.ranks[rank]
        )
        self.taken, self.gradient_values = program.taken, program.gradient_values
        self.uses = program.count_uses(rank)
        self.left: dict[tuple[int, int], int] = {}
        self.keepers: dict[tuple[int, int], int] = {}
        self.items: dict[tuple[Category, *tuple[Hashable, ...]], int] = {}
        self.bytes: dict[Category, int] = {"params": 0, "gradient": 0, "kept": 0, "boundary": 0}

    def put(self, category: Category, *key: Hashable, size: int) -> None:
        """Hold something; replaces what had its key."""
        self.drop(category, *key)
        self.items[category, *key] = size
        self.bytes[category] += size

    def drop(self, category: Category, *key: Hashable) -> None:
        """Release something, if it is held."""
        self.bytes[category] -= self.items.pop((category, *key), 0)

    def begin(self, index: int, i: Instruction) -> None:  # noqa: C901 - one case for each instruction
        """Add what exists while the instruction runs, without what was sent and is received by then."""
        self._release(self.received.get(index, ()))
        for key in self.ended.get(index, ()):
            self._offload(*key)
        match i:
            case ins.Reload(unit, m):
                self._reload(unit, m)
            case ins.Fetch(unit) if self.are_params_transient:
                self.put("params", unit, size=self.sizes[unit].params)
            case ins.Forward(unit, m, keep):
                if keep != "nothing":
                    self._keep_inputs(unit, m)
                    self.put("kept", unit, m, size=self._count_beyond_inputs(unit, self.sizes[unit].count_kept(keep)))
                if unit + 1 < len(self.program.units):
                    self._put_value(unit + 1, m)
            case ins.Recompute(unit, m):
                self.put("kept", unit, m, size=self._count_beyond_inputs(unit, self.sizes[unit].kept_all))
            case ins.Backward(unit, m):
                self._put_gradients(unit)
                self._put_input_gradient(unit, m)
            case ins.BackwardInput(unit, m):
                self._put_input_gradient(unit, m)
            case ins.BackwardWeight(unit, m):
                self._put_gradients(unit)
            case ins.Recv("act", value, m, _):
                self._put_value(value, m)
            case ins.Recv("grad", value, m, _):
                self.put("boundary", "grad", value, m, size=self.sizes[value].boundary)

    def _offload(self, unit: int, m: int) -> None:
        """Release what has left: all that a unit keeps but fields of the batch."""
        kept, stays = self.items["kept", unit, m], self._count_beyond_inputs(unit, self.sizes[unit].kept_input)
        self.away[unit, m] = kept
        self.put("kept", unit, m, size=stays)
        for value in self.taken[unit]:
            self.keepers[value, m] -= 1
            if not self.keepers[value, m]:
                self.drop("kept", "value", value, m)

    def _reload(self, unit: int, m: int) -> None:
        self.put("kept", unit, m, size=self.away.pop((unit, m)))
        for value in self.taken[unit]:
            self.keepers[value, m] += 1
            if not self.left.get((value, m)):
                self.put("kept", "value", value, m, size=self.sizes[value].boundary)

    def _release(self, received: Sequence[Value]) -> None:
        for wire, value, m in received:
            if wire == "act":
                self._use_value(value, m)
            else:
                self.drop("boundary", "grad", value, m)

    def workspace(self, i: Instruction) -> int:
        """Bytes that the instruction makes and drops, once it has begun."""
        match i:
            case ins.Forward(unit, _):
                return self.sizes[unit].forward_workspace
            case ins.Recompute(unit, _):
                return self.sizes[unit].forward_workspace + self._count_output_bytes(unit)
            case ins.Backward(unit, m):
                return self.sizes[unit].backward_workspace + self._count_remade_bytes(unit, m)
            case ins.BackwardInput(unit, m):
                return self.sizes[unit].input_workspace + self._count_remade_bytes(unit, m)
            case _:
                return 0

    def _count_output_bytes(self, unit: int) -> int:
        """The unit's output, which nothing takes when it is computed again."""
        return self.sizes[unit + 1].boundary if unit + 1 < len(self.sizes) else 0

    def _count_remade_bytes(self, unit: int, m: int) -> int:
        """What selective recomputation makes of a unit again, before its backward pass."""
        whole = self._count_beyond_inputs(unit, self.sizes[unit].kept_all)
        return whole - self.items.get(("kept", unit, m), whole)

    def _put_gradients(self, unit: int) -> None:
        for u in self.program.list_trained(unit) if self.are_gradients_transient else ():
            self.put("gradient", u, size=self.sizes[u].gradient)

    def _put_input_gradient(self, unit: int, m: int) -> None:
        for value in self.gradient_values.intersection(self.taken[unit]):
            # Other units may have left their gradient of the value. Both exist until this one is added at the end.
            part = (unit,) if ("boundary", "grad", value, m) in self.items else ()
            self.put("boundary", "grad", value, m, *part, size=self.sizes[value].boundary)

    def _drop_input_gradient(self, unit: int, m: int) -> None:
        for value in self.taken[unit]:
            self.drop("boundary", "grad", value, m, unit)

    def _put_value(self, value: int, m: int) -> None:
        self.put("boundary", "act", value, m, size=self.sizes[value].boundary)
        self.left[value, m] = self.uses[m].get(value, 1)

    def _use_value(self, value: int, m: int) -> None:
        """Drop a value after its last use, unless units keep it."""
        self.left[value, m] = self.left.get((value, m), 1) - 1
        if not self.left[value, m]:
            self.drop("boundary", "act", value, m)
            if self.keepers.get((value, m)):
                self.put("kept", "value", value, m, size=self.sizes[value].boundary)

    def _keep_inputs(self, unit: int, m: int) -> None:
        """Count the unit's inputs as kept from their last use on; before, they count as "boundary". However many units
        keep an input, it counts once.
        """
        for value in self.taken[unit]:
            self.keepers[value, m] = self.keepers.get((value, m), 0) + 1
            if self.left.get((value, m), 1) == 1:
                self.drop("boundary", "act", value, m)
                self.put("kept", "value", value, m, size=self.sizes[value].boundary)

    def _drop_kept(self, unit: int, m: int) -> None:
        """Release what a unit kept, and its inputs that no other unit keeps."""
        self.drop("kept", unit, m)
        for value in self.taken[unit]:
            self.keepers[value, m] -= 1
            if not self.keepers[value, m]:
                self.drop("kept", "value", value, m)

    def _count_beyond_inputs(self, unit: int, size: int) -> int:
        """``size``, what a unit keeps, without the bytes of its inputs."""
        return size - sum(self.sizes[value].boundary for value in self.taken[unit])

    def end(self, i: Instruction) -> None:
        """Release what the instruction used up."""
        match i:
            case ins.Free(unit):
                self.drop("params", unit)
            case ins.Settle(unit):
                self.drop("gradient", unit)
            case ins.Forward(unit, m):
                for value in self.taken[unit]:
                    self._use_value(value, m)
            case ins.Backward(unit, m):
                self._drop_kept(unit, m)
                self._drop_input_gradient(unit, m)
                self.drop("boundary", "grad", unit + 1, m)
            case ins.BackwardInput(unit, m):
                self._drop_kept(unit, m)
                self.put("kept", unit, m, size=self.sizes[unit].product_inputs)
                self.put("kept", "products", unit, m, size=self.sizes[unit].product_gradients)
                self._drop_input_gradient(unit, m)
                self.drop("boundary", "grad", unit + 1, m)
            case ins.BackwardWeight(unit, m):
                self.drop("kept", unit, m)
                self.drop("kept", "products", unit, m)


def forwards_in_flight(program: Program) -> tuple[int, ...]:
    """For each pipeline rank, the most (stage, microbatch) pairs at a time of which something is kept.

    That is from the forward to the backward, or to BackwardWeight where the backward has two halves.
    """
    return tuple(_most_in_flight(program, rank) for rank in range(program.pp))


def _most_in_flight(program: Program, rank: int) -> int:
    has_backward = program.has_backward
    first = {next((unit for unit in units if has_backward[unit]), None) for units in program.stages}
    count = most = 0
    for i in program.ranks[rank]:
        # A stage's pass begins, going forward, and ends, going back, at its first unit with a backward pass.
        if isinstance(i, ins.Forward) and i.unit in first:
            count += 1
            most = max(most, count)
        elif isinstance(i, ins.Backward | ins.BackwardWeight) and i.unit in first:
            count -= 1
    return most
