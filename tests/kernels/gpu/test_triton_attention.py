"""Triton's attention and its gradients against all scores at once in fp64."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import pytest
import torch
import torch.nn.functional as F

from longer import longer
from superstep.engine.attention.document_attention import DocumentAttend
from superstep.engine.parallel.flash_partial import attend_block, attend_block_backward, merge
from superstep.kernels import attention as seam
from superstep.kernels.gpu import attention as kernel
from superstep.kernels.gpu.attention import TileSides, VisibleKeys, attend, attend_backward, attention, takes
from superstep.kernels.position_bias import ByDistance, alibi, t5

NAMES = ("out", "lse", "dq", "dk", "dv", "dbias")
ALLOWED = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
"""Relative errors: a few units in the last place of what is stored. The interpreter cuts bf16 off, a GPU rounds."""


def reference(q, k, v, sees):
    """Output and lse; a query that sees no key gets 0 and -inf."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    distance = sees.ahead + torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if sees.bias is not None:
        scores = scores + sees.bias.of(distance.clamp(min=0))
    is_seen = (distance >= 0) | torch.tensor(not sees.is_causal)
    if sees.window is not None:
        is_seen = is_seen & (distance < sees.window)
    if sees.starts is not None:
        is_seen = is_seen & (torch.arange(k.shape[2]) >= sees.starts[..., None])[:, None]
    is_any = is_seen.any(-1, keepdim=True)
    scores = scores.masked_fill(~is_seen & is_any, -torch.inf)
    return (scores.softmax(-1) * is_any) @ v, scores.logsumexp(-1).masked_fill(~is_any.squeeze(-1), -torch.inf)


def starts(tokens, *documents):
    """Where each query's document starts, in rows of documents of so many tokens."""
    return torch.tensor([[at - at % document for at in range(tokens)] for document in documents])


@dataclass(frozen=True, kw_only=True)
class Case:
    """The sizes of one attention, and what its queries see."""

    batch: int = 1
    heads: int = 2
    kv_heads: int = 1
    queries: int = 40
    keys: int = 40
    width: int = 16
    sees: VisibleKeys = field(default_factory=VisibleKeys)
    dtype: torch.dtype = torch.float32

    def inputs(self):
        """q, k, v and the gradient of the output, [B, heads, tokens, H], laid out as a model has them."""
        torch.manual_seed(3)
        shapes = [(self.queries, self.heads), *[(self.keys, self.kv_heads)] * 2, (self.queries, self.heads)]
        return [torch.randn(self.batch, *shape, self.width).to(self.dtype).transpose(1, 2) for shape in shapes]


BF16 = torch.bfloat16
TABLE = torch.randn(2, 8, generator=torch.Generator().manual_seed(1))
CASES = {
    "causal": Case(heads=4, kv_heads=2, width=24),
    "bf16": Case(dtype=BF16, queries=33, keys=33),
    "documents": Case(batch=2, queries=33, keys=33, sees=VisibleKeys(starts=starts(33, 18, 5))),
    "documents of one token": Case(queries=20, keys=20, sees=VisibleKeys(starts=starts(20, 1)), dtype=BF16),
    "window": Case(sees=VisibleKeys(window=7)),
    "window of keys before": Case(queries=20, keys=50, sees=VisibleKeys(window=9, ahead=30)),
    "another rank's keys": Case(queries=20, keys=37, kv_heads=2, sees=VisibleKeys(is_causal=False)),
    "a window that keys have left": Case(queries=30, keys=16, sees=VisibleKeys(is_causal=False, window=20, ahead=16)),
    "alibi": Case(sees=VisibleKeys(bias=alibi(2))),
    "t5": Case(sees=VisibleKeys(bias=t5(TABLE, 20)), queries=60, keys=60),
    "t5 in windows of documents": Case(
        sees=VisibleKeys(bias=t5(TABLE, 12), window=11, starts=starts(40, 24)), dtype=BF16
    ),
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch, device):
    """In the interpreter tiles are small, so that a few tokens make many of them, of unlike sides."""
    if device == "cpu":
        small = {"forward": TileSides(16, 32, 4), "queries": TileSides(32, 16, 4), "keys": TileSides(16, 32, 4)}
        monkeypatch.setattr(kernel, "sides_of", lambda part, *_: small[part])


