"""A decoder with about a given number of parameters: a shape between published ones.

Depth, width and the inner width grow with size as between named Llamas: their logarithms are interpolated linearly over
log N. The width is then rounded to whole heads and the depth to whole layers.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from superstep.cost.program.flops import unit_parameters
from superstep.plan.model.shape import ModelShape
from superstep.plan.model.sizes.named_sizes import SHAPES

LADDER = ("demo", "bench", "llama3.2-1b", "llama3.2-3b", "llama3-8b", "llama3-70b", "llama3.1-405b")
"""Named sizes, smallest first."""
LEAST_SHAPE = 1e5
"""The least parameters of a shape."""


def non_embedding_parameters(shape: ModelShape) -> int:
    """Kaplan 2020's N: all parameters but the embedding and the head. A mixture counts all its experts."""
    _, *blocks, head = unit_parameters(shape)
    return sum(unit.on_rank(1) for unit in blocks) + head.vectors


def shape_of(params: float) -> ModelShape:
    """A decoder with about ``params`` non-embedding parameters: within a tenth from a million on."""
    rungs = [SHAPES[name] for name in LADDER]
    sizes = [math.log(non_embedding_parameters(shape)) for shape in rungs]
    x = math.log(params)

    def between(numbers: list[float]) -> float:
        """On the line through the two rungs around ``params``, or the last two at that end."""
        logs = np.log(numbers)
        rung = min(max(int(np.searchsorted(sizes, x)), 1), len(sizes) - 1)
        part = (x - sizes[rung - 1]) / (sizes[rung] - sizes[rung - 1])
        return float(np.exp(logs[rung - 1] + part * (logs[rung] - logs[rung - 1])))

    above = next((shape for shape, size in zip(rungs, sizes, strict=True) if size >= x - 1e-9), rungs[-1])
    ideal = between([shape.width for shape in rungs])
    head_dim = next((dim for dim, most in ((32, 256), (64, 2560)) if ideal < most), 128)
    # Powers of two that divide the heads are degrees of tensor parallelism.
    grain = next(heads for heads in (8, 4, 2, 1) if heads == 1 or ideal >= 2 * heads * head_dim)
    heads = max(1, round(ideal / (grain * head_dim))) * grain
    width = heads * head_dim
    ratio = between([shape.ffn / shape.width for shape in rungs])
    ffn = max(32, round(width * ratio / 32) * 32)
    shape = replace(above, layers=1, width=width, heads=heads, kv_heads=math.gcd(heads, 8), head_dim=head_dim, ffn=ffn)
    return replace(shape, layers=max(1, round(params / non_embedding_parameters(shape))))
