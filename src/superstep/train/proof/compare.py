"""Comparing one step of a layout with a yardstick: files of what the same step gave elsewhere, a tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from safetensors import safe_open
from torch import Tensor

from superstep.engine.engine import StepResult
from superstep.model.unit import ParamSpec, initial
from superstep.numerics.tolerance import Tolerance
from superstep.state.tensor_piece import TensorPiece

FEW = 256
"""Elements of a tensor below which roundings need not average out: a norm over a head, where gradients cancel."""

CAP = 3.0
"""Noise of a large tensor, in tolerances, that is believed."""

Against = Literal["the reference", "one rank"]
KINDS = ("loss", "gradient", "scale", "norm", "moment", "square", "update")
"""What is compared in each step, in the order in which it is computed."""

KIND_OF = {"gradient": "gradient", "weight": "update", "exp_avg": "moment", "exp_avg_sq": "square"}
"""The kind that a piece of the state is compared as."""


@dataclass(frozen=True, slots=True)
class Yardstick:
    """What a layout is compared with: a file for each step, and how far it may lie from that.

    Attributes:
        noise: two folders of such files, whose distance is what the dtype itself makes of a tensor; None where the
            tolerance says enough.
        share: of that distance, which is allowed where it is more than the tolerance.
    """

    against: Against
    folder: Path
    allowed: Tolerance
    noise: tuple[Path, Path] | None = None
    share: float = 1.0

    def most(self, kind: str, step: int, noise: float, elements: int) -> float:
        """What is allowed of a tensor whose noise was measured. A tensor of few elements may have any; of others, noise
        that is far beyond the tolerance is a fault of the engine on one rank.
        """
        allowed = self.allowed.of(kind, is_first=step == 0)
        noise = noise if elements < FEW else min(noise, CAP * allowed)
        return max(allowed, self.share * noise)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One compared value of one step.

    Attributes:
        kind: one of ``KINDS``: loss, gradient, the scale of all gradients together, their norm before clipping, Adam's
            moments (the first is a sum of the gradients that left the clip, the second of their squares) or update.
        name: the tensor's global name; empty for the loss, the scale and the norm.
        relative: how far the layout lies from the yardstick, as ``numerics.tolerance`` defines it.
        allowed: the tolerance.
        against: the yardstick.
        ratio: the factor that comes nearest to turning the yardstick's into ours; NaN where that is all zeros.
        beside: how far ours lies from that multiple, relative to it.
        square: the sum of squares of the yardstick's.
    """

    step: int
    kind: str
    name: str
    relative: float
    allowed: float
    against: Against = "the reference"
    ratio: float = float("nan")
    beside: float = float("nan")
    square: float = 0.0

    @property
    def is_wrong(self) -> bool:
        """Whether it is more than rounding; a NaN is."""
        return not self.relative <= self.allowed

    @property
    def badness(self) -> float:
        """The difference as a share of what is allowed; a NaN is worse than any."""
        return float("inf") if self.relative != self.relative else self.relative / self.allowed

    def describe(self) -> str:
        """One line for a person."""
        what = self.kind if not self.name else f"{self.kind} of {self.name}"
        what = "scale of all gradients" if self.kind == "scale" else what
        beside = "" if self.against == "the reference" else f" from {self.against}'s"
        return f"step {self.step}: {what} differs{beside} by {self.relative:.2e}, allowed is {self.allowed:.0e}"


