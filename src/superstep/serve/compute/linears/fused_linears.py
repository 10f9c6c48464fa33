"""The products of a model done in another way: with weights laid out for it once, from outside the model's code.

Each plain linear gets a forward of its own. Linears that read the same input (queries, keys and values; gate and up)
become one product: a weight of few rows cannot keep the cores busy, and a call costs the same for many rows as for few.

The plain weights stay where they are, for three reasons: new weights are copied into them while the server runs, they
are views of one buffer, which cannot be given back by pieces, and a tied embedding looks its rows up in them.

    O  outputs      I  inputs
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from superstep.engine.layers.implementation import replace_forward
from superstep.model.custom.is_plain import is_plain_linear
from superstep.model.decoder import Attention, Head
from superstep.model.feedforward import FeedForward

Product = Callable[[Tensor], Tensor]
"""[..., I] to [..., O]: a linear whose weight and bias it holds."""

Pack = Callable[[Tensor, Tensor | None], Product | None]
"""Lays out weight [O, I] and bias [O]; what it gives holds no view of either. None where a layer is best left alone."""

ValueOf = Callable[[Tensor], Tensor]
"""The values that a parameter has, or is to have."""

ONE_INPUT: Mapping[type[nn.Module], tuple[str, ...]] = {
    Attention: ("q_proj", "k_proj", "v_proj"),
    FeedForward: ("gate_proj", "up_proj"),
}
"""Layers of the model's code that are called with the same input, in the order of the calls."""


@dataclass(frozen=True, slots=True)
class _Row:
    """Linears that are computed as one."""

    layers: tuple[nn.Linear, ...]
    pack: Pack
    product: _Shared

    def lay_out(self) -> bool:
        """Bring their weights, as they are now, into the product. Whether there is one."""
        product = self.made(lambda param: param)
        if product is not None:
            self.product.use(product)
        return product is not None

    @torch.no_grad()
    def made(self, value_of: ValueOf) -> Product | None:
        """The product of their weights with these values; None where a layer is best left alone."""
        return self.pack(*join(self.layers, value_of))


class Linears:
    """The linears of a module whose products were replaced.

    Args:
        modules: whose plain linears change; one with a forward, hooks or options of its own stays as it is.
        pack: lays out the weights.
        pack_head: the same for the product that gives the logits.

    Attributes:
        changes: how often weights came or went.
    """

    def __init__(self, modules: Iterable[nn.Module], pack: Pack, pack_head: Pack | None = None) -> None:
        self.changes = 0
        self._rows: list[_Row] = []
        for layers, is_head in [row for module in modules for row in rows_of(module, is_plain_linear)]:
            row = _Row(layers, (pack_head or pack) if is_head else pack, _Shared([x.out_features for x in layers]))
            if not row.lay_out():
                continue
            self._rows.append(row)
            for place, layer in enumerate(layers):
                replace_forward(layer, row.product.reader(place))

    def __len__(self) -> int:
        """How many layers changed."""
        return sum(len(row.layers) for row in self._rows)

    def product(self, layer: nn.Module) -> Product | None:
        """What computes a layer, together with those of the same input; None where it was left alone."""
        return next((row.product.held for row in self._rows if layer in row.layers), None)

    def lay_out(self) -> None:
        """Lay the weights out again, after new ones have been copied into the layers."""
        self.changes += 1
        for row in self._rows:
            row.lay_out()

    def beside(self, value_of: ValueOf) -> Callable[[], None]:
        """Lay out weights that the layers do not have yet; what this gives puts the products into place."""
        made = [(row.product, row.made(value_of)) for row in self._rows]

        def place() -> None:
            self.changes += 1
            for shared, product in made:
                assert product is not None, "what was laid out once can be again"
                shared.use(product)

        return place

    def drop(self) -> None:
        """Give the memory of what was laid out back. Nothing is to be computed until there is something new."""
        self.changes += 1
        for row in self._rows:
            row.product.drop()


class _Shared:
    """One product, of which each of some layers reads its part. They are called one after the other with one input."""

    def __init__(self, sizes: list[int]) -> None:
        self._sizes = sizes
        self._product: Product | None = None
        self._input: Tensor | None = None
        self._parts: tuple[Tensor, ...] = ()

    def use(self, product: Product) -> None:
        """Compute with other weights from here on."""
        self._product = product
        self._input, self._parts = None, ()

    @property
    def held(self) -> Product | None:
        """The product of all layers."""
        return self._product

    def drop(self) -> None:
        """Compute nothing from here on."""
        self._product = None
        self._input, self._parts = None, ()

    def reader(self, place: int) -> Product:
        """The forward of the layer at a place."""
        last = len(self._sizes) - 1

        def read(x: Tensor) -> Tensor:
            assert self._product is not None
            if last == 0:
                return self._product(x)
            if place == 0 or self._input is not x:
                self._input, self._parts = x, self._product(x).split(self._sizes, -1)
            part = self._parts[place]
            if place == last:  # nothing is kept for longer than a layer takes
                self._input, self._parts = None, ()
            return part

        return read


def join(layers: Sequence[nn.Linear], value_of: ValueOf) -> tuple[Tensor, Tensor | None]:
    """The weights of some linears one above the other, and their biases, if they have some."""
    biases = [value_of(layer.bias).detach() for layer in layers if layer.bias is not None]
    weight_OI = torch.cat([value_of(layer.weight).detach() for layer in layers])
    return weight_OI, torch.cat(biases) if biases else None


def rows_of(module: nn.Module, is_taken: Callable[[nn.Module], bool]) -> Iterator[tuple[tuple[nn.Linear, ...], bool]]:
    """The linears that are taken, those of one input together, and whether they give the logits."""
    taken: set[nn.Module] = set()
    for parent in module.modules():
        layers = [getattr(parent, name) for name in ONE_INPUT.get(type(parent), ())]
        if layers and all(is_taken(layer) for layer in layers) and _fit([*map(_linear, layers)]):
            taken.update(layers)
            yield tuple(map(_linear, layers)), False
    heads = {unit.lm_head for unit in module.modules() if isinstance(unit, Head)}
    for layer in module.modules():
        if is_taken(layer) and layer not in taken:
            yield (_linear(layer),), layer in heads


def _linear(layer: nn.Module) -> nn.Linear:
    return cast(nn.Linear, layer)


def _fit(layers: list[nn.Linear]) -> bool:
    """Whether their weights can be one above the other."""
    kinds = {(layer.in_features, layer.weight.dtype, layer.weight.device, layer.bias is None) for layer in layers}
    return len(kinds) == 1
