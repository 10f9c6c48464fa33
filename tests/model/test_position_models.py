"""A decoder with position biases computes what plain PyTorch does, with a bias for each pair of a query and a key."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from superstep.kernels.position_bias import t5_buckets
from superstep.model.decoder import Decoder
from superstep.plan.config import ModelConfig
from superstep.plan.model.hf_config import to_hf_config
from superstep.plan.model.sizes.lookup import shape_of

FARTHEST, TOKENS, NEAR = 40, 96, 2e-5
SHAPE = shape_of(ModelConfig(name="tiny", max_distance=FARTHEST))


def model(positions):
    torch.manual_seed(0)
    made = Decoder(replace(SHAPE, positions=positions))
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.05)
    return made.double()


def plain(made, positions, tokens):
    """The logits, from the decoder's parameters."""
    h = made.embed.embed_tokens.weight[tokens]
    place = torch.arange(TOKENS)
    behind = place[:, None] - place
    for block in made.block:
        at, x = block.self_attn, block.input_layernorm(h)
        heads = (
            layer(x).unflatten(-1, (-1, SHAPE.head_dim)).transpose(1, 2) for layer in (at.q_proj, at.k_proj, at.v_proj)
        )
        q, k, v = (y.repeat_interleave(SHAPE.heads // y.shape[1], dim=1) for y in heads)
        scores = q @ k.mT + bias(at.position_bias, positions, q, behind) * SHAPE.head_dim**0.5
        weights = (scores / SHAPE.head_dim**0.5).masked_fill(behind < 0, -torch.inf).softmax(-1)
        h = h + at.o_proj((weights @ v).transpose(1, 2).flatten(2))
        x = block.post_attention_layernorm(h)
        h = h + block.mlp.down_proj(F.silu(block.mlp.gate_proj(x)) * block.mlp.up_proj(x))
    return made.head.norm(h) @ made.embed.embed_tokens.weight.t()


def bias(layer, positions, q, behind):
    near = behind.clamp(0, FARTHEST)
    match positions:
        case "alibi":
            return -torch.tensor([2.0 ** (-2 * n) for n in range(1, 5)])[:, None, None] * behind
        case "t5":
            return layer.weight[:, t5_buckets(32, FARTHEST)[near]]
        case "relative":
            vectors = layer.weight.view(SHAPE.heads, SHAPE.head_dim, -1)[..., near]
            return torch.einsum("bnsh,nhst->bnst", q, vectors) / SHAPE.head_dim**0.5


@pytest.mark.parametrize("positions", ["alibi", "t5", "relative"])
def test_logits_and_gradients_are_those_of_plain_code(positions):
    tokens, targets = torch.randint(SHAPE.vocab, (2, 2, TOKENS), generator=torch.Generator().manual_seed(1))
    exact, ours = model(positions), model(positions).float()
    found = []
    for logits, made in ((plain(exact, positions, tokens), exact), (ours(tokens), ours)):
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        found.append([logits.detach(), *torch.autograd.grad(loss, list(made.parameters()))])
    for theirs, mine in zip(*found, strict=True):
        assert (mine - theirs).norm() <= NEAR * theirs.norm()


@pytest.mark.parametrize("positions", ["rope", "alibi", "t5", "relative"])
def test_a_config_file_is_read_back_as_the_shape(positions, tmp_path):
    file = tmp_path / "config.json"
    shape = replace(SHAPE, positions=positions) if positions != "rope" else shape_of(ModelConfig(name="tiny"))
    file.write_text(json.dumps(to_hf_config(shape)))
    assert shape_of(ModelConfig(name=str(file))) == shape
