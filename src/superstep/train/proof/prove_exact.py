"""prove --exact: a layout computes the bits of one rank, and resumes from any other layout's checkpoint.

The reference is the engine itself on one rank, in exact mode, at the same microbatch size;
``train.proof.prove_tolerance`` compares that one with a reference without the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from superstep.comm.mesh import Mesh, build_mesh
from superstep.comm.objects import RankPeers, gather
from superstep.data.batch import Batch
from superstep.engine.engine import Engine, StepResult
from superstep.engine.values.microbatch import microbatches_of, rows
from superstep.launch.ranks import World
from superstep.plan.resolution.resolve import Resolved
from superstep.state.checkpoint import load, save
from superstep.state.manifest import Position
from superstep.state.tensor_piece import TensorPiece
from superstep.train.lr_schedule import rate
from superstep.train.weights.model import tensors_of, units_of

KINDS = ("loss", "gradient", "norm", "weight")
"""Compared kinds, in the order of computation within a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BitDifference:
    """A value with other bits than the reference's.

    Attributes:
        kind: one of ``KINDS``.
        name: the tensor's global name; empty for the loss and the norm.
        differing: number of differing elements.
        largest: the largest difference.
    """

    step: int
    kind: str
    name: str
    differing: int
    largest: float

    def describe(self) -> str:
        """The difference in one line."""
        what = self.kind if not self.name else f"{self.kind} of {self.name}"
        return f"step {self.step}: {what} differs in {self.differing} numbers, by up to {self.largest:.1e}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactVerdict:
    """The verdict on a layout.

    Attributes:
        compared: numbers compared, over all steps and ranks.
        differing: those with other bits.
        first: the first differing value, in the order of ``KINDS`` within each step; None without one.
        first_resumed: the same after resuming from another layout's checkpoint.
    """

    compared: int
    differing: int
    first: BitDifference | None
    first_resumed: BitDifference | None

    @property
    def is_proven(self) -> bool:
        """Whether all bits are equal."""
        return self.first is None and self.first_resumed is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Relay:
    """Checkpoints between layouts, of the same step.

    Attributes:
        take: the one to resume from.
        leave: the path of a new one; None writes none.
        step: finished steps in both.
    """

    take: Path
    leave: Path | None
    step: int


def write_bits(world: World, run: Resolved, batches: Sequence[Batch], folder: Path, *, stop: int) -> Path:
    """Run the reference on one rank: a file of bits for each step, as ``train.proof.prove_tolerance`` writes them, and
    a checkpoint after step ``stop``.

    Returns:
        The checkpoint.
    """
    checkpoint = folder / "checkpoint"
    mesh = _mesh(world, run)
    try:
        engine = Engine(run, units_of(run), mesh)
        for step, batch in enumerate(batches):
            bits: dict[str, Tensor] = {}
            result = _step(engine, mesh, run, batch, step, bits)
            bits["loss"] = torch.tensor(result.loss, dtype=torch.float64)
            bits["grad_norm"] = torch.tensor(result.grad_norm, dtype=torch.float64)
            for piece in engine.pieces(["weight"]):
                bits[f"weight/{piece.name}"] = piece.values.detach().cpu().float().view(piece.shape).clone()
            save_file(bits, folder / f"{step}.safetensors")
            if step + 1 == stop:
                _save(engine, world, checkpoint, stop)
    finally:
        mesh.destroy()
    return checkpoint


def _step(
    engine: Engine, mesh: Mesh, run: Resolved, batch: Batch, step: int, gradients: dict[str, Tensor]
) -> StepResult:
    def keep() -> None:
        for piece in engine.pieces(["gradient"]):
            gradients[f"gradient/{piece.name}"] = piece.values.detach().cpu().view(piece.shape).clone()

    return train_one_step(engine, mesh, run, batch, step, keep)


