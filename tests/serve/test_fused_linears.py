"""Products that are laid out once give what the model's own layers give."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from superstep.model.decoder import Decoder
from superstep.plan.model.sizes.named_sizes import SHAPES
from superstep.serve.compute.linears.fused_linears import Linears
from superstep.serve.compute.linears.onednn_linear import can_pack, pack_weight


def small(dtype, **changes):
    torch.manual_seed(3)
    shape = replace(SHAPES["tiny"], vocab=130, **{"tied": False, **changes})
    return Decoder(shape).to(dtype).requires_grad_(False)


TOKENS = torch.arange(24).view(2, 12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_an_ordered_weight_gives_the_products_of_the_plain_one(dtype, rows):
    torch.manual_seed(rows)
    weight, bias, x = (torch.randn(*size).to(dtype) for size in ((96, 64), (96,), (rows, 64)))
    exact, size = F.linear(x.double(), weight.double(), bias.double()), x.double().abs() @ weight.double().abs().t()
    product = pack_weight(weight, bias, rows=4)
    assert product is not None
    weight.zero_()  # what was laid out is no view of it
    out = product(x)
    assert out.dtype == dtype
    # 64 products and sums in fp32, then one rounding to the dtype.
    bound = 65 * torch.finfo(torch.float32).eps * (size + bias.double().abs()) + torch.finfo(dtype).eps * exact.abs()
    assert ((out.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("changes", [{}, {"qkv_bias": True}, {"tied": True}])
def test_a_model_gives_the_same_logits(dtype, changes):
    model = small(dtype, **changes)
    expected = model(TOKENS)
    linears = Linears([model], pack_weight)
    assert len(linears) == 2 * 7 + 1
    error = (model(TOKENS) - expected).abs().max() / expected.abs().max()
    # One rounding of another sum in each of some 20 products.
    assert error < 20 * torch.finfo(dtype).eps


def test_layers_of_one_input_are_one_product():
    model = small(torch.float32)
    calls = []

    def counted(weight, bias):
        calls.append(tuple(weight.shape))
        return pack_weight(weight, bias)

    Linears([model], counted)
    qkv, out, gate_up, down, head = (128, 64), (64, 64), (320, 64), (64, 160), (130, 64)
    assert sorted(calls) == sorted([qkv, out, gate_up, down] * 2 + [head])


def test_layers_called_out_of_order_are_right_all_the_same():
    model = small(torch.float32)
    layer = model.block[0].self_attn
    x, y = torch.randn(3, 64), torch.randn(3, 64)
    q, v, k = F.linear(x, layer.q_proj.weight), F.linear(x, layer.v_proj.weight), F.linear(y, layer.k_proj.weight)
    Linears([model], pack_weight)
    for _ in range(2):
        torch.testing.assert_close(layer.v_proj(x), v)
        torch.testing.assert_close(layer.q_proj(x), q)
        torch.testing.assert_close(layer.k_proj(y), k)


def test_new_weights_are_served_once_they_are_laid_out():
    model, other = small(torch.float32), small(torch.float32)
    for param in other.parameters():
        param.mul_(0.9)
    expected = other(TOKENS)
    linears = Linears([model], pack_weight)
    model.load_state_dict(other.state_dict())
    assert (model(TOKENS) - expected).abs().max() > 0.01
    linears.lay_out()
    torch.testing.assert_close(model(TOKENS), expected, rtol=1e-4, atol=1e-5)


def test_a_layer_with_a_forward_or_hooks_of_its_own_stays():
    model = small(torch.float32)
    model.block[0].mlp.up_proj.register_forward_hook(lambda layer, args, out: out * 2)
    expected = model(TOKENS)
    assert len(Linears([model], pack_weight)) == 2 * 7
    torch.testing.assert_close(model(TOKENS), expected, rtol=1e-4, atol=1e-5)


def test_where_nothing_is_laid_out_the_model_is_as_it_was():
    model = small(torch.float16)  # which oneDNN's product does not take here
    expected = model(TOKENS)
    assert not can_pack(model.head.lm_head.weight)
    assert len(Linears([model], pack_weight)) == 0
    assert torch.equal(model(TOKENS), expected)
    assert all("forward" not in vars(layer) for layer in model.modules() if isinstance(layer, nn.Linear))


def test_the_head_may_be_laid_out_in_another_way():
    model = small(torch.float32)
    seen = []
    Linears([model], lambda w, b: None, lambda w, b: seen.append(tuple(w.shape)))
    assert seen == [(130, 64)]
