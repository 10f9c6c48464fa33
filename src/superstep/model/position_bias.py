"""The modules that give a layer's attention its position bias (``kernels.position_bias``).

N  query heads       R  buckets
H  width of a head   D  the distance from which on all biases are equal
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from superstep.kernels.position_bias import Bias, ByContent, ByDistance, Slopes, alibi, t5_buckets
from superstep.plan.model.shape import T5_BUCKETS, ModelShape


def make_position_bias(shape: ModelShape) -> AlibiBias | LearntBias | None:
    """The bias of a layer; None with rotary positions."""
    match shape.positions:
        case "rope":
            return None
        case "alibi":
            return AlibiBias(shape.heads)
        case "t5":
            return BucketBias(shape.heads, shape.max_distance)
        case "relative":
            return RelativeBias(shape.heads, shape.head_dim, shape.max_distance)


class AlibiBias(nn.Module):
    """ALiBi (Press 2022): a slope for each head, which is not learnt."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self._slopes: dict[torch.device, Slopes] = {}

    def forward(self, like: Tensor) -> Slopes:
        """The slopes of all heads, on the device of ``like``; sent there once."""
        if like.device not in self._slopes:
            with torch.inference_mode(mode=False):
                self._slopes[like.device] = alibi(self.heads, like.device)
        return self._slopes[like.device]


class LearntBias(nn.Module):
    """A bias from a matrix of one row, or of a head's rows, for each head."""

    weight: nn.Parameter

    def bias_of(self, weight: Tensor) -> Bias:
        """The bias of a weight, or of its heads on this rank."""
        raise NotImplementedError

    def forward(self, like: Tensor) -> Bias:
        return self.bias_of(self.weight)


class BucketBias(LearntBias):
    """T5's (Raffel 2020, sec. 2.1), with a table in each layer: T5 has one for all."""

    def __init__(self, heads: int, max_distance: int) -> None:
        super().__init__()
        self.max_distance = max_distance
        self.weight = nn.Parameter(torch.zeros(heads, T5_BUCKETS))

    def bias_of(self, weight: Tensor) -> ByDistance:
        return ByDistance(weight.float() @ self.shares(weight.device))

    def shares(self, device: torch.device) -> Tensor:
        """1 where a distance is of a bucket: a product with it has gradients in a fixed order."""
        buckets = torch.arange(T5_BUCKETS, device=device)[:, None]
        return (t5_buckets(T5_BUCKETS, self.max_distance).to(device) == buckets).float()


class RelativeBias(LearntBias):
    """Relative positions of keys (Shaw 2018), for each head its own (Huang 2018)."""

    def __init__(self, heads: int, head_dim: int, max_distance: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.weight = nn.Parameter(torch.zeros(heads * head_dim, max_distance + 1))

    def bias_of(self, weight: Tensor) -> ByContent:
        return ByContent(weight.float().unflatten(0, (-1, self.head_dim)))
