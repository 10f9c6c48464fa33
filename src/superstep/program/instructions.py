"""The instructions of a step, as frozen values, and the Program that lists them for each pipeline rank.

A *unit* (``u3``) is the embedding, one block, or the head; a *microbatch* (``m5``) is what passes the units at once.
A *value* passes between units: ``u3`` of a transfer is what unit 2 returns, in a chain the input of unit 3.
Ranks that differ only in dp, cp or tp run the same list, so a Program has one list for each pipeline rank.

Instructions are issued in order. Those on the compute lane run where they are issued; the others start there and run
beside the compute until something needs their result:

    lane      instructions                                   a later instruction waits for it when it
    compute   Forward, Recompute, Backward, BackwardInput,   -
              BackwardWeight, Settle, Tie, ReducePartial,
              Step, Free
    fetch     Fetch                                          computes with the unit's parameters
    reduce    Reduce                                         settles the unit's gradient
              ReduceRows, ReduceReplicas                     ties, sums partial gradients or steps
    act, grad Send, Recv                                     computes with what was received
    snapshot  Snapshot                                       steps
    out       Offload                                        reloads the same, begins the second pass after it, or is
                                                             the first to compute or to reload after the next offload
    in        Reload                                         goes back through the unit, or computes it again
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

from superstep.plan.sharding.edges import (
    list_backward_units,
    list_needed_units,
    list_passing_values,
    list_taken_values,
)
from superstep.plan.zero import ZeroStage

Keep = Literal["all", "selective", "input", "nothing"]
Wire = Literal["act", "grad"]
Lane = Literal["compute", "fetch", "reduce", "act", "grad", "snapshot", "out", "in"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Fetch:
    """Gather the unit's parameters from the shards of the data-parallel ranks (ZeRO 1 to 3)."""

    unit: int


@dataclass(frozen=True, slots=True)
class Free:
    """Drop the gathered parameters of the unit (ZeRO 3)."""

    unit: int


@dataclass(frozen=True, slots=True)
class Forward:
    """Compute the unit on the microbatch; ``keep`` says what stays in memory for the backward pass."""

    unit: int
    microbatch: int
    keep: Keep


@dataclass(frozen=True, slots=True)
class Recompute:
    """Compute the unit again from its kept input, and now keep what the backward pass needs."""

    unit: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Backward:
    """Gradients of the unit's input and parameters; the parameters' gradients are added to the unit's buffer."""

    unit: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class BackwardInput:
    """Gradient of the unit's input only; keeps what its parameters' gradients need (Qi 2023, sec. 2: the B pass)."""

    unit: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class BackwardWeight:
    """Gradients of the unit's parameters, from what BackwardInput kept; added to the unit's buffer (the W pass).

    These are products of inputs with output gradients, so the parameters themselves are not read.
    """

    unit: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Send:
    """Start sending to pipeline rank ``peer`` what the unit before ``unit`` returns (act), or its gradient."""

    wire: Wire
    unit: int
    microbatch: int
    peer: int


@dataclass(frozen=True, slots=True)
class Recv:
    """Start receiving from pipeline rank ``peer`` what the unit before ``unit`` returns, or its gradient."""

    wire: Wire
    unit: int
    microbatch: int
    peer: int


@dataclass(frozen=True, slots=True)
class Reduce:
    """Start summing the unit's gradient buffer over the ranks that shard it, or that all hold it."""

    unit: int


@dataclass(frozen=True, slots=True)
class ReduceRows(Reduce):
    """The same for a unit with tables of which only the rows that a step touches have a gradient: of these tables the
    ranks sum the rows that any of them has touched, and no others.
    """


@dataclass(frozen=True, slots=True)
class Settle:
    """Wait for the unit's reduction; with ZeRO 2 and 3 add it to the shard and drop the full buffer."""

    unit: int


