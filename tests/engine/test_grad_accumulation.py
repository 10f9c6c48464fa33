"""Sums of weight gradients: in one backward pass, or put off to a second half."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from superstep.engine.layers.grad_accumulation import GradientSums, accumulating_straight, input_gradients
from superstep.engine.layers.implementation import install
from superstep.model.norm import RMSNorm


class Foreign(nn.Module):
    """A weight used in a way that nobody knows of."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))
        self.unused = nn.Parameter(torch.randn(3))

    def forward(self, x):
        return x * self.weight.sin()


def model(*, of_tokens, dtype):
    torch.manual_seed(0)
    layers = [
        nn.Embedding(11, 8) if of_tokens else nn.Identity(),
        RMSNorm(8, 1e-5),
        nn.Linear(8, 16, bias=False),
        nn.GELU(),
        nn.Linear(16, 8),
        Foreign(),
        nn.Linear(8, 8, bias=False),
    ]
    module = nn.Sequential(*layers).to(dtype)
    for param in module.parameters():
        param.grad_dtype = torch.float32
        param.grad = torch.ones(param.shape)
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("of_tokens", [False, True], ids=["activations", "tokens"])
def test_two_halves_give_the_bits_of_a_whole_backward(of_tokens, dtype):
    x = torch.randint(0, 11, (3, 5)) if of_tokens else torch.randn(3, 5, 8).to(dtype)
    gradient = torch.randn(3, 5, 8).to(dtype)
    results = []
    for is_in_two in (False, True):
        module, sums = model(of_tokens=of_tokens, dtype=dtype), GradientSums()
        install(module, accumulating_straight(sums))
        start = x if of_tokens else x.clone().requires_grad_()
        edge = get_gradient_edge(module(start))
        parameters = tuple(module.parameters())
        if is_in_two:
            adders = [(p, p.grad.add_) for p in parameters]
            gradients, later = input_gradients([start], edge, gradient, adders, sums)
            found = gradients[0] if gradients else None
            assert all(torch.equal(p.grad, torch.ones(p.shape)) for p in parameters), "a buffer was touched"
            with torch.no_grad():
                for add in later:
                    add()
        else:
            torch.autograd.backward(edge, gradient)
            found = start.grad
        results.append((found, [p.grad.clone() for p in parameters]))
    (whole, buffers), (half, again) = results
    assert (whole is None, half is None) == (of_tokens, of_tokens)
    assert of_tokens or torch.equal(whole, half)
    assert all(torch.equal(a, b) for a, b in zip(buffers, again, strict=True))
    assert sum(not torch.equal(b, torch.ones(b.shape)) for b in again) == len(again) - 1


class Scaled(nn.Embedding):
    """A lookup of one's own."""

    def forward(self, tokens):
        return super().forward(tokens) * 3.0


class Halved(nn.Linear):
    """A product of one's own."""

    def forward(self, x):
        return nn.functional.linear(x, self.weight * 0.5, self.bias)


def hooked():
    layer = nn.Linear(8, 8)
    layer.register_forward_hook(lambda layer, inputs, out: out * 2.0)
    return layer


def patched():
    layer = nn.Linear(8, 8)
    layer.forward = lambda x: nn.functional.linear(x, layer.weight * 3.0, layer.bias)
    return layer


def tied():
    layer = nn.Sequential(Halved(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    layer[1].weight = layer[0].weight
    return layer


OF_THEIR_OWN = {
    "plain linear": lambda: nn.Linear(8, 8),
    "own forward": lambda: Halved(8, 8),
    "hook": hooked,
    "patched": patched,
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
    "tied": tied,
    "plain table": lambda: nn.Embedding(11, 8),
    "own lookup": lambda: Scaled(11, 8),
    "padding": lambda: nn.Embedding(11, 8, padding_idx=3),
    "counts": lambda: nn.Embedding(11, 8, scale_grad_by_freq=True),
    "sparse": lambda: nn.Embedding(11, 8, sparse=True),
    "norm": lambda: nn.Embedding(11, 8, max_norm=0.5),
}


@pytest.mark.parametrize("name", OF_THEIR_OWN)
def test_layers_of_every_kind_have_the_gradient_that_torch_gives(name):
    torch.manual_seed(0)
    layer = OF_THEIR_OWN[name]()
    of_tokens = isinstance(layer, nn.Embedding)
    x = torch.randint(0, 11, (3, 5)) if of_tokens else torch.randn(3, 5, 8)
    gradient = torch.randn(3, 5, 8)
    layer(x).backward(gradient)
    wanted = {key: p.grad.to_dense() for key, p in layer.named_parameters()}
    buffers = {key: torch.zeros(p.shape) for key, p in layer.named_parameters()}
    for key, param in layer.named_parameters():
        param.grad = buffers[key]
    install(layer, accumulating_straight(GradientSums()))
    layer(x).backward(gradient)
    for key, buffer in buffers.items():
        torch.testing.assert_close(buffer, wanted[key])


def test_after_a_pass_that_failed_sums_are_done_at_once_again():
    sums, done = GradientSums(), []
    x = torch.ones(2, requires_grad=True)
    edge = get_gradient_edge(x * 2)
    with pytest.raises(RuntimeError):
        input_gradients([x], edge, torch.ones(3), (), sums)
    sums.do(lambda: done.append(1))
    assert done == [1]


def test_of_several_inputs_those_that_need_one_have_their_own_gradient():
    a, b = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    edge = get_gradient_edge(a * 2 + b * torch.arange(3) * 5)
    gradients, _ = input_gradients([a, torch.arange(3), b], edge, torch.ones(3), (), GradientSums())
    assert [x.tolist() for x in gradients] == [[2.0, 2.0, 2.0], [0.0, 5.0, 10.0]]
