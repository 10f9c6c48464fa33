"""Weights of few bits: each product is as near to the exact one as its rounding says, and a model stays as good."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from superstep.errors import ConfigError
from superstep.model.decoder import Decoder
from superstep.plan.model.sizes.named_sizes import SHAPES
from superstep.serve.compute.linears.fused_linears import Linears
from superstep.serve.compute.linears.quantize import FORMATS, GROUP_4, format_named, to_4_bits, to_8_bits

BF16 = torch.finfo(torch.bfloat16).eps


def weight_of(outputs=96, inputs=128):
    """Rows of very different sizes, one of them all zeros, one with a single large weight."""
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(outputs, inputs, generator=generator) * torch.logspace(-6, 2, outputs)[:, None]
    weight[5] = 0.0
    weight[6, 3] = 1e4
    return weight


def test_a_weight_of_8_bits_is_off_by_half_a_step_at_most():
    weight = weight_of()
    held = to_8_bits(weight)
    # The step: a 127th of the row's largest weight, rounded up to a bf16 number.
    step = weight.abs().amax(1, keepdim=True) / 127 * (1 + BF16)
    assert ((held.weight() - weight).abs() <= step * 0.5001).all()
    assert held.codes.abs().max() <= 127
    assert (held.weight()[5] == 0).all()


def test_a_weight_of_4_bits_in_groups_beats_one_step_of_the_group():
    weight = weight_of()
    held = to_4_bits(weight, 32)
    groups = weight.view(96, -1, 32)
    spread, size = groups.amax(2) - groups.amin(2), groups.abs().amax(2)
    # Taken over the range the error is at most half a step, and what rounding of scale and zero to bf16 cuts off. The
    # range that is kept has no larger squared error than that.
    bound = spread / 15 * (1 + BF16) / 2 + BF16 * (size + 8 * spread / 15)
    assert ((held.weight() - weight).view(96, -1, 32).square().mean(2).sqrt() <= bound * 1.001).all()
    assert (held.codes.min(), held.codes.max()) == (0, 15)


def test_a_range_is_cut_where_that_leaves_less_error():
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    error = (to_4_bits(weight, 64).weight() - weight).square().mean()
    step = (weight.amax(1) - weight.amin(1)) / 15
    assert error < (step.square() / 12).mean()  # that of rounding over the whole range


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", [row.name for row in FORMATS])
def test_a_product_is_the_exact_one_of_the_codes(name, dtype, rows):
    row, weight = format_named(name), weight_of()
    x = torch.randn(rows, 128, generator=torch.Generator().manual_seed(rows)).to(dtype)
    bias = torch.linspace(-1, 1, 96).to(dtype)
    held = row.encode(weight).weight().double()
    exact = F.linear(x.double(), held, bias.double())
    size = x.double().abs() @ held.abs().t() + bias.double().abs()
    out = row.pack(weight, bias)(x)
    assert out.dtype == dtype
    # Of each product: sums in fp32; a decoded weight and the result may be rounded to bf16 each, whatever comes in.
    bound = 3 * BF16 * size
    if row.activations:  # an input is off by half of a 127th of the row's largest
        bound = bound + (x.double().abs().amax(1, keepdim=True) / 127 / 2) * held.abs().sum(1)
    assert ((out.double() - exact).abs() <= bound).all()


def test_integer_products_are_of_whole_tokens_alone():
    product = format_named("w8a8").pack(weight_of(), None)
    x = torch.randn(9, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[4] *= 1e4  # a token of large numbers takes nothing from the others' scales
    for place in range(9):
        assert torch.equal(product(x)[place], product(x[place : place + 1])[0])
    assert (product(torch.zeros(2, 128)) == 0).all()


def test_an_unknown_format_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"serve\.quantize = 'int3' is no format; use one of int8, w8a8, int4"):
        format_named("int3")


def test_inputs_that_are_no_whole_groups_keep_their_bits():
    weight, x = torch.ones(32, GROUP_4 + 1), torch.ones(2, GROUP_4 + 1)
    torch.testing.assert_close(format_named("int4").pack(weight, None)(x), F.linear(x, weight))


@pytest.fixture(scope="module")
def trained():
    """A model that has learned a text: three times out of four the next token follows from the last one."""
    torch.manual_seed(0)
    shape = replace(SHAPES["tiny"], ffn=192, vocab=64, tied=False)  # whole groups of every format
    model = Decoder(shape)
    follows = torch.randint(0, 64, (64, 2), generator=torch.Generator().manual_seed(5))

    def text(count, seed):
        generator = torch.Generator().manual_seed(seed)
        rows = [torch.randint(0, 64, (count,), generator=generator)]
        coins = torch.randint(0, 4, (count, 32), generator=generator) == 0
        for place in range(32):
            rows.append(follows[rows[-1], coins[:, place].long()])
        return torch.stack(rows, 1)

    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(80):
        tokens = text(16, step)
        F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = {name: value.detach().bfloat16() for name, value in model.state_dict().items()}

    def perplexity(name=None):
        served = Decoder(shape).bfloat16().requires_grad_(False)
        served.load_state_dict(state)
        if name is not None:
            row = format_named(name)
            assert len(Linears([served], row.pack, format_named(row.head).pack)) == 2 * 7 + 1
        tokens = text(64, 10**6)
        logits = served(tokens[:, :-1]).float()
        return math.exp(F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))

    return perplexity


@pytest.mark.parametrize(("name", "most"), [("int8", 1.01), ("w8a8", 1.02), ("int4", 1.15)])
def test_a_trained_model_is_as_sure_of_its_text(trained, name, most):
    plain = trained()
    assert plain < 3  # of 64 tokens, where 1.75 is the least: it has learned
    assert trained(name) / plain < most
