"""measure_launch: seconds of an operation with almost nothing to compute.

The measured work is a block of our own decoder with one short sequence and a narrow stream, forward and backward, as
the engine runs it, divided by the number of its operations: Python, autograd and the dispatcher, with negligible
kernels. In a real step kernels run in between, after which a CPU finds code and objects in no near cache; so after
every layer the caches are overwritten. An operation of 10 µs in a loop then takes 20.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from superstep.engine.layers.grad_accumulation import GradientSums, Sum, accumulating_straight
from superstep.engine.layers.implementation import Forward, install, replace_forward
from superstep.engine.measure.probe_kernels import CacheFlusher, TimingOptions
from superstep.model.decoder import Block
from superstep.model.rope import Rope
from superstep.plan.model.sizes.named_sizes import SHAPES


class _Counter(TorchDispatchMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        self.operations += func.namespace != "prim"
        return func(*args, **(kwargs or {}))


class _Pausing:
    """A clock that stops during sweeps.

    Args:
        gauge: with the clock.
    """

    def __init__(self, gauge: TimingOptions) -> None:
        self._clock, self._sweep = gauge.clock, CacheFlusher(gauge.device)
        self._away_s = 0.0

    def __call__(self) -> float:
        return self._clock() - self._away_s

    def sweep(self) -> None:
        """Overwrite the caches."""
        start_s = self._clock()
        self._sweep()
        self._away_s += self._clock() - start_s

    def after(self, forward: Forward) -> Forward:
        """A layer's forward with a sweep after it."""

        def sweep(x: torch.Tensor) -> torch.Tensor:
            out = forward(x)
            self.sweep()
            return out

        return sweep


class _Sums(GradientSums):
    """Signals when a gradient's product is done."""

    def __init__(self) -> None:
        super().__init__()
        self.then: Callable[[], None] = lambda: None

    def do(self, add: Sum) -> None:
        super().do(add)
        self.then()


def launch_s(gauge: TimingOptions) -> float:
    """Seconds from the start of one operation to that of the next."""
    shape = SHAPES["tiny"]
    device = gauge.device.torch
    clock = _Pausing(gauge)
    with device:
        block: nn.Module = Block(shape, Rope(shape))
        x = torch.ones(1, 4, shape.width, requires_grad=True)
        gradient = torch.ones(1, 4, shape.width)
    for parameter in block.parameters():
        parameter.grad = torch.zeros_like(parameter)
    sums = _Sums()
    install(block, accumulating_straight(sums))

    def there_and_back() -> None:
        block(x).backward(gradient)

    there_and_back()
    with _Counter() as counter:
        there_and_back()
    for layer in block.modules():
        if next(layer.children(), None) is None:
            replace_forward(layer, clock.after(layer.forward))
    sums.then = clock.sweep
    return replace(gauge, clock=clock).seconds(there_and_back, calls=counter.operations)