def moved(sees, device):
    """What queries see, on a device."""
    starts_BS = None if sees.starts is None else sees.starts.to(device)
    match sees.bias:
        case None:
            bias = None
        case ByDistance(table=table):
            bias = ByDistance(table.to(device))
        case slopes:
            bias = replace(slopes, slopes=slopes.slopes.to(device))
    return replace(sees, starts=starts_BS, bias=bias)


def found(case, device):
    *qkv, grad = (x.to(device) for x in case.inputs())
    sees = moved(case.sees, device)
    out, lse = attend(*qkv, sees)
    given = attend_backward(grad, tuple(qkv), out, lse, sees)
    return [x.cpu() for x in (out, lse, *given) if x is not None]


def expected(case):
    """By ``reference`` in fp64, of the numbers as the case's dtype has them."""
    *qkv, grad = (x.double() for x in case.inputs())
    leaves, sees = [x.requires_grad_() for x in qkv], case.sees
    if isinstance(sees.bias, ByDistance):
        leaves.append(sees.bias.table.double().requires_grad_())
        sees = replace(sees, bias=ByDistance(leaves[-1]))
    out, lse = reference(*qkv, sees)
    return [x.detach() for x in (out, lse, *torch.autograd.grad(out, leaves, grad))]


def errors(ours, wanted):
    """Of each of NAMES, relative to all of it, or to numbers of 0.2 where it is nothing. An lse of -inf is one."""
    pairs = [(a.double(), b) for a, b in zip(ours, wanted, strict=True)]
    assert all(torch.equal(a.isneginf(), b.isneginf()) for a, b in pairs)
    pairs = [tuple(x.masked_fill(b.isneginf(), 0.0) for x in (a, b)) for a, b in pairs]
    return [float((a - b).norm()) / max(float(b.norm()), 0.2 * b.numel() ** 0.5) for a, b in pairs]


FEW = ("window of keys before", "another rank's keys", "t5 in windows of documents")
"""Of what a query sees each part once, in fp32 or bf16, with as many keys as queries or others."""


@pytest.mark.parametrize("name", longer(CASES, lambda name: name not in FEW))
def test_it_computes_what_all_scores_at_once_give(device, name):
    case = CASES[name]
    for what, error in zip(NAMES, errors(found(case, device), expected(case)), strict=False):
        assert error <= ALLOWED[case.dtype], what


def test_a_query_that_sees_no_key_adds_nothing(device):
    case = CASES["a window that keys have left"]
    out, lse, dq, *_ = found(case, device)
    is_blind = torch.arange(case.queries) + case.sees.ahead - case.sees.window >= case.keys - 1
    assert is_blind.any()
    assert not is_blind.all()
    assert torch.equal(lse.isneginf(), is_blind.expand_as(lse))
    assert not out[:, :, is_blind].any()
    assert not dq[:, :, is_blind].any()


def test_parts_of_the_keys_are_put_together(device):
    """As a ring does: by the log-sum-exp forward, and by sums of each part's gradients backward."""
    case = Case(queries=20, keys=40, sees=VisibleKeys(ahead=20, bias=alibi(2)))
    *qkv, grad = (x.to(device) for x in case.inputs())
    q, k, v = qkv
    sees = moved(case.sees, device)
    parts = [(q, k[:, :, 20:], v[:, :, 20:]), (q, k[:, :, :20], v[:, :, :20])]
    seen = [replace(sees, ahead=0), sees]
    (out, lse), other = (attend(*part, see) for part, see in zip(parts, seen, strict=True))
    merge(out, lse, *other)
    (dq, dk, dv, _), (dq0, dk0, dv0, _) = (
        attend_backward(grad, part, out, lse, see) for part, see in zip(parts, seen, strict=True)
    )
    ours = [out, lse, dq + dq0, torch.cat((dk0, dk), 2), torch.cat((dv0, dv), 2)]
    assert max(errors([x.cpu() for x in ours], expected(case))) <= ALLOWED[torch.float32]


