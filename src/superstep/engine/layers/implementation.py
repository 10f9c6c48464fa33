"""An implementation of a layer, and its installation in a module.

Model code stays plain: the implementation of each layer is chosen here, once, when the module is built. A run's table
is two lists (``engine.layer_table``). The first implementation that applies to a layer replaces it; then every one of
the second list that applies wraps the result, in the list's order, inner ones first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

Forward = Callable[..., Tensor]
"""A module's forward."""


@dataclass(frozen=True, slots=True)
class Implementation:
    """One way to compute a layer.

    Attributes:
        name: for display.
        why: the setting that chooses it.
        applies: whether it computes this layer, by its path in the module and the layer.
        build: the layer's new forward, from its path, the layer, and its forward so far.
        is_whole: it computes the inner layers as well; they get no implementation.
    """

    name: str
    why: str
    applies: Callable[[str, nn.Module], bool]
    build: Callable[[str, Any, Forward], Forward]
    is_whole: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """The choice for one layer: implementations from the inside out; empty where the layer runs its own code."""

    path: str
    layer: str
    chosen: tuple[Implementation, ...]


def names_of(choices: Iterable[Choice]) -> str:
    """The implementations of layers on one line, each of them once."""
    return ", ".join(dict.fromkeys(row.name for choice in choices for row in choice.chosen))


def install(
    module: nn.Module, computing: Sequence[Implementation], around: Sequence[Implementation] = ()
) -> tuple[Choice, ...]:
    """Set the forward of each layer of the module.

    Args:
        module: its layers are changed in place.
        computing: the first that applies to a layer is used.
        around: all that apply are used, inner ones first.
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
    """Set a layer's forward. Python finds the instance's attribute before the class's method, which stays."""
    layer.forward = forward
