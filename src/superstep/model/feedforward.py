"""The gated feed-forward."""

from __future__ import annotations

from torch import Tensor, nn

from superstep.plan.model.style import Gate


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020): down(silu(gate(x)) · up(x)); or GELU, by its approximation with tanh, for silu."""

    def __init__(self, width: int, ffn: int, gate: Gate = "silu") -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, ffn, bias=False)
        self.up_proj = nn.Linear(width, ffn, bias=False)
        self.down_proj = nn.Linear(ffn, width, bias=False)
        self.act_fn = nn.SiLU() if gate == "silu" else nn.GELU(approximate="tanh")

    def forward(self, x_BSD: Tensor) -> Tensor:
        out_BSD: Tensor = self.down_proj(self.act_fn(self.gate_proj(x_BSD)) * self.up_proj(x_BSD))
        return out_BSD