def test_gradients_reach_a_table_of_buckets(device):
    case = Case(queries=24, keys=24)
    *qkv, grad = (x.to(device) for x in case.inputs())
    table = TABLE.to(device).requires_grad_()
    (ours,) = torch.autograd.grad(attention(*qkv, VisibleKeys(bias=t5(table, 16))), table, grad)
    wide = TABLE.double().requires_grad_()
    *qkv, grad = (x.double() for x in case.inputs())
    (wanted,) = torch.autograd.grad(reference(*qkv, VisibleKeys(bias=t5(wide, 16)))[0], wide, grad)
    assert max(errors([ours.cpu()], [wanted])) <= ALLOWED[torch.float32]


def test_what_it_is_given_may_lie_anywhere(device):
    case = Case(queries=20, keys=20, dtype=BF16)
    whole = [torch.cat([x, x.flip(2)], dim=2).to(device) for x in case.inputs()]
    *qkv, _ = (x[:, :, :20] for x in whole)
    assert torch.equal(attend(*qkv, case.sees)[0].cpu(), found(case, device)[0])


def test_a_document_that_starts_one_token_off_is_seen(device):
    case = CASES["documents"]
    shifted = (case.sees.starts + 1).minimum(torch.arange(case.queries))
    off = replace(case, sees=VisibleKeys(starts=torch.where(case.sees.starts > 0, shifted, 0)))
    assert min(errors(found(off, device), expected(case))) > 100 * ALLOWED[torch.float32]


def test_other_tensors_are_left_to_torch():
    assert not takes(torch.zeros(1, 2, 8, 16))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("width", [64, 80, 128, 256])
def test_on_a_gpu_it_is_as_exact_as_torchs(dtype, width):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    case = Case(batch=2, heads=8, kv_heads=2, queries=517, keys=517, width=width, dtype=dtype)
    *qkv, grad = (x.cuda() for x in case.inputs())
    assert takes(*qkv, grad)
    leaves = [x.clone().requires_grad_() for x in qkv]
    out = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
    theirs = [x.cpu() for x in (out.detach(), *torch.autograd.grad(out, leaves, grad))]
    ours, wanted = found(case, "cuda"), expected(case)
    del ours[1], wanted[1]  # torch keeps its lse to itself
    for mine, other in zip(errors(ours, wanted), errors(theirs, wanted), strict=True):
        assert mine <= max(2 * other, ALLOWED[torch.float32])


@pytest.mark.parametrize("documents", [None, starts(24, 11, 24)], ids=["whole", "documents"])
def test_a_run_attends_by_it(device, monkeypatch, documents):
    """Through the seam of ``runtime``, as tensors of a GPU do."""
    monkeypatch.setattr(seam, "_of_gpu", lambda x: kernel)
    monkeypatch.setattr(kernel, "takes", lambda *tensors: True)
    case = Case(batch=2, queries=24, keys=24, sees=VisibleKeys(starts=documents))
    *qkv, grad = (x.transpose(1, 2).to(device) for x in case.inputs())
    leaves = [x.requires_grad_() for x in qkv]
    held = None if documents is None else documents.to(device)
    out = DocumentAttend(held, is_compiled=True)(*leaves)
    ours = [x.transpose(1, 2).cpu() for x in (out.detach(), *torch.autograd.grad(out, leaves, grad))]
    wanted = expected(case)
    del wanted[1]  # lse
    assert max(errors(ours, wanted)) <= ALLOWED[torch.float32]


def test_a_ring_attends_to_others_keys_by_it(device, monkeypatch):
    monkeypatch.setattr(seam, "_of_gpu", lambda x: kernel)
    monkeypatch.setattr(kernel, "takes", lambda *tensors: True)
    case = CASES["another rank's keys"]
    *qkv, grad = (x.to(device) for x in case.inputs())
    out, lse = attend_block(*qkv, is_causal=False, is_compiled=True)
    found = attend_block_backward(grad, tuple(qkv), out, lse, is_causal=False, is_compiled=True)
    assert max(errors([x.cpu() for x in (out, lse, *found)], expected(case))) <= ALLOWED[torch.float32]
