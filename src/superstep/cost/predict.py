"""predict: what a step of a plan would take on a machine, in seconds and bytes.

A unit takes its products at the machine's rate for products, its other operations at the speed of memory, and its
tensor-parallel collectives one after the other:

    seconds = operations / gemm_flops_per_s + bytes / memory_bytes_per_s + collectives

    bytes over memory: passes (a read or a write of a whole tensor) in eager mode; the backward pass takes twice these
      norm 4, residual sum 3, rotation 7, silu and gate 5, lookup 2
      cross entropy 5, over fp32 logits
    and once each, in fp32
      gradient of a matrix, added into its buffer 2; a reduced gradient, settled into its shard 3
      AdamW 7 (28 bytes a parameter), the gradient's norm before it 1

    collectives of b bytes over n ranks, by a ring or by direct exchange (Thakur 2005, sec. 4)
      gather, reduce-scatter    b · (n - 1) / n / link_bytes_per_s + link_latency_s
      all-reduce                both of these
      send                      b / link_bytes_per_s + link_latency_s

One link serves all: ranks do not slow each other down here. What operations take beyond this, to be launched and to
find fresh memory, is not in it, so small models take longer: a step of "bench" took 1.3 times the predicted seconds,
one of "demo" 2.0 times (one rank, fp32, CPU time of one Xeon core, torch 2.13).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from superstep.cost.memory import (
    ELEMENT_BYTES,
    FP32,
    RankBytes,
    buffer_numel,
    has_fused_loss,
    rank_bytes,
    share_numel,
    zero_stage,
)
from superstep.cost.simulate import PerUnit, UnitSeconds, simulate
from superstep.cost.work import UnitParameters, local_dims, rank_flops, rank_parameters
from superstep.plan.resolve import Resolved
from superstep.program.compile import compile_step
from superstep.program.instructions import Program
from superstep.program.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What one rank's device does in a second, and the link between two of them."""

    gemm_flops_per_s: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    link_latency_s: float

    def gather_s(self, size: float, ranks: int) -> float:
        """Seconds to gather ``size`` bytes from parts, or to reduce them to parts."""
        return 0.0 if ranks == 1 else size * (ranks - 1) / ranks / self.link_bytes_per_s + self.link_latency_s

    def all_reduce_s(self, size: float, ranks: int) -> float:
        """Seconds to sum ``size`` bytes that every rank has."""
        return 2 * self.gather_s(size, ranks)

    def send_s(self, size: float) -> float:
        """Seconds to send ``size`` bytes to one rank."""
        return size / self.link_bytes_per_s + self.link_latency_s


@dataclass(frozen=True, slots=True)
class Prediction:
    """A step before it has run.

    Attributes:
        timeline: what would run when.
        memory: of each pipeline rank.
    """

    timeline: Timeline
    memory: tuple[RankBytes, ...]

    @property
    def step_s(self) -> float:
        """The whole step."""
        return self.timeline.step_s

    @property
    def bubble(self) -> float:
        """Idle over busy time, all ranks together."""
        return self.timeline.bubble()

    @property
    def exposed_s(self) -> float:
        """Communication that no compute hides, mean over the ranks."""
        spent = self.timeline.spent()
        return sum(sum(s.exposed_s.values()) for s in spent) / len(spent)

    @property
    def memory_bytes(self) -> int:
        """The peak of the fullest rank."""
        return max(rank.bytes for rank in self.memory)


def predict(run: Resolved, machine: Machine) -> Prediction:
    """The training step of a run on a machine."""
    program = compile_step(run.plan)
    timeline = simulate(program, durations(run, program, machine))
    return Prediction(timeline, rank_bytes(run, program))


def durations(run: Resolved, program: Program, machine: Machine) -> PerUnit:
    """Seconds of each instruction of the run's step."""
    owned = rank_parameters(run)
    held = [[owned[u] for u in program.held_by(rank)] for rank in range(program.pp)]
    return PerUnit(
        units=tuple(_seconds(run, program, machine, unit) for unit in range(len(owned))),
        reduce_partial_s=max(machine.all_reduce_s(FP32 * _partial(run, units), run.plan.mesh.tp) for units in held),
        # Every rank waits for the fullest one.
        step_s=max(8 * FP32 * sum(share_numel(run, unit) for unit in units) for units in held)
        / machine.memory_bytes_per_s,
    )


def _partial(run: Resolved, units: Sequence[UnitParameters]) -> int:
    """Elements whose gradient each tp rank sees only a part of: norms of heads; of a split sequence, all that is
    whole.
    """
    if run.plan.sequence_parallel:
        return sum(unit.vectors + unit.whole for unit in units)
    if run.plan.rules.cut("heads") is None:
        return 0
    # Beside its norms of heads a block has two of the width, the head one.
    return sum(max(unit.vectors - 2 * run.shape.width, 0) for unit in units)


