"""The gated feed-forward."""

from __future__ import annotations

from torch import Tensor, nn


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020): down(silu(gate(x)) · up(x))."""

    def __init__(self, width: int, ffn: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, ffn, bias=False)
        self.up_proj = nn.Linear(width, ffn, bias=False)
        self.down_proj = nn.Linear(ffn, width, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x_BSD: Tensor) -> Tensor:
        out_BSD: Tensor = self.down_proj(self.act_fn(self.gate_proj(x_BSD)) * self.up_proj(x_BSD))
        return out_BSD
