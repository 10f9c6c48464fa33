"""prove: a layout computes what one device computes. Step by step against the reference, tensor by tensor."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from superstep.data.stream import Batch
from superstep.model.unit import UnitSpec, global_specs, initial
from superstep.numerics.tolerance import tolerance
from superstep.plan.config import TrainConfig
from superstep.plan.model.shape import ModelShape
from superstep.plan.resolve import Resolved
from superstep.runtime.engine import Engine, StepResult
from superstep.runtime.launch import World, gather
from superstep.runtime.mesh import Mesh, build_mesh
from superstep.state.piece import Piece
from superstep.train.batches import microbatches, rows
from superstep.train.model import units_of
from superstep.train.proof.reference import reference_steps, unit_steps
from superstep.train.schedule import rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One compared value of one step.

    Attributes:
        kind: loss, gradient, norm (of all gradients) or update.
        name: the tensor's global name; empty for the loss and the norm.
        relative: how far the layout lies from the reference, as ``numerics.tolerance`` defines it.
        allowed: the tolerance.
    """

    step: int
    kind: str
    name: str
    relative: float
    allowed: float

    @property
    def is_wrong(self) -> bool:
        """Whether it is more than rounding; a NaN is."""
        return not self.relative <= self.allowed

    def describe(self) -> str:
        """One line for a person."""
        what = self.kind if not self.name else f"{self.kind} of {self.name}"
        return f"step {self.step}: {what} differs by {self.relative:.2e}, allowed is {self.allowed:.0e}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a layout was found to be.

    Attributes:
        compared: values compared, over all steps and ranks.
        worst: the largest difference of each kind, as a share of its tolerance decides.
        first: the first value that is wrong, in the order loss, gradients, norm, updates of each step; None if none is.
        is_deterministic: whether a second run gave the same bits; None where it was not asked.
    """

    compared: int
    worst: tuple[Difference, ...]
    first: Difference | None
    is_deterministic: bool | None

    @property
    def is_proven(self) -> bool:
        """Whether everything held."""
        return self.first is None and self.is_deterministic is not False


def write_reference(
    model: ModelShape | Sequence[UnitSpec], train: TrainConfig, batches: Sequence[Batch], folder: Path
) -> None:
    """Run the reference and keep each step's loss, gradients and weights in a file of its own."""
    steps = reference_steps if isinstance(model, ModelShape) else unit_steps
    for step, result in enumerate(steps(model, train, batches)):  # type: ignore[arg-type]
        tensors = {f"gradient/{name}": value for name, value in result.gradients.items()}
        tensors |= {f"weight/{name}": value for name, value in result.weights.items()}
        tensors["loss"] = torch.tensor(result.loss, dtype=torch.float64)
        tensors["grad_norm"] = torch.tensor(result.grad_norm, dtype=torch.float64)
        # A tied or shared memory would be refused by the format; every tensor is written whole.
        save_file({name: value.contiguous() for name, value in tensors.items()}, folder / f"{step}.safetensors")


def prove(
    world: World,
    run: Resolved,
    batches: Sequence[Batch],
    folder: Path,
    *,
    reruns: bool,
    specs: Sequence[UnitSpec] | None = None,
) -> Verdict:
    """Run the plan on the launched ranks and compare each step with the reference in ``folder``.

    Every rank compares what it holds, replicas included; rank 0's verdict is about all of them. ``specs`` are the
    units of a model that the run's configuration does not name.
    """
    specs = specs or units_of(run)
    mesh = build_mesh(run.plan, world.rank, world.device, timeout=timedelta(seconds=120))
    # Operations of anyone's own may have no kernel with one order on a GPU: what a rerun gives is not asked there.
    has_order = world.device.kind == "cpu" or run.decoder is not None
    try:
        with world.device.deterministic() if has_order else nullcontext():
            differences, bits = _run(mesh, run, specs, batches, folder)
            is_deterministic = None
            if reruns and has_order:
                _, again = _run(mesh, run, specs, batches, None)
                is_deterministic = all(gather(again == bits))
    finally:
        mesh.destroy()
    everyone = [d for part in gather(differences) for d in part]
    return _judge(everyone, is_deterministic)


def differences(world: World, run: Resolved, batches: Sequence[Batch], folder: Path) -> list[Difference]:
    """What ``prove`` judges: every compared value of every rank."""
    mesh = build_mesh(run.plan, world.rank, world.device, timeout=timedelta(seconds=120))
    try:
        found, _ = _run(mesh, run, units_of(run), batches, folder)
    finally:
        mesh.destroy()
    return [d for part in gather(found) for d in part]