@dataclass(frozen=True, slots=True)
class _Pass:
    """One way through a unit.

    Attributes:
        flops: of its products.
        moved: bytes over memory of everything else.
        gathers: of the residual stream over tp; an all-reduce is two.
    """

    flops: float
    moved: float
    gathers: int


def _seconds(run: Resolved, program: Program, machine: Machine, unit: int) -> UnitSeconds:
    d, e, mesh = local_dims(run), ELEMENT_BYTES[run.config.numerics.compute], run.plan.mesh
    owned = rank_parameters(run)[unit]
    share, gradient = share_numel(run, owned), FP32 * buffer_numel(run, owned)
    forward, backward, weight = _passes(run, unit)

    def seconds(way: _Pass) -> float:
        collectives = way.gathers * machine.gather_s(d.T * d.D * e, mesh.tp)
        return way.flops / machine.gemm_flops_per_s + way.moved / machine.memory_bytes_per_s + collectives

    return UnitSeconds(
        forward_s=seconds(forward),
        backward_s=seconds(backward),
        weight_s=seconds(weight),
        recompute_s=seconds(forward),
        fetch_s=machine.gather_s(e * buffer_numel(run, owned), mesh.shards("dense")),
        reduce_s=machine.gather_s(gradient, mesh.shards("dense")) * (1 if zero_stage(run) else 2),
        settle_s=3 * FP32 * share / machine.memory_bytes_per_s if zero_stage(run) else 0.0,
        replicas_s=machine.all_reduce_s(FP32 * share, mesh.replicas),
        tie_s=machine.all_reduce_s(FP32 * share, len(program.holders(unit))),
        transfer_s=machine.send_s(d.t * d.D * e),
    )


def _passes(run: Resolved, unit: int) -> tuple[_Pass, _Pass, _Pass]:
    """A unit's forward, its backward, and the part of the backward that makes its weights' gradients."""
    if unit == 0:
        return _embedding(run)
    return _head(run) if unit == run.shape.layers + 1 else _block(run)


def _embedding(run: Resolved) -> tuple[_Pass, _Pass, _Pass]:
    d, e, is_split = local_dims(run), ELEMENT_BYTES[run.config.numerics.compute], run.plan.sequence_parallel
    moved = 2 * d.T * d.D * e
    if run.plan.rules.cut("vocab") is None:
        return _Pass(0, moved, 0), _Pass(0, 2 * moved, 0), _Pass(0, 2 * moved, 0)
    return _Pass(0, moved, 1 if is_split else 2), _Pass(0, 2 * moved, 1 if is_split else 0), _Pass(0, 2 * moved, 0)


def _block(run: Resolved) -> tuple[_Pass, _Pass, _Pass]:
    d, e = local_dims(run), ELEMENT_BYTES[run.config.numerics.compute]
    flops, owned = rank_flops(run)[1], rank_parameters(run)[1]
    matrices = owned.matrices // run.plan.mesh.tp + owned.whole
    # A region that is cut is entered and left.
    gathers = 2 * sum(run.plan.rules.cut(axis) == "tp" for axis in ("heads", "ffn"))
    per_head = 7 + (4 if run.shape.qk_norm else 0)
    moved = e * (2 * (4 + 3) * d.t * d.D + per_head * d.T * (d.N + d.K) * d.H + 5 * d.Tf * d.F)
    forward = _Pass(flops, moved, gathers)
    # Selective recomputation does everything again but the products.
    again = 1 if run.plan.recompute == "selective" else 0
    # Attention's own products have no weights.
    attention = 4 * d.T * d.S * d.N * d.H
    weight = _Pass(flops - attention, 2 * FP32 * matrices, 0)
    return forward, _Pass(2 * flops, (2 + again) * moved + 2 * FP32 * matrices, (1 + again) * gathers), weight


def _head(run: Resolved) -> tuple[_Pass, _Pass, _Pass]:
    d, e, is_split = local_dims(run), ELEMENT_BYTES[run.config.numerics.compute], run.plan.sequence_parallel
    flops = rank_flops(run)[-1]
    norm, loss, matrix = 4 * d.t * d.D * e, 5 * FP32 * d.Tv * d.V, FP32 * d.D * d.V
    if has_fused_loss(run):
        # The gradient is made in the forward; where it cannot stay in its buffer, the backward adds it there.
        scaled, added = (2 * matrix, 3 * matrix) if zero_stage(run) >= 2 else (0, 0)
        forward = _Pass(3 * flops, norm + loss + 2 * matrix, 0)
        return forward, _Pass(0, 2 * norm + scaled + added, 0), _Pass(0, added, 0)
    forward = _Pass(flops, norm + loss, 1 if is_split else 0)
    backward = _Pass(2 * flops, 2 * (norm + loss) + 2 * matrix, 1 if is_split else 2)
    return forward, backward, _Pass(flops, 2 * matrix, 0)
