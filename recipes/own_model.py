"""A GPT-2-like decoder (Radford 2019), as one would write it for one device, and the table that lets it be cut.

Nothing here knows of ranks. `recipes/own_model.toml` trains it, and says which axes of the table are cut over tp.

    B  sequences    S  positions    D  width of the stream    N  heads    H  width of one head
"""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from superstep.model.decoder import Attend, flash
from superstep.model.unit import ParamSpec, UnitSpec
from superstep.plan.config import RunConfig

# A name for each dim of each parameter. Names are free; `plan.rules` maps those that are to be cut to tp.
EMBED = {
    "words.weight": ("words", "stream"),
    "places.weight": ("places", "stream"),
}
BLOCK = {
    "norm_1.weight": ("stream",),
    "norm_1.bias": ("stream",),
    "attention.qkv.weight": ("attention", "stream"),
    "attention.qkv.bias": ("attention",),
    "attention.out.weight": ("stream", "attention"),
    "attention.out.bias": ("stream",),
    "norm_2.weight": ("stream",),
    "norm_2.bias": ("stream",),
    "mlp.up.weight": ("hidden", "stream"),
    "mlp.up.bias": ("hidden",),
    "mlp.down.weight": ("stream", "hidden"),
    "mlp.down.bias": ("stream",),
}
HEAD = {
    "norm.weight": ("stream",),
    "norm.bias": ("stream",),
    "out.weight": ("words", "stream"),
}


class Embed(nn.Module):
    """Words plus learned places."""

    def __init__(self, vocab: int, tokens: int, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocab, width)
        self.places = nn.Embedding(tokens, width)

    def forward(self, tokens_BS: Tensor, positions: Tensor | None = None) -> Tensor:
        if positions is None:
            positions = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        h_BSD: Tensor = self.words(tokens_BS) + self.places(positions)
        return h_BSD


class Attention(nn.Module):
    """Queries, keys and values lie head by head in one matrix, so that a cut between heads has all three of each."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x_BSD: Tensor, attend: Attend) -> Tensor:
        B, S, _ = x_BSD.shape
        q_BSNH, k_BSNH, v_BSNH = self.qkv(x_BSD).view(B, S, -1, 3, self.head_dim).unbind(3)
        out_BSD: Tensor = self.out(attend(q_BSNH, k_BSNH, v_BSNH).flatten(2))
        return out_BSD


class Mlp(nn.Module):
    """Two layers with GELU between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x_BSD: Tensor) -> Tensor:
        out_BSD: Tensor = self.down(F.gelu(self.up(x_BSD)))
        return out_BSD


class Block(nn.Module):
    """One layer. Dropout draws the same numbers on every layout."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm_2 = nn.LayerNorm(width)
        self.mlp = Mlp(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, h_BSD: Tensor, attend: Attend = flash) -> Tensor:
        h_BSD = h_BSD + self.dropout(self.attention(self.norm_1(h_BSD), attend))
        h_BSD = h_BSD + self.dropout(self.mlp(self.norm_2(h_BSD)))
        return h_BSD


class Head(nn.Module):
    """The last norm, and the logits."""

    def __init__(self, vocab: int, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, vocab, bias=False)

    def forward(self, h_BSD: Tensor) -> Tensor:
        logits_BSV: Tensor = self.out(self.norm(h_BSD))
        return logits_BSV


def units(config: RunConfig) -> list[UnitSpec]:
    """What Superstep calls: the embedding, each block, the head."""
    model, tokens = config.model, config.data.sequence_tokens
    width, heads, layers, vocab = model.width or 128, model.heads or 4, model.layers or 4, model.vocab or 2048
    small = 0.02 / math.sqrt(2 * layers)
    return [
        UnitSpec(
            name="embed",
            build=partial(Embed, vocab, tokens, width),
            params={local: param(local, local, axes, 0.02) for local, axes in EMBED.items()},
            takes=("positions",),
        ),
        *(
            UnitSpec(
                name=f"block.{layer}",
                build=partial(Block, width, heads, model.dropout),
                params={
                    local: param(f"block.{layer}.{local}", local, axes, small if axes[0] == "stream" else 0.02)
                    for local, axes in BLOCK.items()
                },
                takes=("attend",),
            )
            for layer in range(layers)
        ),
        UnitSpec(
            name="head",
            build=partial(Head, vocab, width),
            # Two units that name the same tensor share it: the head is tied to the embedding.
            params={
                local: param("words.weight" if local == "out.weight" else local, local, axes, 0.02)
                for local, axes in HEAD.items()
            },
        ),
    ]


def param(name: str, local: str, axes: tuple[str, ...], std: float) -> ParamSpec:
    """Matrices start normal, biases as zeros, the weights of norms as ones."""
    if len(axes) == 1:
        return ParamSpec(name=name, axes=axes, std=0.0 if local.endswith("bias") else None)
    return ParamSpec(name=name, axes=axes, std=std)
