"""The part of each tensor of random numbers that a rank draws, from the whole tensor's shape and the shape held here.

A dim that is smaller here than in the whole tensor is cut: over tp in contiguous parts, or it is the sequence, whose
positions ``plan.sharding.sequence`` gives. Between two linear layers that are cut over tp=2, a tensor of 4 tokens of 6
numbers is held as 4 rows of 3 consecutive elements; on the second rank these begin at the elements 3, 9, 15 and 21.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from superstep.comm.mesh import Mesh
from superstep.engine.values.value_shapes import example_rows
from superstep.errors import ConfigError
from superstep.model.custom.inspect import find_drawn
from superstep.model.lora import DROPOUT, AdaptedLinear
from superstep.model.meta import on_meta
from superstep.model.unit import Fields, UnitSpec
from superstep.numerics.noise import FindHeld, HeldElements, SamplePlace
from superstep.plan.mesh import Coordinate, MeshShape
from superstep.plan.resolution.resolve import Resolved
from superstep.plan.sharding.sequence import positions


def find_place(run: Resolved, mesh: Mesh, step: int | None, count: int, first: int) -> SamplePlace:
    """The place of the random numbers of one of a rank's microbatches.

    Args:
        run: the resolved run.
        mesh: the launched ranks.
        step: from 0; None in evaluation, whose numbers are the same at every step.
        count: microbatches of the rank.
        first: the number of the microbatch's first row in the global batch.
    """
    return SamplePlace(
        seed=run.config.train.seed,
        step=step or 0,
        sample=first,
        samples=count * run.plan.microbatch * mesh.shape.dp,
        is_training=step is not None,
    )


def find_held(
    run: Resolved, specs: Sequence[UnitSpec], mesh: Mesh, compute: torch.dtype, example: Tensor | Fields | None
) -> FindHeld:
    """The function that finds the elements of random tensors that a rank holds.

    Args:
        run: the resolved run.
        specs: the model's units.
        mesh: the launched ranks.
        compute: the dtype of activations.
        example: one row of input, or of each field, if it is no row of tokens.
    """
    tokens, shape = run.config.data.sequence_tokens, mesh.shape
    whole: dict[str, torch.Size] = {}
    if run.decoder is not None:
        stream = torch.Size((tokens, run.decoder.width))
        adapted = _find_adapted(specs, tokens) if run.config.lora is not None and run.config.lora.dropout else {}
        return CutNoise(lambda name: adapted.get(name, stream), shape, mesh.at, tokens)
    if shape.tp * shape.cp > 1:
        with unset_fake_temporarily():
            whole = find_drawn(specs, example_rows(run) if example is None else example, compute, "the model")
    return CutNoise(whole.get, shape, mesh.at, tokens)


def _find_adapted(specs: Sequence[UnitSpec], tokens: int) -> dict[str, torch.Size]:
    """The whole shape of the input of each linear with an adapter, by the name of its dropout."""
    shapes: dict[str, torch.Size] = {}
    for spec in specs:
        with on_meta():
            module = spec.build()
        shapes |= {
            f"{spec.name}.{path}.{DROPOUT}": torch.Size((tokens, layer.in_features))
            for path, layer in module.named_modules()
            if isinstance(layer, AdaptedLinear)
        }
    return shapes


class CutNoise:
    """Finds the elements of random tensors that one rank holds: a ``FindHeld`` for tensors that are cut over tp and cp.

    Args:
        whole: from the name of a draw to the shape of a sample's whole tensor, if that is known.
        mesh: the degrees.
        at: the rank's place.
        tokens: of a whole sequence.
    """

    def __init__(self, whole: Callable[[str], torch.Size | None], mesh: MeshShape, at: Coordinate, tokens: int) -> None:
        self._whole = whole
        self._mesh = mesh
        self._at = at
        self._tokens = tokens
        self._known: dict[tuple[torch.Size | None, torch.Size, torch.device], HeldElements] = {}

    def __call__(self, name: str, shape: torch.Size, device: torch.device) -> HeldElements:
        """The elements of a draw that are held here, as a part of a sample's tensor with this ``shape``.

        Raises:
            ConfigError: the shape does not say which elements these are.
        """
        is_whole = self._mesh.cp * self._mesh.tp == 1
        whole = shape if is_whole else self._whole(name)
        key = whole, shape, device
        if key not in self._known:
            self._known[key] = self._find(name, whole, shape, device)
        return self._known[key]

    def _find(self, name: str, whole: torch.Size | None, shape: torch.Size, device: torch.device) -> HeldElements:
        held = None if whole is None or len(whole) != len(shape) else self._find_places(whole, shape)
        if held is None or whole is None:
            of_one = "none" if whole is None else f"[B, {', '.join(map(str, whole))}]"
            raise ConfigError(
                f"'{name}' draws for a tensor [B, {', '.join(map(str, shape))}], one device for {of_one}, and this "
                "rank's part of that is not known; draw for tensors with the samples first, of which plan.cp cuts the "
                "sequence, and plan.tp the sequence or one other dim in equal parts."
            )
        return _rows(whole, held, device)

    def _find_places(self, whole: Sequence[int], shape: Sequence[int]) -> list[Sequence[int]] | None:
        """The indices that are held along each dim; None if a size fits no cut. With cp, the sequence is the first cut
        dim that is as long as a sequence.
        """
        cp, tp = self._mesh.cp, self._mesh.tp
        places: list[Sequence[int]] = []
        for size, here in zip(whole, shape, strict=True):
            is_sequence = cp > 1 and size == self._tokens and all(isinstance(before, range) for before in places)
            if size == here:
                places.append(range(size))
            elif is_sequence and here in (size // cp, size // (cp * tp)):
                ways = size // cp // here
                places.append(positions(size, cp=cp, rank=self._at.cp, tp=ways, part=self._at.tp if ways > 1 else 0))
            elif size == here * tp:
                places.append(range(self._at.tp * here, (self._at.tp + 1) * here))
            else:
                return None
        return places


def _rows(whole: Sequence[int], held: Sequence[Sequence[int]], device: torch.device) -> HeldElements:
    """The held elements as rows of consecutive elements of the whole tensor, each row as long as possible.

    Args:
        whole: the dims of a sample's whole tensor.
        held: the indices that are held along each dim.
        device: of the result.
    """
    cut = [dim for dim, (size, places) in enumerate(zip(whole, held, strict=True)) if len(places) < size]
    last = cut[-1] if cut else -1
    # A contiguous part of the last cut dim is one row, and with other places each is one.
    is_one = last >= 0 and isinstance(held[last], range)
    each = last if is_one else last + 1
    firsts = torch.zeros(1, dtype=torch.int64)
    for dim in range(each):
        step = math.prod(whole[dim + 1 :])
        firsts = (firsts[:, None] + torch.tensor(held[dim]) * step).flatten()
    width = math.prod(whole[each:])
    if is_one:
        inner = math.prod(whole[last + 1 :])
        firsts, width = firsts + held[last][0] * inner, len(held[last]) * inner
    return HeldElements(firsts.to(device), width)