class Compare:
    """Compares one step with each yardstick; with none, nothing.

    Args:
        specs: what each global tensor is.
        seed: of the first values, which updates are counted from.
        step: the step, from 0 on.
        yardsticks: what to compare with.
    """

    def __init__(self, specs: dict[str, ParamSpec], seed: int, step: int, yardsticks: Sequence[Yardstick]) -> None:
        self._specs = specs
        self._seed = seed
        self._step = step
        self._yardsticks = yardsticks
        self._files: dict[Path, Any] = {}

    def step(self, result: StepResult) -> list[Difference]:
        """The loss and the norm."""
        differences = []
        for yard in self._yardsticks:
            with safe_open(yard.folder / f"{self._step}.safetensors", framework="pt") as file:
                loss, norm = float(file.get_tensor("loss")), float(file.get_tensor("grad_norm"))
            for kind, ours, theirs in (("loss", result.loss, loss), ("norm", result.grad_norm, norm)):
                relative = abs(ours - theirs) / (abs(theirs) or 1e-30)
                differences.append(
                    self._difference(yard, kind, "", relative, yard.allowed.of(kind, is_first=self._step == 0))
                )
        return differences

    def pieces(self, pieces: Iterator[TensorPiece], take: Callable[[TensorPiece, Tensor], None]) -> list[Difference]:
        """Each piece, which ``take`` is given as well, on the CPU."""
        differences = []
        for piece in pieces:
            values = piece.values.detach().cpu().contiguous()
            take(piece, values)
            differences += [self._piece(yard, piece, values) for yard in self._yardsticks]
        return differences

    def _piece(self, yard: Yardstick, piece: TensorPiece, values: Tensor) -> Difference:
        whole, ours = self._read(yard.folder, piece), values.double()
        if piece.kind == "weight":
            start = initial(self._specs[piece.name], piece.shape, self._seed).double()
            ours, whole = ours - part_of(start, piece), whole - start
        theirs = part_of(whole, piece)
        # A tensor that is all zeros in the reference must be so here.
        size = float(whole.norm()) or 1e-30
        noise = 0.0
        if yard.noise is not None:
            noise = float((self._read(yard.noise[0], piece) - self._read(yard.noise[1], piece)).norm()) / size
        relative = float((ours - theirs).norm()) / size
        scale = float(theirs.square().sum())
        ratio = float(ours @ theirs) / scale if scale else float("nan")
        length = abs(ratio) * scale**0.5
        beside = float((ours - ratio * theirs).norm()) / length if length else float("nan")
        kind = KIND_OF[piece.kind]
        allowed = yard.most(kind, self._step, noise, whole.numel())
        return replace(
            self._difference(yard, kind, piece.name, relative, allowed), ratio=ratio, beside=beside, square=scale
        )

    def _read(self, folder: Path, piece: TensorPiece) -> Tensor:
        if folder not in self._files:
            self._files[folder] = safe_open(folder / f"{self._step}.safetensors", framework="pt")
        whole: Tensor = self._files[folder].get_tensor(f"{piece.kind}/{piece.name}")
        return whole.double()

    def _difference(
        self,
        yard: Yardstick,
        kind: str,
        name: str,
        relative: float,
        allowed: float,
    ) -> Difference:
        return Difference(
            step=self._step,
            kind=kind,
            name=name,
            relative=relative,
            allowed=allowed,
            against=yard.against,
        )


def scales(differences: Sequence[Difference], yard: Yardstick) -> Iterator[Difference]:
    """Of each step the factor that comes nearest to turning all the yardstick's gradients into ours: what every rank
    holds counts. Roundings go up as often as down, so in a sum over all elements little is left of them.
    """
    mine = [d for d in differences if d.kind == "gradient" and d.against == yard.against]
    for step in sorted({d.step for d in mine}):
        those = [d for d in mine if d.step == step and d.square]
        whole = sum(d.square for d in those)
        ratio = sum(d.ratio * d.square for d in those) / whole if whole else 1.0
        allowed = yard.allowed.of("scale", is_first=step == 0)
        yield Difference(
            step=step,
            kind="scale",
            name="",
            relative=abs(ratio - 1),
            allowed=allowed,
            against=yard.against,
            ratio=ratio,
        )


def part_of(tensor: Tensor, piece: TensorPiece) -> Tensor:
    """Of a whole tensor what a piece is."""
    return tensor[piece.index].reshape(-1)[piece.low : piece.low + piece.values.numel()]
