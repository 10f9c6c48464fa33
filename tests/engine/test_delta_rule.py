"""Linear attention: chunks compute what tokens one after the other do, documents as if alone, ranks as one process."""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from longer import many_ranks
from superstep.engine.parallel import state_passing
from superstep.engine.parallel.state_passing import NeighboursOverRanks, ScanOverRanks, list_positions
from superstep.model.mixers.gated_delta import WholeScan
from superstep.numerics.delta_rule.chunks import Piece
from superstep.plan.model.attention_rule import DELTA_CHUNK
from superstep.plan.sharding.sequence import positions

B, K, N, H, V, TAPS = 3, 2, 4, 8, 12, 4
NAMES = ("out", "dq", "dk", "dv", "dg", "dbeta")
EXACT = pytest.mark.parametrize("is_exact", [False, True], ids=["fast", "exact"])


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def inputs(tokens, rows=B):
    """q, k, v, g, beta and the gradient of the output; the same in every process."""
    generator = torch.Generator().manual_seed(3)

    def normal(heads, width):
        return torch.randn(rows, tokens, heads, width, generator=generator)

    g, beta = (torch.rand(rows, tokens, N, generator=generator) for _ in range(2))
    return [normal(K, H), normal(K, H), normal(N, V), -0.3 * g, beta], normal(N, V)


def starts_of(tokens, rows=B):
    """Documents of many lengths: some longer than a chunk, some of one token, one row of one document."""
    generator = torch.Generator().manual_seed(5)
    is_first = torch.rand(rows, tokens, generator=generator) < 3 * torch.arange(rows)[:, None] / tokens
    return (torch.arange(tokens) * is_first).cummax(1).values


