"""Every implementation of attention follows a layer's rule: window and soft cap, whole and within documents."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

import pytest
import torch

from superstep.engine.attention.document_attention import DocumentAttend
from superstep.engine.exact.attention import ExactAttend, WholeSequence
from superstep.kernels import attention as kernel
from superstep.model.decoder import flash
from superstep.numerics.attention import blockwise_attention
from superstep.numerics.fixed_point import ACTIVATION
from superstep.numerics.soft_cap import exact_tanh, tanh_for
from superstep.plan.model.attention_rule import AttentionRule

TOKENS, BATCH, CHUNKS = 300, 2, 4
RULES = {
    "plain": AttentionRule(),
    "window": AttentionRule(window=37),
    "cap": AttentionRule(soft_cap=2.0),
    "window and cap": AttentionRule(window=37, soft_cap=2.0),
    "window of all": AttentionRule(window=TOKENS),
    "window of itself": AttentionRule(window=1),
}
STARTS = torch.tensor([0] * 130 + [130] * 20 + [150] * 150).expand(BATCH, TOKENS)


def exact(chunks, starts):
    return ExactAttend(chunks, WholeSequence(), ACTIVATION.of(CHUNKS, "a key", None), starts)


WAYS = {
    "fused": lambda starts: flash if starts is None else DocumentAttend(starts),
    "kernel": partial(DocumentAttend, is_compiled=True),
    "exact": partial(exact, range(CHUNKS)),
}


@dataclass
class Inputs:
    heads: tuple[int, int] = (4, 2)
    width: int = 16
    dtype: torch.dtype = torch.float32
    tensors: list[torch.Tensor] = field(init=False)

    def __post_init__(self):
        random = torch.Generator().manual_seed(0)
        counts = (self.heads[0], self.heads[1], self.heads[1], self.heads[0])
        self.tensors = [torch.randn(BATCH, TOKENS, n, self.width, generator=random).to(self.dtype) * 2 for n in counts]
        self.tensors[3] /= 100  # exact sums have room for gradients, which are small

    def of(self, attend, *rule, dtype=None):
        """The output and the gradients of q, k and v."""
        *qkv, grad = (x.to(dtype or self.dtype).detach() for x in self.tensors)
        qkv = [x.requires_grad_() for x in qkv]
        out = attend(*qkv, *rule)
        return [out.detach(), *torch.autograd.grad(out, qkv, grad)]


def textbook(rule, starts):
    """Attention from all scores at once."""

    def attend(q, k, v):
        k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
        scores = torch.einsum("bsnh,btnh->bnst", q, k) / q.shape[-1] ** 0.5
        if rule.soft_cap is not None:
            scores = rule.soft_cap * (scores / rule.soft_cap).tanh()
        at = torch.arange(TOKENS)
        hidden = at > at[:, None]
        if rule.window is not None:
            hidden = hidden | (at <= at[:, None] - rule.window)
        if starts is not None:
            hidden = hidden | (at < starts[:, None, :, None])
        return torch.einsum("bnst,btnh->bsnh", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)

    return attend


@pytest.mark.parametrize("starts", [None, STARTS], ids=["whole", "documents"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("width", [16, 6])
def test_a_rule_is_that_of_the_textbook(way, rule, starts, width):
    if way == "kernel" and kernel.missing(torch.device("cpu")):
        pytest.skip(kernel.missing(torch.device("cpu")))
    inputs = Inputs(width=width)
    found = inputs.of(WAYS[way](starts), RULES[rule])
    expected = inputs.of(textbook(RULES[rule], starts), dtype=torch.float64)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=3e-5)


@pytest.mark.parametrize("rule", ["window", "window and cap"])
@pytest.mark.parametrize("width", [16, 6])
def test_exact_bits_of_a_window_do_not_depend_on_who_has_the_chunk(rule, width):
    """Each chunk's queries alone, as a context-parallel rank has them, have the bits of the whole sequence."""
    inputs = Inputs(width=width)
    whole = inputs.of(exact(range(CHUNKS), None), RULES[rule])[0]
    length = TOKENS // CHUNKS
    q, k, v, _ = inputs.tensors
    for chunk in range(CHUNKS):
        mine = slice(chunk * length, (chunk + 1) * length)
        alone = exact([chunk], None)(q[:, mine], k, v, RULES[rule])
        assert torch.equal(alone, whole[:, mine])


def test_a_mask_of_another_window_is_noticed(monkeypatch):
    hidden = blockwise_attention._hidden
    monkeypatch.setattr(
        blockwise_attention,
        "_hidden",
        lambda rule, mine, keys, q: hidden(replace(rule, window=rule.window + 1), mine, keys, q),
    )
    inputs, rule = Inputs(), RULES["window and cap"]
    found, expected = inputs.of(flash, rule), inputs.of(textbook(rule, None), dtype=torch.float64)
    assert (found[0].double() - expected[0]).abs().max() > 1e-2


def test_bits_of_the_exact_tanh_do_not_depend_on_the_place():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 1.2, 1000)
    torch.testing.assert_close(exact_tanh(x), x.double().tanh().float(), rtol=2e-6, atol=6e-8)
    assert all(torch.equal(exact_tanh(x[at : at + 1]), exact_tanh(x)[at : at + 1]) for at in range(0, 1000, 7))


def test_a_tanh_by_the_sigmoid_is_taken_for_products_in_bf16_alone():
    x = torch.linspace(-12, 12, 4001)
    wanted = x.double().tanh()
    for dtype, most in ((torch.bfloat16, 2e-7), (torch.float32, 1e-7)):
        tanh = tanh_for(torch.zeros(1, dtype=dtype))
        assert (tanh(x.clone()).double() - wanted).abs().max() < most
        assert (tanh is torch.tanh_) == (dtype == torch.float32)
