"""The states of linear attention by Triton, against torch's in fp64."""

import pytest
import torch

from superstep.kernels.gpu import delta_states
from superstep.numerics.delta_rule.chunks import Piece, list_chunks
from superstep.numerics.delta_rule.operator import delta_rule
from superstep.numerics.delta_rule.rule import find_terms, pass_gradients, pass_states, read_gradients, send_steps
from superstep.numerics.delta_rule.sums import Sums

DOCUMENTS = [Piece(0, 0, 200), Piece(1, 0, 30), Piece(1, 30, 130), Piece(1, 130, 200)]


@pytest.fixture(params=[(16, 24, 4), (40, 16, 2)], ids=["wide values", "wide keys"])
def sizes(request):
    """Widths of keys and values, and value heads."""
    return request.param


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + shape[-1]), dtype=torch.float64)


def inputs_of(sizes):
    width, value, heads = sizes
    return (
        drawn(2, 200, 2, width), drawn(2, 200, 2, width).flip(0), drawn(2, 200, heads, value),
        -drawn(2, 200, heads).abs() / 9, drawn(2, 200, heads).sigmoid(),
    )  # fmt: skip


def terms_of(sizes):
    chunks = list_chunks(DOCUMENTS, 200, 400, torch.device("cpu"))
    return find_terms(inputs_of(sizes), chunks, Sums()), chunks.steps


def near(found, exact):
    return float((found.cpu().double() - exact).norm() / exact.norm()) < 1e-6


def on(device, *tensors):
    return [x.to(device, torch.float32) for x in tensors]


def test_states(device, sizes):
    terms, steps = terms_of(sizes)
    first = drawn(4, sizes[2], sizes[0], sizes[1])
    exact = pass_states(terms, steps, first, Sums())
    inputs = on(device, terms.u, terms.w, terms.of_keys, terms.end)
    places = send_steps(steps, inputs[0].device)
    found = delta_states.pass_states(*inputs, places, *on(device, first))
    assert all(map(near, found, (exact.states, exact.corrected, exact.last)))
    *kept, last = delta_states.pass_states(*inputs, places, *on(device, first), is_kept=False)
    assert near(last, exact.last)
    assert all(x.numel() == 0 for x in kept)


def test_gradients(device, sizes):
    terms, steps = terms_of(sizes)
    read = read_gradients(terms, drawn(*terms.u.shape), Sums())
    last = drawn(4, sizes[2], sizes[0], sizes[1])
    exact = pass_gradients(terms, steps, read, last, Sums())
    inputs = on(device, terms.w, terms.of_keys, terms.end)
    places = send_steps(steps, inputs[0].device)
    found = delta_states.pass_gradients(tuple(on(device, *read)), *inputs, places, *on(device, last))
    assert all(map(near, found, exact))


def test_the_operator_has_the_same_results_on_every_device(device, sizes):
    starts = torch.zeros(2, 200, dtype=torch.int64)
    starts[1, 30:130], starts[1, 130:] = 30, 130
    results = []
    for inputs in (inputs_of(sizes), on(device, *inputs_of(sizes))):
        leaves = [x.requires_grad_() for x in inputs]
        out = delta_rule(*leaves, starts, False)
        grad = drawn(*out.shape).to(out)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, grad)])
    exact, found = results
    for mine, wanted in zip(found, exact, strict=True):
        assert float((mine.cpu().double() - wanted).norm() / wanted.norm()) < 1e-5
