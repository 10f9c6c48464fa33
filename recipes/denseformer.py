"""DenseFormer (Pagliardini 2024): every block reads a weighted sum of all earlier outputs. A graph of units.

Unit ``block.2`` takes the outputs of ``embed``, ``block.0`` and ``block.1``, which its ``inputs`` name. A value that a
later pipeline stage takes travels with the stream, and its gradient comes back the same way.

    B  sequences    S  positions    D  width of the stream
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

BLOCK = {
    "norm_1.weight": ("stream",),
    "attention.qkv.weight": ("attention", "stream"),
    "attention.out.weight": ("stream", "attention"),
    "norm_2.weight": ("stream",),
    "mlp.0.weight": ("hidden", "stream"),
    "mlp.2.weight": ("stream", "hidden"),
}


class Mix(nn.Module):
    """The weighted sum of earlier outputs (eq. 1): at first the last of them alone."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(F.one_hot(torch.tensor(outputs - 1), outputs).float())

    def forward(self, *outputs: Tensor) -> Tensor:
        return torch.stack(outputs, -1) @ self.weight


class Attention(nn.Module):
    """Queries, keys and values lie head by head in one matrix."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x_BSD: Tensor, attend: Attend) -> Tensor:
        B, S, _ = x_BSD.shape
        q_BSNH, k_BSNH, v_BSNH = self.qkv(x_BSD).view(B, S, -1, 3, self.head_dim).unbind(3)
        out_BSD: Tensor = self.out(attend(q_BSNH, k_BSNH, v_BSNH).flatten(2))
        return out_BSD


class Block(nn.Module):
    """One layer, on a mix of what came before it."""

    def __init__(self, width: int, heads: int, outputs: int) -> None:
        super().__init__()
        up, down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.mix, self.attention, self.mlp = Mix(outputs), Attention(width, heads), nn.Sequential(up, nn.GELU(), down)
        self.norm_1, self.norm_2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)

    def forward(self, *outputs_BSD: Tensor, attend: Attend = flash) -> Tensor:
        h_BSD: Tensor = self.mix(*outputs_BSD)
        h_BSD = h_BSD + self.attention(self.norm_1(h_BSD), attend)
        return h_BSD + self.mlp(self.norm_2(h_BSD))


class Head(nn.Module):
    """The last mix, its norm, and the logits."""

    def __init__(self, vocab: int, width: int, outputs: int) -> None:
        super().__init__()
        self.mix = Mix(outputs)
        self.norm = nn.LayerNorm(width, bias=False)
        self.words = nn.Linear(width, vocab, bias=False)

    def forward(self, *outputs_BSD: Tensor) -> Tensor:
        logits_BSV: Tensor = self.words(self.norm(self.mix(*outputs_BSD)))
        return logits_BSV


def units(config: RunConfig) -> list[UnitSpec]:
    """The embedding, the blocks, and the head, each with the names of what it takes."""
    model = config.model
    width, heads, layers, vocab = model.width or 128, model.heads or 4, model.layers or 4, model.vocab or 2048
    words = ParamSpec(name="words.weight", axes=("words", "stream"), std=0.02)
    earlier = ["embed", *(f"block.{layer}" for layer in range(layers))]
    embed = UnitSpec(name="embed", build=partial(nn.Embedding, vocab, width), params={"weight": words})
    blocks = [
        UnitSpec(
            name=f"block.{layer}",
            build=partial(Block, width, heads, layer + 1),
            params={
                "mix.weight": first_mix(f"block.{layer}.mix.weight", layer + 1),
                **{local: param(f"block.{layer}.{local}", axes, layers) for local, axes in BLOCK.items()},
            },
            inputs=tuple(earlier[: layer + 1]),
            takes=("attend",),
        )
        for layer in range(layers)
    ]
    head = {"mix.weight": first_mix("mix.weight", layers + 1), "norm.weight": param("norm.weight", ("stream",), layers)}
    build = partial(Head, vocab, width, layers + 1)
    # Two units that name the same tensor share it: the head is tied to the embedding.
    params = {**head, "words.weight": words}
    return [embed, *blocks, UnitSpec(name="head", build=build, params=params, inputs=tuple(earlier))]


def first_mix(name: str, outputs: int) -> ParamSpec:
    """The weights of a mix, which start with the last output alone."""
    return ParamSpec(name=name, axes=(None,), std=None, values=Mix(outputs).weight.detach())


def param(name: str, axes: tuple[str, ...], layers: int) -> ParamSpec:
    """Matrices start normal, smaller where they add to the stream; the weights of norms as ones."""
    if len(axes) == 1:
        return ParamSpec(name=name, axes=axes, std=None)
    return ParamSpec(name=name, axes=axes, std=0.02 / math.sqrt(2 * layers) if axes[0] == "stream" else 0.02)