def _judge(differences: Sequence[Difference], is_deterministic: bool | None) -> Verdict:
    # Of the ranks that hold a piece of one tensor the worst counts.
    kinds = ("loss", "gradient", "norm", "update")

    def badness(d: Difference) -> float:
        return float("inf") if d.relative != d.relative else d.relative / d.allowed

    worst = [max((d for d in differences if d.kind == kind), key=badness) for kind in kinds]
    wrong = [d for d in differences if d.is_wrong]
    first = min(wrong, key=lambda d: (d.step, kinds.index(d.kind), -badness(d)), default=None)
    return Verdict(compared=len(differences), worst=tuple(worst), first=first, is_deterministic=is_deterministic)


def _run(
    mesh: Mesh, run: Resolved, specs: Sequence[UnitSpec], batches: Sequence[Batch], folder: Path | None
) -> tuple[list[Difference], str]:
    """The steps of one run: differences from the reference, and a hash of every bit this rank held."""
    engine = Engine(run, specs, mesh, example=batches[0].tokens_BS[:1])
    train = run.config.train
    found: list[Difference] = []
    bits = hashlib.blake2b(digest_size=16)
    for step, batch in enumerate(batches):
        compare = _Compare(run, specs, step, folder)
        mine = batch.rows(rows(run.plan, mesh))
        lr = rate(train, step)
        result = engine.train_step(
            microbatches(mine.tokens_BS, mine.targets_BS, run.plan, mesh, mine.starts_BS),
            valid_tokens=batch.valid_tokens,
            lr=lr,
            inspect=lambda: found.extend(compare.pieces(engine.pieces(["gradient"]), bits.update)),  # noqa: B023
        )
        bits.update(repr(result.loss).encode())
        found += compare.step(result)
        found += compare.pieces(engine.pieces(["weight"]), bits.update)
    return found, bits.hexdigest()


class _Compare:
    """Compares one step with its reference file; compares nothing where there is no folder."""

    def __init__(self, run: Resolved, specs: Sequence[UnitSpec], step: int, folder: Path | None) -> None:
        self._run = run
        self._step = step
        self._path = None if folder is None else folder / f"{step}.safetensors"
        self._allowed = tolerance(run.config.numerics.compute, has_experts="experts" in run.plan.families)
        self._specs = global_specs(specs)

    def step(self, result: StepResult) -> list[Difference]:
        if self._path is None:
            return []
        with safe_open(self._path, framework="pt") as file:
            loss, norm = float(file.get_tensor("loss")), float(file.get_tensor("grad_norm"))
        return [
            self._difference("loss", "", abs(result.loss - loss) / abs(loss), self._allowed.loss),
            self._difference("norm", "", abs(result.grad_norm - norm) / abs(norm), self._gradient_allowed),
        ]

    @property
    def _gradient_allowed(self) -> float:
        return self._allowed.gradient if self._step == 0 else self._allowed.gradient_later

    def pieces(self, pieces: Iterator[Piece], take: Callable[[bytes], None]) -> list[Difference]:
        found = []
        for piece in pieces:
            values = piece.values.detach().cpu().contiguous()
            take(values.numpy().tobytes())
            if self._path is not None:
                found.append(self._piece(self._path, piece, values))
        return found

    def _piece(self, path: Path, piece: Piece, values: Tensor) -> Difference:
        with safe_open(path, framework="pt") as file:
            reference = file.get_tensor(f"{piece.kind}/{piece.name}")
        if piece.kind == "weight":
            start = initial(self._specs[piece.name], piece.shape, self._run.config.train.seed)
            values = values - _part(start, piece)
            reference = reference - start
        ours, theirs = values.double(), _part(reference, piece).double()
        # A tensor that is all zeros in the reference must be so here.
        size = float(reference.double().norm()) or 1e-30
        relative = float((ours - theirs).norm()) / size
        if piece.kind == "weight":
            return self._difference("update", piece.name, relative, self._allowed.update)
        return self._difference("gradient", piece.name, relative, self._gradient_allowed)

    def _difference(self, kind: str, name: str, relative: float, allowed: float) -> Difference:
        return Difference(step=self._step, kind=kind, name=name, relative=relative, allowed=allowed)


def _part(tensor: Tensor, piece: Piece) -> Tensor:
    return tensor[piece.index].reshape(-1)[piece.low : piece.low + piece.values.numel()]
