"""An implementation of a layer, and how a module's layers get theirs.

Model code stays plain: what a run computes in a layer's place is decided here, once, when the module is built. The
table of a run is two lists (``engine.layer_table``). The first implementation that applies to a layer computes in its
place; then every one of the second list that applies goes round what is there, in the list's order, inner ones first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

Forward = Callable[..., Tensor]
"""What a module is called for."""


@dataclass(frozen=True, slots=True)
class Implementation:
    """One way to compute a layer.

    Attributes:
        name: what it does, for people.
        why: the setting that asks for it.
        applies: whether it computes this layer, by its path in the module and the layer.
        build: the layer's new forward, from its path, the layer, and the forward that it has so far.
        is_whole: it computes what the layers inside would; they get no implementation.
    """

    name: str
    why: str
    applies: Callable[[str, nn.Module], bool]
    build: Callable[[str, Any, Forward], Forward]
    is_whole: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """What computes one layer: implementations from the inside out; none where the layer runs as it is written."""

    path: str
    layer: str
    chosen: tuple[Implementation, ...]


def names_of(choices: Iterable[Choice]) -> str:
    """The implementations of layers on one line, each of them once."""
    return ", ".join(dict.fromkeys(row.name for choice in choices for row in choice.chosen))


def install(
    module: nn.Module, computing: Sequence[Implementation], around: Sequence[Implementation] = ()
) -> tuple[Choice, ...]:
    """Give each layer of the module its forward.

    Args:
        module: its layers are replaced in place.
        computing: the first that applies to a layer is taken.
        around: each that applies is taken, inner ones first.
    """
    choices: list[Choice] = []
    passed_over: set[nn.Module] = set()
    for path, layer in module.named_modules():
        if layer in passed_over:
            continue
        chosen = [row for row in computing if row.applies(path, layer)][:1]
        chosen += [row for row in around if row.applies(path, layer)]
        for row in chosen:
            replace_forward(layer, row.build(path, layer, layer.forward))
            passed_over.update(layer.children() if row.is_whole else ())
        choices.append(Choice(path, type(layer).__name__, tuple(chosen)))
    return tuple(choices)


def replace_forward(layer: nn.Module, forward: Any) -> None:  # noqa: ANN401
    """Give one layer another forward. An attribute of the instance is found before the class's method, which stays."""
    layer.forward = forward
