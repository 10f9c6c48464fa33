"""The kernel of word2vec's pairs beside plain torch, and rows of tables beside torch's own operators."""

import pytest
import torch
import torch.nn.functional as F

from superstep.kernels.rows import table_rows, word_pairs
from superstep.kernels.rows.table_rows import add_rows, cut_rows, put_rows, square_rows, update_rows, zero_rows

WORDS, NODES, SAMPLES, LENGTH, OUTPUTS = 40, 30, 3, 70, 6


def inputs(width):
    generator = torch.Generator().manual_seed(width)
    words = torch.randint(-3, WORDS, (SAMPLES, LENGTH), generator=generator).clamp_min(-1).int()
    reach = torch.randint(1, 17, (SAMPLES, LENGTH), generator=generator).int()
    outputs = torch.randint(-20, 2 * NODES, (SAMPLES, LENGTH, OUTPUTS), generator=generator).clamp_min(-1).int()
    tables = torch.randn(WORDS, width, generator=generator), torch.randn(NODES, width, generator=generator)
    return words, reach, outputs, *(table / width**0.5 for table in tables)


def _dense(touched, like):
    rows, sums = touched
    return torch.zeros_like(like).index_add_(0, rows, sums)


@pytest.mark.parametrize("is_bag", [False, True], ids=["skip-gram", "bag"])
@pytest.mark.parametrize("width", [5, 16, 100, 320])
def test_the_kernel_computes_what_torch_does(width, is_bag):
    if not table_rows.is_compiled():
        pytest.skip("no compiler")
    given = inputs(width)
    ours, touched = word_pairs._by_kernel(*given, is_bag=is_bag)
    theirs, expected = word_pairs.reference(*given, is_bag=is_bag)
    torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=1e-3)
    for one, other, table in zip(touched, expected, given[3:], strict=True):
        assert len(one[0].unique()) == len(one[0])
        torch.testing.assert_close(_dense(one, table), _dense(other, table), rtol=1e-4, atol=2e-4)


def test_skip_grams_gradients_are_autograds():
    words, reach, outputs, x, o = inputs(12)
    x, o = x.requires_grad_(), o.requires_grad_()
    loss = torch.zeros(())
    for sample in range(SAMPLES):
        for at, word in enumerate(words[sample].tolist()):
            contexts = word_pairs.list_contexts(words[sample].tolist(), at, int(reach[sample, at])) if word >= 0 else []
            for output in outputs[sample, at][outputs[sample, at] >= 0].tolist():
                scores = x[torch.tensor(contexts, dtype=torch.long)] @ o[output // 2]
                loss = loss - F.logsigmoid(scores * (2 * (output % 2) - 1)).sum()
    expected = torch.autograd.grad(loss, (x, o))
    found = torch.autograd.grad(word_pairs.word_pairs(words, reach, outputs, x, o, is_bag=False).sum() * 0.5, (x, o))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.is_sparse
        torch.testing.assert_close(ours.to_dense() * 2, theirs, rtol=1e-4, atol=2e-4)


def test_samples_of_other_weights_are_refused():
    *given, x, o = inputs(8)
    losses = word_pairs.word_pairs(*given, x.requires_grad_(), o.requires_grad_(), is_bag=True)
    with pytest.raises(RuntimeError, match="the losses of samples have one weight"):
        (losses * torch.arange(SAMPLES)).sum().backward()


@pytest.fixture(params=["kernel", "torch"])
def _how(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(table_rows, "is_compiled", lambda: False)


@pytest.mark.usefixtures("_how")
def test_rows_are_added_squared_updated_and_set_to_zero():
    generator = torch.Generator().manual_seed(1)
    table, grads = (torch.randn(50, 20, generator=generator) for _ in range(2))
    values = torch.randn(4, 32, generator=generator)[:, :20]
    twice = torch.tensor([3, 7, 3, 49])
    added = table.clone()
    add_rows(added, twice, values)
    torch.testing.assert_close(added, table.index_add(0, twice, values))
    rows = torch.tensor([0, 7, 49])
    torch.testing.assert_close(square_rows(grads, rows), grads[rows].double().square().sum(), rtol=1e-6, atol=0)
    updated, most = table.clone(), 2.0
    update_rows(updated, rows, grads, lr=0.5, scale=1.5, most_norm=most, is_packed=False)
    step = grads[rows] / 1.5
    step = step * (most / step.norm(dim=1, keepdim=True)).clamp_max(1)
    torch.testing.assert_close(updated, table.index_add(0, rows, -0.5 * step))
    alone = table.clone()
    update_rows(alone, rows[1:2], grads[7:8], lr=0.5, scale=1.5, most_norm=most, is_packed=True)
    assert torch.equal(alone[7], updated[7])
    put_rows(alone, rows, updated[rows])
    assert torch.equal(alone, updated)
    assert torch.equal(cut_rows(alone, rows), updated[rows])
    assert not alone[rows].any()
    assert torch.equal(alone[1], updated[1])
    zero_rows(updated, rows)
    assert not updated[rows].any()
    assert updated[1].any()
