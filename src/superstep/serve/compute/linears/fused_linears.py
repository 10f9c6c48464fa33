"""Replaced products of a model's linears, with weights laid out once, from outside the model's code.

Each plain linear gets another forward. Linears that read the same input (queries, keys and values; gate and up) become
one product: a weight with few outputs does not keep all cores busy, and each call has a fixed cost.

The plain weights stay in memory, for three reasons: new weights are copied into them while the server runs; they are
views of one buffer, which cannot be freed in parts; and a tied embedding reads its rows there.

    O  outputs      I  inputs
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

from superstep.engine.layers.implementation import replace_forward
from superstep.model.custom.is_plain import is_plain_linear
from superstep.model.decoder import Attention, Head
from superstep.model.feedforward import FeedForward

Product = Callable[[Tensor], Tensor]
"""[..., I] to [..., O]: a linear, with its own copy of weight and bias."""

Pack = Callable[[Tensor, Tensor | None], Product | None]
"""Lays out weight [O, I] and bias [O]; the result keeps no view of either. None where a layer should not be replaced.
"""

ValueOf = Callable[[Tensor], Tensor]
"""The current or the future values of a parameter."""

ONE_INPUT: Mapping[type[nn.Module], tuple[str, ...]] = {
    Attention: ("q_proj", "k_proj", "v_proj"),
    FeedForward: ("gate_proj", "up_proj"),
}
"""Layers that read the same input, in the order of their calls."""


@dataclass(frozen=True, slots=True)
class _Row:
    """Linears that are computed as one product."""

    layers: tuple[nn.Linear, ...]
    pack: Pack
    product: _Shared

    def lay_out(self) -> bool:
        """Lay out their current weights as one product; False where the layers are not replaced."""
        product = self.make_product(lambda param: param)
        if product is not None:
            self.product.use(product)
        return product is not None

    @torch.no_grad()
    def make_product(self, value_of: ValueOf) -> Product | None:
        """The product of their weights with these values; None where a layer should not be replaced."""
        return self.pack(*join(self.layers, value_of))


class Linears:
    """The replaced linears of a module.

    Args:
        modules: their plain linears are replaced; one with a forward, hooks or options of its own is not.
        pack: lays out the weights.
        pack_head: the same for the head.
        first_packs: those of the weights as they are now, by the first linear of those that read one input.

    Attributes:
        changes: times that weights were replaced or dropped.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        pack: Pack,
        pack_head: Pack | None = None,
        first_packs: Mapping[nn.Linear, Pack] | None = None,
    ) -> None:
        self.changes = 0
        self._rows: list[_Row] = []
        for layers, is_head in [row for module in modules for row in rows_of(module, is_plain_linear)]:
            row = _Row(layers, (pack_head or pack) if is_head else pack, _Shared([x.out_features for x in layers]))
            first = (first_packs or {}).get(layers[0])
            if not (row.lay_out() if first is None else replace(row, pack=first).lay_out()):
                continue
            self._rows.append(row)
            for place, layer in enumerate(layers):
                replace_forward(layer, row.product.reader(place))

    def __len__(self) -> int:
        """Number of replaced layers."""
        return sum(len(row.layers) for row in self._rows)

    def product(self, layer: nn.Module) -> Product | None:
        """The joint product that computes a layer; None where it was not replaced."""
        return next((row.product.held for row in self._rows if layer in row.layers), None)

    def lay_out(self) -> None:
        """Lay out the weights again, after new ones were copied into the layers."""
        self.changes += 1
        for row in self._rows:
            row.lay_out()

    def beside(self, value_of: ValueOf) -> Callable[[], None]:
        """Lay out new weights before the layers have them; the returned function installs the products."""
        made = [(row.product, row.make_product(value_of)) for row in self._rows]

        def place() -> None:
            self.changes += 1
            for shared, product in made:
                assert product is not None, "what was laid out once can be again"
                shared.use(product)

        return place

    def drop(self) -> None:
        """Free the memory of the laid-out weights. Nothing may be computed until new ones are installed."""
        self.changes += 1
        for row in self._rows:
            row.product.drop()


class _Shared:
    """One product that several layers share; each reads its part. They are called in sequence with one input."""

    def __init__(self, sizes: list[int]) -> None:
        self._sizes = sizes
        self._product: Product | None = None
        self._input: Tensor | None = None
        self._parts: tuple[Tensor, ...] = ()

    def use(self, product: Product) -> None:
        """Compute with other weights from now on."""
        self._product = product
        self._input, self._parts = None, ()

    @property
    def held(self) -> Product | None:
        """The joint product of all layers."""
        return self._product

    def drop(self) -> None:
        """Drop the product."""
        self._product = None
        self._input, self._parts = None, ()

    def reader(self, place: int) -> Product:
        """The forward of the layer with index ``place``."""
        last = len(self._sizes) - 1

        def read(x: Tensor) -> Tensor:
            assert self._product is not None
            if last == 0:
                return self._product(x)
            if place == 0 or self._input is not x:
                self._input, self._parts = x, self._product(x).split(self._sizes, -1)
            part = self._parts[place]
            if place == last:  # keeps no tensor after the last layer
                self._input, self._parts = None, ()
            return part

        return read


def join(layers: Sequence[nn.Linear], value_of: ValueOf) -> tuple[Tensor, Tensor | None]:
    """The weights of some linears, stacked over outputs, and their biases, if any."""
    biases = [value_of(layer.bias).detach() for layer in layers if layer.bias is not None]
    weight_OI = torch.cat([value_of(layer.weight).detach() for layer in layers])
    return weight_OI, torch.cat(biases) if biases else None


def rows_of(module: nn.Module, is_taken: Callable[[nn.Module], bool]) -> Iterator[tuple[tuple[nn.Linear, ...], bool]]:
    """Linears that ``is_taken`` accepts, those of one input together, and whether they give the logits."""
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
    """Whether their weights can be stacked."""
    kinds = {(layer.in_features, layer.weight.dtype, layer.weight.device, layer.bias is None) for layer in layers}
    return len(kinds) == 1
