"""UnitValues: what units return on a rank and the gradients of it, each held until its last use."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

Key = tuple[int, int]
"""A value, which is what unit ``value - 1`` returns, and a microbatch."""


class UnitValues:
    """Values in one run of a program, computed here or received.

    Args:
        uses: how often this rank uses each value: in units that take it, and to send it on.
    """

    def __init__(self, uses: Mapping[int, int]) -> None:
        self._uses = uses
        self._outputs: dict[Key, tuple[Tensor, int]] = {}
        self._gradients: dict[Key, Tensor] = {}

    def hold(self, value: int, m: int, output: Tensor) -> None:
        """Hold a value until its last use."""
        self._outputs[value, m] = output, self._uses[value]

    def use(self, value: int, m: int) -> Tensor:
        """The value, for one use."""
        output, left = self._outputs.pop((value, m))
        if left > 1:
            self._outputs[value, m] = output, left - 1
        return output

    def add_gradient(self, value: int, m: int, gradient: Tensor) -> None:
        """Add the gradient from one unit that takes the value, or from later ranks; ``check`` holds their order."""
        before = self._gradients.get((value, m))
        self._gradients[value, m] = gradient if before is None else before + gradient

    def take_gradient(self, value: int, m: int) -> Tensor:
        """The whole gradient of the value."""
        return self._gradients.pop((value, m))