@dataclass(frozen=True, slots=True)
class ReduceReplicas:
    """Start summing the unit's settled shard over the replicas (hybrid sharding)."""

    unit: int


@dataclass(frozen=True, slots=True)
class Tie:
    """Sum the gradient of a unit with parameters on several pipeline ranks (a tied head)."""

    unit: int


@dataclass(frozen=True, slots=True)
class ReducePartial:
    """Sum over tp the gradients of parameters that each rank holds whole but used only for a part."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Start copying a unit's state, as the last step left it, into memory that outlives the rank; does nothing where no
    copy is due.
    """

    unit: int


@dataclass(frozen=True, slots=True)
class Offload:
    """Start moving what the unit keeps of the microbatch out of the device's memory. It is freed once it has left."""

    unit: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Reload:
    """Start moving what an offload took away back into the device's memory."""

    unit: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Step:
    """Clip by the global norm and update the parameters."""


Instruction: TypeAlias = (
    Fetch
    | Free
    | Forward
    | Recompute
    | Backward
    | BackwardInput
    | BackwardWeight
    | Send
    | Recv
    | Reduce
    | ReduceRows
    | Settle
    | ReduceReplicas
    | Tie
    | ReducePartial
    | Snapshot
    | Offload
    | Reload
    | Step
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program(ZeroStage):
    """One step, for every pipeline rank.

    Attributes:
        units: names, in model order.
        stages: unit numbers of each stage.
        placement: the pipeline rank of each stage.
        params: for each unit, the units that own the parameters that it reads.
        zero: the ZeRO stage of the program's fetches and reductions.
        passes: the passes applied so far; ``check`` requires only what these promise.
        ranks: the instructions of each pipeline rank, in order.
        frozen: the units without trained parameters, which are not reduced.
        resting: those of them that another phase of the step trains.
        inputs: for each unit, the units whose outputs it takes; () for a chain.
        sparse: the units with tables of which only touched rows have a gradient.
        encoding: the pipeline rank that computes the first stage, an encoder, on each microbatch; () where placement
            says it.
    """

    units: tuple[str, ...]
    stages: tuple[tuple[int, ...], ...]
    placement: tuple[int, ...]
    params: tuple[tuple[int, ...], ...]
    microbatches: int
    zero: int
    passes: tuple[str, ...]
    ranks: tuple[tuple[Instruction, ...], ...]
    frozen: tuple[int, ...] = ()
    inputs: tuple[tuple[int, ...], ...] = ()
    resting: tuple[int, ...] = ()
    sparse: tuple[int, ...] = ()
    encoding: tuple[int, ...] = ()

    @property
    def fixed(self) -> tuple[int, ...]:
        """The units that no phase of the step trains: their parameters never change."""
        return tuple(unit for unit in self.frozen if unit not in self.resting)

    @property
    def taken(self) -> tuple[tuple[int, ...], ...]:
        """The values that each unit takes, in the order of its arguments."""
        return list_taken_values(len(self.units), self.inputs)

    @property
    def needed(self) -> frozenset[int]:
        """The units that lead to the loss: in one phase not always all."""
        return list_needed_units(self.inputs) if self.inputs else frozenset(range(len(self.units)))

    @property
    def passing(self) -> tuple[tuple[int, ...], ...]:
        """The values that enter each stage from the one before; one more entry, empty, ends them."""
        return list_passing_values(self.stages, self.taken)

    @property
    def has_backward(self) -> tuple[bool, ...]:
        """Whether each unit has a backward pass: none in front of the first trained one has."""
        needed = self.needed
        trained = [unit in needed and bool(self.list_trained(unit)) for unit in range(len(self.units))]
        return list_backward_units(self.taken, trained)

    @property
    def gradient_values(self) -> frozenset[int]:
        """The values with a gradient: what units with a backward pass return."""
        return frozenset(unit + 1 for unit, has_backward in enumerate(self.has_backward) if has_backward)

    @property
    def returning(self) -> tuple[tuple[int, ...], ...]:
        """The values of ``passing`` with a gradient, which goes back the same way."""
        gradient_values = self.gradient_values
        return tuple(tuple(value for value in values if value in gradient_values) for values in self.passing)

    def count_uses(self, rank: int) -> tuple[dict[int, int], ...]:
        """For each microbatch, how often a rank uses each value that it computes or receives: in units that take it,
        and to send it on.
        """
        return self.list_by_microbatch(lambda m: self._count_uses(rank, m))

    def _count_uses(self, rank: int, m: int) -> dict[int, int]:
        uses: dict[int, int] = {}
        every, passing = self.taken, self.passing
        for stage in self.stages_at(rank, m):
            is_sent = self.is_elsewhere(stage + 1, m, rank)
            taken = [value for unit in self.stages[stage] for value in every[unit]]
            for value in (*taken, *(passing[stage + 1] if is_sent else ())):
                uses[value] = uses.get(value, 0) + 1
        return uses

    def list_trained(self, unit: int) -> tuple[int, ...]:
        """The units with gradients from a backward pass of ``unit``."""
        return tuple(u for u in self.params[unit] if u not in self.frozen)

    @property
    def pp(self) -> int:
        return len(self.ranks)

    def list_by_microbatch(self, find: Callable[[int], T]) -> tuple[T, ...]:
        """What ``find`` returns for each microbatch. Microbatches whose encoder is on one rank have it in common."""
        first = {rank: m for m, rank in reversed(list(enumerate(self.encoding or (0,) * self.microbatches)))}
        by_rank = {rank: find(m) for rank, m in first.items()}
        return tuple(by_rank[rank] for rank in self.encoding or (0,) * self.microbatches)

    def place(self, stage: int, m: int) -> int:
        """The pipeline rank that computes a stage on a microbatch."""
        return self.encoding[m] if self.encoding and stage == 0 else self.placement[stage]

    def is_elsewhere(self, stage: int, m: int, rank: int) -> bool:
        """Whether a stage exists and is computed on another rank."""
        return 0 <= stage < len(self.stages) and self.place(stage, m) != rank

    def stages_at(self, rank: int, m: int) -> tuple[int, ...]:
        """The stages that a rank computes on a microbatch."""
        return tuple(stage for stage in range(len(self.stages)) if self.place(stage, m) == rank)

    def stage_of(self, unit: int) -> int:
        return next(s for s, units in enumerate(self.stages) if unit in units)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds: each holds an encoder that several compute."""
        return tuple(s for s, place in enumerate(self.placement) if place == rank or (self.encoding and s == 0))

    def list_units_at(self, rank: int, m: int) -> tuple[int, ...]:
        """The units that a rank computes on a microbatch."""
        return tuple(unit for stage in self.stages_at(rank, m) for unit in self.stages[stage])

    def units_of(self, rank: int) -> tuple[int, ...]:
        return tuple(u for s in self.stages_of(rank) for u in self.stages[s])

    def list_held_units(self, rank: int) -> tuple[int, ...]:
        """The units of which a pipeline rank holds parameters: those it computes, and those that these read."""
        return tuple(sorted({p for u in self.units_of(rank) for p in self.params[u]}))

    def holders(self, unit: int) -> tuple[int, ...]:
        return tuple(rank for rank in range(self.pp) if unit in self.list_held_units(rank))


def lane(instruction: Instruction) -> Lane:
    match instruction:
        case Fetch():
            return "fetch"
        case Reduce() | ReduceReplicas():
            return "reduce"
        case Send(wire=wire) | Recv(wire=wire):
            return wire
        case Snapshot():
            return "snapshot"
        case Offload():
            return "out"
        case Reload():
            return "in"
        case _:
            return "compute"


def is_compute(instruction: Instruction) -> bool:
    return isinstance(instruction, Forward | Recompute | Backward | BackwardInput)