def compute(scan, given, grad):
    """The output and all gradients."""
    leaves = [x.clone().requires_grad_() for x in given]
    out = scan.attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def one_by_one(q, k, v, g, beta, starts):
    """The recurrence, a token at a time."""
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(N // K, 2) for x in (q * H**-0.5, k))
    rows = []
    for row in range(len(q)):
        state, outs = q.new_zeros(N, H, V), []
        for t in range(q.shape[1]):
            if starts[row, t] == t:
                state = torch.zeros_like(state)
            state = state * g[row, t].exp()[:, None, None]
            error = v[row, t] - torch.einsum("nhv,nh->nv", state, k[row, t])
            state = state + torch.einsum("nh,nv->nhv", k[row, t], beta[row, t][:, None] * error)
            outs.append(torch.einsum("nhv,nh->nv", state, q[row, t]))
        rows.append(torch.stack(outs))
    return torch.stack(rows)


@EXACT
@pytest.mark.parametrize("tokens", [5, 2 * DELTA_CHUNK + 9])
def test_chunks_compute_what_tokens_one_after_the_other_do(tokens, is_exact):
    given, grad = inputs(tokens)
    starts = starts_of(tokens)
    leaves = [x.double().requires_grad_() for x in given]
    out = one_by_one(*leaves, starts)
    expected = [out.detach(), *torch.autograd.grad(out, leaves, grad.double())]
    found = compute(WholeScan(starts, is_exact=is_exact), given, grad)
    for name, mine, theirs in zip(NAMES, found, expected, strict=True):
        assert (mine - theirs).norm() <= 2e-6 * theirs.norm(), name


@EXACT
def test_documents_packed_have_the_bits_of_documents_alone(is_exact):
    tokens = 3 * DELTA_CHUNK
    given, grad = inputs(tokens)
    starts = starts_of(tokens)
    packed = compute(WholeScan(starts, is_exact=is_exact), given, grad)
    for row in range(B):
        firsts = sorted(set(starts[row].tolist()))
        for first, end in zip(firsts, [*firsts[1:], tokens], strict=True):
            here = slice(row, row + 1), slice(first, end)
            alone = compute(WholeScan(is_exact=is_exact), [x[here] for x in given], grad[here])
            for name, mine, theirs in zip(NAMES, packed, alone, strict=True):
                assert torch.equal(mine[here], theirs), (name, row, first)


def convolved(scan, x, weight, grad):
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    out = scan.convolve(x, weight)
    return [out.detach(), *torch.autograd.grad(out, (x, weight), grad)]


def of_convolution(tokens):
    generator = torch.Generator().manual_seed(9)
    x, grad = (torch.randn(B, tokens, 6, generator=generator) for _ in range(2))
    return x, torch.randn(6, 1, TAPS, generator=generator), grad


def whole_scan(starts, *, is_exact=False):
    inside = torch.arange(starts.shape[1]) - starts
    at = torch.nn.functional.pad(inside, (0, TAPS - 1)).unsqueeze(1)
    return WholeScan(starts, at, is_exact)


def test_the_convolution_of_packed_documents_has_the_bits_of_documents_alone():
    tokens = 40
    x, weight, grad = of_convolution(tokens)
    starts = starts_of(tokens)
    out, dx, dweight = convolved(whole_scan(starts), x, weight, grad)
    total = torch.zeros_like(weight)
    for row in range(B):
        firsts = sorted(set(starts[row].tolist()))
        for first, end in zip(firsts, [*firsts[1:], tokens], strict=True):
            here = slice(row, row + 1), slice(first, end)
            alone = convolved(WholeScan(), x[here], weight, grad[here])
            theirs = torch.nn.functional.conv1d(x[here].mT, weight, padding=TAPS - 1, groups=6).mT[:, : end - first]
            torch.testing.assert_close(alone[0], theirs)
            assert torch.equal(out[here], alone[0])
            assert torch.equal(dx[here], alone[1])
            total += alone[2]
    torch.testing.assert_close(dweight, total)


def planted(fault):
    """A context in which ranks have a fault."""
    if fault == "state not reset":
        return mock.patch.object(state_passing, "_list_begins", return_value=[0])
    if fault == "halo one off":
        before = NeighboursOverRanks.before

        def shifted(self, x, count):
            runs = before(self, x, count + 1)
            return torch.cat((runs[:, :, :count], runs[:, :, count + 1 :]), 2)

        return mock.patch.object(NeighboursOverRanks, "before", shifted)
    return nullcontext()


def _on_ranks(rank, world, tokens, fault):
    """This rank's part of everything, gathered by rank 0: without documents, with them, exact, and the convolution."""
    torch.set_num_threads(1)
    group, at = dist.group.WORLD, list(positions(tokens, cp=world, rank=rank))
    given, grad = inputs(tokens)
    own, own_grad = [x[:, at] for x in given], grad[:, at]
    starts = starts_of(tokens)
    found = {}
    with planted(fault):
        inside = list_positions(starts, TAPS, group)
        found["whole"] = compute(ScanOverRanks(group), own, own_grad)
        found["documents"] = compute(ScanOverRanks(group, starts, inside), own, own_grad)
        found["exact"] = compute(ScanOverRanks(group, starts, inside, is_exact=True), own, own_grad)
        x, weight, of_out = of_convolution(tokens)
        *parts, dweight = convolved(ScanOverRanks(group, starts, inside), x[:, at], weight, of_out[:, at])
        found["convolution"] = parts
    dist.all_reduce(dweight)
    gathered = [None] * world
    dist.all_gather_object(gathered, found)
    joined = {}
    for kind, parts in found.items():
        joined[kind] = [torch.empty(B, tokens, *part.shape[2:]) for part in parts]
        for source in range(world):
            places = list(positions(tokens, cp=world, rank=source))
            for into, part in zip(joined[kind], gathered[source][kind], strict=True):
                into[:, places] = part
    return joined, dweight


@pytest.mark.multiproc
@pytest.mark.parametrize("world", many_ranks([2, 4]))
def test_ranks_compute_what_one_process_does(world, pool):
    tokens = 2 * world * 40
    (found, dweight), *_ = pool.run(world, _on_ranks, tokens, None, timeout_s=120)
    given, grad = inputs(tokens)
    starts = starts_of(tokens)
    for kind, scan in (("whole", WholeScan()), ("documents", WholeScan(starts))):
        for name, mine, theirs in zip(NAMES, found[kind], compute(scan, given, grad), strict=True):
            assert (mine - theirs).norm() <= 2e-6 * theirs.norm(), (kind, name)
    exact = compute(WholeScan(starts, is_exact=True), given, grad)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found["exact"], exact, strict=True))
    out, dx, expected = convolved(whole_scan(starts), *of_convolution(tokens))
    assert torch.equal(found["convolution"][0], out)
    assert torch.equal(found["convolution"][1], dx)
    torch.testing.assert_close(dweight, expected)


@pytest.mark.multiproc
@pytest.mark.parametrize("fault", ["state not reset", "halo one off"])
def test_a_planted_fault_is_seen(fault, pool):
    tokens = 160
    (found, _), *_ = pool.run(2, _on_ranks, tokens, fault, timeout_s=120)
    starts = starts_of(tokens)
    given, grad = inputs(tokens)
    state = compute(WholeScan(starts), given, grad)[0]
    halo = convolved(whole_scan(starts), *of_convolution(tokens))[0]
    wrong = {
        "state not reset": (found["documents"][0] - state).norm() > 1e-3 * state.norm(),
        "halo one off": (found["convolution"][0] - halo).norm() > 1e-3 * halo.norm(),
    }
    assert wrong == {name: name == fault for name in wrong}


def test_pieces_are_sorted_by_their_chunks():
    assert [Piece(0, 0, end).chunks for end in (1, DELTA_CHUNK, DELTA_CHUNK + 1)] == [1, 1, 2]
