"""Comparison of one step of a layout with a yardstick: files with the same step's results elsewhere, tensor
by tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor

from superstep.engine.engine import StepResult
from superstep.errors import ConfigError
from superstep.kernels.blocks.dynamic_map import decode, dynamic_map
from superstep.model.unit import ParamSpec, initial
from superstep.numerics.narrow.narrow_update import is_signed
from superstep.numerics.tolerance import Tolerance, same_rounding, tolerance
from superstep.plan.resolution.resolve import Resolved
from superstep.state.tensor_piece import TensorPiece

FEW = 256
"""Elements of a tensor below which roundings need not average out, such as a norm over a head with cancelling
gradients.
"""

BF16_BITS = 8
"""Bits of a number's magnitude."""

CAP = 3.0
"""Largest noise of a large tensor, in tolerances."""

Against = Literal["the reference", "one rank"]
KINDS = ("loss", "gradient", "scale", "norm", "moment", "square", "update")
"""Compared kinds, in the order of computation within a step."""

KIND_OF = {"gradient": "gradient", "weight": "update", "exp_avg": "moment", "exp_avg_sq": "square"}
"""The kind under which a piece of the state is compared."""


@dataclass(frozen=True, slots=True)
class Yardstick:
    """Results to compare with: a file for each step, and the allowed distance.

    Attributes:
        noise: two folders of such files; their distance is the dtype's rounding of a tensor. None where the tolerance
            suffices.
        share: of that distance, allowed where it is more than the tolerance.
    """

    against: Against
    folder: Path
    allowed: Tolerance
    noise: tuple[Path, Path] | None = None
    share: float = 1.0

    def most(self, kind: str, step: int, noise: float, elements: int) -> float:
        """Allowed difference of a tensor with measured noise. For a tensor with few elements the noise is not limited;
        for others, noise far above the tolerance would be the engine's fault on one rank.
        """
        allowed = self.allowed.of(kind, is_first=step == 0)
        noise = noise if elements < FEW else min(noise, CAP * allowed)
        return max(allowed, self.share * noise)


def reference_yardstick(run: Resolved, folder: Path) -> Yardstick:
    """The reference in ``folder``, with a run's tolerance."""
    has_experts, config = "experts" in run.plan.families, run.config
    allowed = tolerance(config.numerics.compute, has_experts=has_experts, moments=config.train.moments)
    return Yardstick("the reference", folder, allowed)


def has_same_roundings(run: Resolved) -> bool:
    """Whether a layout rounds to the compute dtype as one rank does: no product or exchange is cut."""
    mesh = run.plan.mesh
    return mesh.tp == mesh.cp == mesh.ep == 1


def yardsticks_of(run: Resolved, folder: Path, one_rank: Path | None) -> Iterator[Yardstick]:
    """What a run is compared with: the reference in ``folder``, and one rank of the engine, where it has run."""
    plain = reference_yardstick(run, folder)
    if one_rank is None:
        yield plain
        return
    noise = (one_rank, folder)
    yield replace(plain, noise=noise, share=2.0)
    if has_same_roundings(run):
        yield Yardstick("one rank", one_rank, same_rounding(run.config.train.moments), noise=noise, share=0.25)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One compared value of one step.

    Attributes:
        kind: one of ``KINDS``: loss, gradient, the scale of all gradients together, their norm before clipping, Adam's
            moments (the first sums clipped gradients, the second their squares) or update.
        name: the tensor's global name; empty for the loss, the scale and the norm.
        relative: distance from the yardstick, as ``numerics.tolerance`` defines it.
        allowed: the tolerance.
        against: the yardstick.
        ratio: the best factor from the yardstick's value to ours; NaN where that is all zeros.
        beside: our distance from that multiple, relative to it.
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
        """Whether it exceeds the tolerance; NaN does."""
        return not self.relative <= self.allowed

    @property
    def badness(self) -> float:
        """The difference as a share of the tolerance; NaN is worse than any."""
        return float("inf") if self.relative != self.relative else self.relative / self.allowed

    def describe(self) -> str:
        """The difference in one line."""
        what = self.kind if not self.name else f"{self.kind} of {self.name}"
        what = "scale of all gradients" if self.kind == "scale" else what
        beside = "" if self.against == "the reference" else f" from {self.against}'s"
        return f"step {self.step}: {what} differs{beside} by {self.relative:.2e}, allowed is {self.allowed:.0e}"


