"""The sinks of an attention layer, and the bias of a product whose sum is taken over ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class AttentionSinks(nn.Module):
    """A learned score for each query head, which joins every query's softmax
    (``numerics.attention.attention_sinks``).
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(heads))

    def forward(self, q_BSNH: Tensor) -> Tensor:
        """The scores of each query, [B, S, N]: a view."""
        return self.weight.expand(q_BSNH.shape[:3])


class OutputBias(nn.Module):
    """A bias as a layer of its own: of an output that is summed over ranks it is added once, to the sum."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight
