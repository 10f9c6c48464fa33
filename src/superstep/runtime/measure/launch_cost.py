"""measure_launch: what an operation takes where there is next to nothing to compute.

That is a block of our own decoder with one short sequence and a narrow stream, forward and backward, as the engine
drives it, over the number of its operations: Python, autograd and the dispatcher, and no kernel to speak of.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from superstep.model.decoder import Block
from superstep.model.rope import Rope
from superstep.plan.model.shape import SHAPES
from superstep.runtime.accumulate import Sums, accumulate_straight
from superstep.runtime.measure.kernels import Gauge


class _Counter(TorchDispatchMode):
    """How many operations pass by."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        self.operations += func.namespace != "prim"
        return func(*args, **(kwargs or {}))


def launch_s(gauge: Gauge) -> float:
    """Seconds from the start of one operation to that of the next."""
    shape = SHAPES["tiny"]
    device = gauge.device.torch
    with device:
        block: nn.Module = Block(shape, Rope(shape))
        x = torch.ones(1, 4, shape.width, requires_grad=True)
        gradient = torch.ones(1, 4, shape.width)
    for parameter in block.parameters():
        parameter.grad = torch.zeros_like(parameter)
    accumulate_straight(block, Sums())

    def there_and_back() -> None:
        block(x).backward(gradient)

    there_and_back()
    with _Counter() as counter:
        there_and_back()
    return gauge.seconds(there_and_back, calls=counter.operations)