def prove_exact(world: World, run: Resolved, batches: Sequence[Batch], folder: Path, relay: Relay) -> ExactVerdict:
    """Run the plan on the launched ranks, from the start and from another layout's checkpoint, and compare every number
    of each rank with the reference in ``folder``. Rank 0's verdict covers all ranks.
    """
    mesh = _mesh(world, run)
    try:
        compared, different = follow_run(Engine(run, units_of(run), mesh), mesh, run, batches, folder, 0, world, relay)
        resumed = Engine(run, units_of(run), mesh)
        position = load(relay.take, resumed.pieces(), RankPeers(world.rank, world.size))
        resumed.note_loaded(position.step)
        again, differences_again = follow_run(resumed, mesh, run, batches, folder, relay.step, world, None)
    finally:
        mesh.destroy()
    straight, after = (
        [d for part in gather(each, list[BitDifference]) for d in part] for each in (different, differences_again)
    )
    return ExactVerdict(
        compared=sum(gather(compared + again, int)),
        differing=sum(d.differing for d in (*straight, *after)),
        first=_first(straight),
        first_resumed=_first(after),
    )


def _first(differences: Sequence[BitDifference]) -> BitDifference | None:
    # The tensor with the most differing elements is nearest to the cause.
    return min(differences, key=lambda d: (d.step, KINDS.index(d.kind), -d.differing), default=None)


def follow_run(  # noqa: PLR0913
    engine: Engine,
    mesh: Mesh,
    run: Resolved,
    batches: Sequence[Batch],
    folder: Path,
    start: int,
    world: World,
    relay: Relay | None,
) -> tuple[int, list[BitDifference]]:
    """Run the steps from ``start`` on: the number of compared numbers, and the differing values."""
    compared, differences = 0, list[BitDifference]()
    for step, batch in enumerate(batches[start:], start):
        bits = _Bits(step, folder / f"{step}.safetensors")
        result = train_one_step(engine, mesh, run, batch, step, lambda: bits.compare(engine.pieces(["gradient"])))  # noqa: B023
        bits.number("loss", result.loss)
        bits.number("norm", result.grad_norm)
        bits.compare(engine.pieces(["weight"]))
        compared += bits.compared
        differences += bits.differences
        if relay is not None and relay.leave is not None and step + 1 == relay.step:
            _save(engine, world, relay.leave, relay.step)
    return compared, differences


class _Bits:
    """Compares one step with its reference file."""

    def __init__(self, step: int, path: Path) -> None:
        self._step = step
        self._path = path
        self.compared = 0
        self.differences: list[BitDifference] = []

    def number(self, kind: str, value: float) -> None:
        stored = "grad_norm" if kind == "norm" else kind
        with safe_open(self._path, framework="pt") as file:
            self._judge(kind, "", torch.tensor([value], dtype=torch.float64), file.get_tensor(stored).view(1))

    def compare(self, pieces: Iterator[TensorPiece]) -> None:
        with safe_open(self._path, framework="pt") as file:
            for piece in pieces:
                values = piece.values.detach().cpu().float()
                block = file.get_slice(f"{piece.kind}/{piece.name}")[piece.index]
                self._judge(piece.kind, piece.name, values, block.reshape(-1)[piece.low : piece.low + values.numel()])

    def _judge(self, kind: str, name: str, ours: Tensor, theirs: Tensor) -> None:
        bits = torch.int64 if ours.dtype == torch.float64 else torch.int32
        self.compared += ours.numel()
        differing = int((ours.contiguous().view(bits) != theirs.contiguous().view(bits)).sum())
        if differing:
            largest = float((ours.double() - theirs.double()).abs().max())
            self.differences.append(
                BitDifference(step=self._step, kind=kind, name=name, differing=differing, largest=largest)
            )


def train_one_step(
    engine: Engine, mesh: Mesh, run: Resolved, batch: Batch, step: int, inspect: Callable[[], None]
) -> StepResult:
    """One step on this rank's rows of the batch; ``inspect`` is called when the gradients are whole."""
    mine = batch.rows(rows(run.plan, mesh))
    return engine.train_step(
        microbatches_of(mine, run.plan, mesh),
        valid_tokens=batch.valid_tokens,
        divisor=batch.divisor,
        lr=rate(run.config.train, step),
        inspect=inspect,
    )


def _mesh(world: World, run: Resolved) -> Mesh:
    return build_mesh(run.plan, world.rank, world.device, timeout=timedelta(seconds=300))


def _save(engine: Engine, world: World, place: Path, step: int) -> None:
    save(
        place,
        engine.pieces(),
        Position(step=step, samples=0, tokens=0),
        RankPeers(world.rank, world.size),
        tensors=tensors_of(engine),
        beside={},
    )
