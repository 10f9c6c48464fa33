"""UnitValues: the outputs of units on a rank, and their gradients, each held until its last use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

Key = tuple[int, int]
"""The number of a value, which is the output of unit ``number - 1``, and a microbatch."""


class UnitValues:
    """Values in one run of a program, computed here or received.

    Args:
        uses: for each microbatch, how often this rank uses each value: in units that take it, and to send it on.
    """

    def __init__(self, uses: Sequence[Mapping[int, int]]) -> None:
        self._uses = uses
        self._outputs: dict[Key, tuple[Tensor, int]] = {}
        self._gradients: dict[Key, Tensor] = {}

    def hold(self, value: int, m: int, output: Tensor) -> None:
        """Hold a value until its last use."""
        self._outputs[value, m] = output, self._uses[m][value]

    def use(self, value: int, m: int) -> Tensor:
        """Return a value and count one use; it is forgotten after the last. Raises KeyError if it is not held."""
        output, left = self._outputs.pop((value, m))
        if left > 1:
            self._outputs[value, m] = output, left - 1
        return output

    def add_gradient(self, value: int, m: int, gradient: Tensor) -> None:
        """Add the gradient from one unit that takes the value, or from later ranks; ``check`` holds their order."""
        before = self._gradients.get((value, m))
        self._gradients[value, m] = gradient if before is None else before + gradient

    def take_gradient(self, value: int, m: int) -> Tensor:
        """Return the whole gradient of a value and stop holding it."""
        return self._gradients.pop((value, m))