class Compare:
    """Compares one step with each yardstick.

    Args:
        specs: of each global tensor.
        seed: of the initial values, from which updates are counted.
        step: the step, from 0 on.
        yardsticks: to compare with.
    """

    def __init__(self, specs: dict[str, ParamSpec], seed: int, step: int, yardsticks: Sequence[Yardstick]) -> None:
        self._specs = specs
        self._seed = seed
        self._step = step
        self._yardsticks = yardsticks
        self._files: dict[Path, Any] = {}

    def step(self, result: StepResult) -> list[Difference]:
        """Compare the loss and the norm.

        Raises:
            ConfigError: the step overflowed in fp16 and was skipped.
        """
        if result.is_skipped:
            raise ConfigError(
                f"step {self._step + 1} of the proof overflows in fp16, and would be skipped; lower loss_scale.start "
                "until it does not."
            )
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

    def piece(self, piece: TensorPiece) -> list[Difference]:
        """Compare a piece, with its numbers on the host."""
        return [self._piece(yard, piece) for yard in self._yardsticks]

    def _piece(self, yard: Yardstick, piece: TensorPiece) -> Difference:
        whole, ours = self._read(yard.folder, piece), piece.values.double()
        if piece.kind == "weight":
            start = part_of(self._first_values(piece), piece)
            ours = ours - start.to(piece.values.dtype).double()
        theirs = part_of(whole, piece)
        # A tensor of zeros in the reference must be zero here.
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
        if piece.kind == "weight" and yard.against == "the reference" and not self._specs[piece.name].is_frozen:
            allowed += measure_roundings(piece.values, self._step + 1) / size
        return replace(
            self._difference(yard, kind, piece.name, relative, allowed), ratio=ratio, beside=beside, square=scale
        )

    def _read(self, folder: Path, piece: TensorPiece) -> Tensor:
        """The whole tensor of a piece; of weights the distance from their initial values, in the dtype that they have
        there.
        """
        if folder not in self._files:
            self._files[folder] = safe_open(folder / f"{self._step}.safetensors", framework="pt")
        whole: Tensor = self._files[folder].get_tensor(f"{piece.kind}/{piece.name}")
        if piece.kind != "weight":
            return whole.double()
        return whole.double() - self._first_values(piece).to(whole.dtype).double()

    def _first_values(self, piece: TensorPiece) -> Tensor:
        return initial(self._specs[piece.name], piece.shape, self._seed)

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
    """For each step, the best common factor from the yardstick's gradients to ours, over all ranks. Roundings have both
    signs, so they cancel in a sum over all elements.
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


def measure_roundings(weights: Tensor, steps: int) -> float:
    """Twice the expected norm of what stochastic roundings of weights in bf16 change in some steps; 0 in fp32.

    The place of a number between two neighbours is even, so that the mean square of an error is a sixth of their
    distance's square.
    """
    if weights.dtype != torch.bfloat16:
        return 0.0
    spacing = torch.ldexp(torch.ones(()), torch.frexp(weights.float()).exponent - BF16_BITS)
    return 2 * float(spacing.double().norm()) * math.sqrt(steps / 6)


def decode_moments(pieces: Iterable[TensorPiece]) -> Iterator[TensorPiece]:
    """The pieces, but of moments in 8 bits the numbers, instead of codes and the scales that follow them."""
    codes: TensorPiece | None = None
    for piece in pieces:
        if codes is not None:
            numbers = decode(codes.values, piece.values, dynamic_map(is_signed=is_signed(codes.kind)))
            yield replace(codes, values=numbers)
            codes = None
        elif piece.kind in ("exp_avg", "exp_avg_sq") and piece.values.dtype == torch.uint8:
            codes = piece
        else:
            yield piece


def part_of(tensor: Tensor, piece: TensorPiece) -> Tensor:
    """The part of a whole tensor that a piece holds."""
    return tensor[piece.index].reshape(-1)[piece.low : piece.low + piece.values.numel()]
