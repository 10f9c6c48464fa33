"""The weight of the balance loss, from a config.json and back: what it does to a router is what transformers does."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from superstep.model.axes import units
from superstep.model.decoder import Decoder
from superstep.model.files.hf import load_weights
from superstep.model.mixture.expert_dispatch import DispatchContext, LocalDispatch
from superstep.model.mixture.router import route
from superstep.model.unit import global_tensors
from superstep.plan.model.hf_config import from_hf_config, to_hf_config
from superstep.plan.model.sizes.named_sizes import SHAPES

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "router_aux_loss_coef": 0.5,
    "output_router_logits": True,
}
MIXTRAL = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
QWEN3_MOE = {"model_type": "qwen3_moe", "num_experts": 12, "num_experts_per_tok": 4, "moe_intermediate_size": 48}
KIND = pytest.mark.parametrize("kind", [MIXTRAL, QWEN3_MOE], ids=lambda kind: kind["model_type"])

# fp32 on both sides: the loss is a mean of 48 terms, the gradient sums as many; measured up to 2e-7 of it.
RTOL = 1e-5


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def pair(kind, layers, folder):
    """Random weights in transformers' model, and in ours read from its folder."""
    config = transformers.AutoConfig.for_model(**SIZES, **kind, num_hidden_layers=layers)
    theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    theirs.save_pretrained(folder)
    shape = from_hf_config(folder / "config.json")
    ours = Decoder(shape)
    load_weights(folder, global_tensors(ours, units(shape)))
    return theirs, ours, shape


def router_gradients(model):
    return [p.grad for name, p in model.named_parameters() if name.endswith("mlp.gate.weight")]


def train(ours, shape, tokens):
    """The whole training loss of one step, as the engine has it; gradients are left in the model."""
    exchange = LocalDispatch(DispatchContext(sequences=tuple(range(len(tokens))), batch_sequences=len(tokens)))
    logits = ours(tokens, exchange=exchange)
    cross_entropy = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    cross_entropy.backward()  # the balance loss enters by itself
    balance = sum(told.balance for told in exchange.take_counts().values()) / len(tokens)
    return cross_entropy + shape.moe.balance_weight * balance


@KIND
def test_one_layer_and_one_sequence_train_their_router_as_transformers_does(kind, tmp_path):
    theirs, ours, shape = pair(kind, 1, tmp_path)
    tokens = torch.randint(shape.vocab, (1, 48))
    out = theirs(tokens, labels=tokens)
    out.loss.backward()
    loss = train(ours, shape, tokens)
    assert out.aux_loss > 1.5  # so that the balance loss, half of which counts, is much of the gradient
    torch.testing.assert_close(loss, out.loss, rtol=RTOL, atol=0)
    [expected], [found] = router_gradients(theirs), router_gradients(ours)
    assert (found - expected).norm() < RTOL * expected.norm()


def balance_of(kind, logits_LBSE, coefficient, tmp_path):
    """Our balance loss of these logits of each layer, with the weight that such a config.json gives."""
    raw = {**SIZES, **kind, "num_hidden_layers": len(logits_LBSE), "router_aux_loss_coef": coefficient}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    moe = from_hf_config(tmp_path / "config.json").moe
    return sum(moe.balance_weight * route(moe, logits_BSE, None).balance.mean() for logits_BSE in logits_LBSE)


def theirs_of(kind, logits):
    """Transformers' own function; ``logits: [layers, tokens, E]``."""
    module = getattr(transformers.models, kind["model_type"])
    function = getattr(module, f"modeling_{kind['model_type']}").load_balancing_loss_func
    return function(tuple(logits), logits.shape[-1], kind["num_experts_per_tok"])


@KIND
@pytest.mark.parametrize("layers", [1, 3, 32])
def test_layers_that_route_alike_have_transformers_loss_and_gradient(kind, layers, tmp_path):
    """Theirs multiplies averages over all layers and sequences, ours adds a product of each: alike, the same."""
    experts = kind.get("num_experts") or kind["num_local_experts"]
    one = torch.randn(48, experts, requires_grad=True)
    expected = 0.02 * theirs_of(kind, one.expand(layers, 48, experts))
    found = balance_of(kind, one.expand(layers, 1, 48, experts), 0.02, tmp_path)
    torch.testing.assert_close(found, expected, rtol=RTOL, atol=0)
    gradients = [torch.autograd.grad(loss, one)[0] for loss in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-8)


@KIND
def test_each_layer_and_sequence_has_its_share_of_transformers_loss(kind, tmp_path):
    """Layers that route each their own way: the mean of theirs over groups, which is at least theirs over all."""
    experts = kind.get("num_experts") or kind["num_local_experts"]
    logits = torch.randn(4, 3, 256, experts)
    groups = [theirs_of(kind, one[None]) for one in logits.flatten(0, 1)]
    found = balance_of(kind, logits, 0.02, tmp_path)
    torch.testing.assert_close(found, 0.02 * sum(groups) / len(groups), rtol=RTOL, atol=0)
    # Groups of 256 tokens stray from the even load by chance; pooled it averages out. Measured: 1.00 to 1.01.
    assert 1.0 < found / (0.02 * theirs_of(kind, logits.flatten(1, 2))) < 1.05


@KIND
def test_our_config_tells_transformers_the_same_coefficient(kind, tmp_path):
    shape = pair(kind, 3, tmp_path)[2]
    told = to_hf_config(shape)
    assert told["router_aux_loss_coef"] == 0.5
    assert transformers.AutoConfig.for_model(**told).router_aux_loss_coef == 0.5


@pytest.mark.parametrize(("name", "coefficient"), [("mixtral-8x7b", 0.02), ("qwen3-30b-a3b", 0.001)])
def test_a_named_size_has_the_published_coefficient(name, coefficient):
    assert to_hf_config(SHAPES[name])["router_aux_loss_coef"] == coefficient


def test_a_depth_of_ones_own_keeps_the_weight_of_a_layer(tmp_path):
    shape = replace(SHAPES["mixtral-8x7b"], layers=4)
    (tmp_path / "config.json").write_text(json.dumps(to_hf_config(shape)))
    assert from_hf_config(tmp_path / "config.json") == shape
