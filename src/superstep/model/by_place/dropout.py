"""Dropout modules that draw by place (``numerics.noise``) in place of torch's random numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from superstep.model.by_place.batch_norm import BatchNorm, normalise_by_place
from superstep.numerics.noise import CurrentNoise, FindHeld, Noise, SamplePlace, hold_whole

DRAWN_DIMS: Mapping[type[nn.Module], int | None] = {
    nn.Dropout: None,
    nn.Dropout1d: 2,
    nn.Dropout2d: 2,
    nn.Dropout3d: 2,
}
"""Modules that drop by place, with the first dims of their input that have draws of their own; None for all."""


def is_dropout(layer: nn.Module) -> bool:
    return type(layer) in DRAWN_DIMS


def draws_noise(module: nn.Module, takes: tuple[str, ...]) -> bool:
    """Whether a unit draws: by a dropout module, or by the argument ``noise``."""
    return "noise" in takes or any(map(is_dropout, module.modules()))


def drop_by_place(path: str, layer: nn.Module, current: CurrentNoise) -> Callable[[Tensor], Tensor]:
    """The forward of a dropout module, which draws under its path as the name."""
    p = float(layer.p) if layer.training else 0.0  # type: ignore[arg-type]
    dims = DRAWN_DIMS[type(layer)]

    def forward(x: Tensor) -> Tensor:
        return x if current.noise is None else current.noise.dropout(path, x, p, dims=dims)

    return forward


def compute_by_place(module: nn.Module) -> CurrentNoise:
    """Let the dropout modules and batch norms of a module compute by place. They take the noise and the place of each
    forward from the result: run the module by ``run_with_noise``.
    """
    current = CurrentNoise()
    for path, layer in module.named_modules():
        if is_dropout(layer):
            layer.forward = drop_by_place(path, layer, current)
        elif isinstance(layer, BatchNorm):
            layer.forward = normalise_by_place(layer, current)  # type: ignore[assignment, method-assign]
    return current


def run_with_noise(
    module: Callable[..., Tensor],
    current: CurrentNoise,
    inputs: Sequence[Tensor],
    given: Mapping[str, Any],
    place: SamplePlace,
    prefix: str = "",
    held: FindHeld = hold_whole,
) -> Tensor:
    """A unit's forward with its keyword arguments, among them ``noise`` where it takes that.

    Args:
        module: the unit's.
        current: of its dropout modules.
        inputs: its arguments, samples first.
        given: keyword arguments.
        place, prefix, held: as ``numerics.noise.Noise`` has them.
    """
    noise = Noise(place, prefix, held, samples=len(inputs[0]))
    with current.during(noise):
        return module(*inputs, **{name: noise if name == "noise" else value for name, value in given.items()})
