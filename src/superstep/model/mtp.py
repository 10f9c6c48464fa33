"""Multi-token prediction (DeepSeek-V3, sec. 2.2): from the last block's output and the next token, a module predicts
the token after that. It shares embedding and head with the model.

    h'_i = block(fc([norm(embedding(t_{i+1})); norm(h_i)]))          logits of t_{i+2}: head(norm(h'_i))

    B  sequences    S  positions    D  width of the residual stream
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from superstep.model.decoder import Attend, Block, Embedding
from superstep.model.norm import RMSNorm
from superstep.model.rope import Rope
from superstep.plan.model.shape import ModelShape


class FurtherToken(nn.Module):
    """The module of depth one, with Qwen3-Next's names."""

    def __init__(self, shape: ModelShape, rope: Rope) -> None:
        super().__init__()
        self.embed = Embedding(shape)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (
            RMSNorm(shape.width, shape.norm_eps, shape.style.norm_offset) for _ in range(3)
        )
        self.fc = nn.Linear(2 * shape.width, shape.width, bias=False)
        self.layers = nn.ModuleList([Block(shape, rope, shape.layers - 1)])

    def forward(
        self,
        h_BSD: Tensor,
        next_tokens_BS: Tensor,
        *,
        attend: Attend | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """The normalised output for the head, [B, S, D]."""
        token_BSD = self.pre_fc_norm_embedding(self.embed(next_tokens_BS))
        x_BSD = self.fc(torch.cat((token_BSD, self.pre_fc_norm_hidden(h_BSD)), -1))
        out_BSD: Tensor = self.norm(self.layers[0](x_BSD, attend=attend, positions=positions))
        return out_BSD
