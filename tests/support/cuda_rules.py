"""A CPU that takes a GPU's branches, and computes there by the rules of CUDA's kernels.

Within ``as_cuda`` every tensor says that a GPU has it. The operators that only a GPU has are there, refuse what CUDA's
refuse, and leave NaN where those leave memory as they found it. What it cannot show: a tensor of the CPU's among those
of a GPU (``elsewhere`` does), streams, and the digits of a GPU.

The rules are those of torch 2.13: aten/src/ATen/native/cuda/GroupedBlas.cpp, transformers/cuda/sdp_utils.cpp.

    E  experts    R  rows    B  sequences    N, K  query heads, key heads    S, T  queries, keys    H  width of a head
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from superstep.runtime.device import Device

ATEN = torch.ops.aten
ALIGNED_BYTES = 16
WIDEST_FLASH = 256
LSE_ROWS = 32
"""The efficient kernel's log-sum-exp has a multiple of so many rows."""
WAITS = {
    ATEN._local_scalar_dense.default,
    ATEN.bincount.default,
    ATEN.equal.default,
    ATEN.masked_select.default,
    ATEN.nonzero.default,
}
"""Operations whose result, or its size, the host waits for."""


class OnCuda(Device):
    """A GPU as far as the engine can see, whose memory is the host's."""

    @property
    def torch(self):
        return torch.device("cpu")

    def synchronize(self):
        pass


@dataclass
class Seen:
    """What a GPU would have done.

    Attributes:
        waits: operations that the host waited for.
        whole_scores: shapes of scores that torch's attention made whole: its kernels took no such heads.
        called: names of the operators that only a GPU has.
    """

    waits: list[str] = field(default_factory=list)
    whole_scores: list[tuple[int, ...]] = field(default_factory=list)
    called: list[str] = field(default_factory=list)


class _Waits(TorchDispatchMode):
    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        indices = args[1] if func in (ATEN.index.Tensor, ATEN.index_put_.default) else ()
        is_masked = any(index is not None and index.dtype == torch.bool for index in indices)
        is_repeated = func is ATEN.repeat_interleave.Tensor and kwargs.get("output_size") is None
        if func in WAITS or is_masked or is_repeated:
            self._seen.waits.append(str(func))
        return func(*args, **kwargs)


@contextmanager
def as_cuda(capability: tuple[int, int] = (10, 0)) -> Iterator[Seen]:
    """Within the block there is a GPU of this compute capability, which has every tensor."""
    seen, library = Seen(), torch.library.Library("aten", "IMPL")
    for name, run in KERNELS.items():
        library.impl(name, _noted(name, run, seen), "CPU")
    own = {name: getattr(torch.Tensor, name) for name in ("tolist", "item", "cpu")}

    def read(name):
        def wait(tensor, *args):
            seen.waits.append(name)
            return own[name](tensor, *args)

        return wait

    try:
        with pytest.MonkeyPatch.context() as patch, _Waits(seen):
            patch.setattr(torch.Tensor, "is_cuda", property(lambda x: True), raising=False)
            patch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
            patch.setattr(F, "scaled_dot_product_attention", _attention(seen))
            patch.setattr(torch.Tensor, "pin_memory", _noted("pin_memory", lambda x: x, seen))
            for name in own:
                patch.setattr(torch.Tensor, name, read(name))
            yield seen
    finally:
        library._destroy()


def _noted(name, run, seen):
    def call(*args, **kwargs):
        seen.called.append(name)
        return run(*args, **kwargs)

    return call


# ---------------------------------------------------------------- experts


def _grouped_mm(left, right, offs=None, bias=None, out_dtype=None):
    """Rows of the left one by group, or of both sides what is summed over, as ``offs`` ends them."""
    assert left.dtype == right.dtype == torch.bfloat16, "bf16 alone is one kernel"
    assert offs.dtype == torch.int32
    for x in (left, right):
        steps, sizes = x.stride()[-2:], x.shape[-2:]
        assert 1 in steps, f"strides {x.stride()} of {tuple(x.shape)}"
        at = steps.index(1)
        step, width = steps[1 - at], sizes[at]
        assert step >= max(1, width), f"strides {x.stride()} of {tuple(x.shape)}"
        assert step * x.element_size() % ALIGNED_BYTES == 0, f"strides {x.stride()} are no multiple of 16 bytes"
        assert x.data_ptr() % ALIGNED_BYTES == 0
    assert left.shape[1] > 0, "nothing to sum over"
    assert left.shape[0] > 0, "no rows"
    ends = [0, *(int(end) for end in offs.numpy())]
    if right.dim() == 3:
        out = left.new_full((left.shape[0], right.shape[2]), torch.nan)
        for (begin, end), matrix in zip(pairwise(ends), right, strict=True):
            out[begin:end] = left[begin:end] @ matrix
        return out
    out = left.new_full((len(offs), left.shape[0], right.shape[1]), torch.nan)
    for into, (begin, end) in zip(out, pairwise(ends), strict=True):
        if end > begin:  # compute capability 10.0 writes nothing otherwise
            into.copy_(left[:, begin:end] @ right[begin:end])
    return out


# ---------------------------------------------------------------- attention


def _attention(seen):
    """``F.scaled_dot_product_attention`` with the kernel that CUDA picks."""

    def attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        width = q.shape[-1]
        scale = width**-0.5 if scale is None else scale
        if attn_mask is None and q.element_size() == 2 and width <= WIDEST_FLASH:
            filled = (F.pad(x, (0, -width % 8)) for x in (q, k, v))
            return ATEN._scaled_dot_product_flash_attention(*filled, 0.0, is_causal, scale=scale)[0][..., :width]
        if q.shape[1] == k.shape[1] and width * q.element_size() % ALIGNED_BYTES == 0:
            bias = attn_mask
            if bias is not None and bias.dtype == torch.bool:
                bias = torch.zeros(bias.shape, dtype=q.dtype).masked_fill_(~bias, -torch.inf)
            if bias is not None:
                bias = bias.expand(*q.shape[:3], k.shape[2])
            args = q, k, v, bias, True, 0.0, is_causal
            return ATEN._scaled_dot_product_efficient_attention(*args, scale=scale)[0]
        seen.whole_scores.append((*q.shape[:3], k.shape[2]))
        return ATEN._scaled_dot_product_attention_math(
            q, k, v, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]

    return attention


def _wide(x_BKTH, q_BNSH):
    return x_BKTH.repeat_interleave(q_BNSH.shape[1] // x_BKTH.shape[1], 1)


def _takes_flash(q, k, v, is_causal):
    assert all(x.dtype == q.dtype and x.element_size() == 2 for x in (q, k, v)), "flash takes 16-bit numbers"
    assert q.shape[-1] % 8 == 0, f"heads of {q.shape[-1]} numbers are no multiple of 16 bytes"
    assert q.shape[-1] <= WIDEST_FLASH
    assert not is_causal or q.shape[2] == k.shape[2]


def _takes_efficient(q, k, v, is_causal):
    assert q.shape[1] == k.shape[1] == v.shape[1], "the efficient kernel knows no grouped heads"
    assert q.shape[-1] * q.element_size() % ALIGNED_BYTES == 0, f"heads of {q.shape[-1]} numbers are not aligned"


def _forward(q, k, v, is_causal, scale, bias=None):
    given = q.float(), _wide(k, q).float(), _wide(v, q).float()
    bias = None if bias is None else bias.float()
    out, lse = ATEN._scaled_dot_product_flash_attention_for_cpu(*given, 0.0, is_causal, attn_mask=bias, scale=scale)
    return out.to(q.dtype), lse


def _backward(grad, q, k, v, out, lse, is_causal, scale, bias=None):
    given = (x.float() for x in (grad, q, _wide(k, q), _wide(v, q), out))
    bias = None if bias is None else bias.float()
    op = ATEN._scaled_dot_product_flash_attention_for_cpu_backward
    dq, dk, dv = op(*given, lse.contiguous(), 0.0, is_causal, attn_mask=bias, scale=scale)
    dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (dk, dv))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _no_seed():
    return torch.zeros((), dtype=torch.int64)


def _flash(q, k, v, dropout=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    _takes_flash(q, k, v, is_causal)
    none = torch.empty(0)
    return *_forward(q, k, v, is_causal, scale), none, none, q.shape[2], k.shape[2], _no_seed(), _no_seed(), none


def _flash_backward(
    grad, q, k, v, out, lse, q_ends, k_ends, queries, keys, dropout, is_causal, seed, offset, *, scale=None
):
    _takes_flash(q, k, v, is_causal)
    return _backward(grad, q, k, v, out, lse, is_causal, scale)


def _efficient(q, k, v, bias, compute_log_sumexp, dropout=0.0, is_causal=False, *, scale=None):
    _takes_efficient(q, k, v, is_causal)
    out, lse = _forward(q, k, v, is_causal, scale, bias)
    return out, F.pad(lse, (0, -lse.shape[2] % LSE_ROWS), value=torch.inf), _no_seed(), _no_seed()


def _efficient_backward(grad, q, k, v, bias, out, lse, seed, offset, dropout, wanted, is_causal=False, *, scale=None):
    _takes_efficient(q, k, v, is_causal)
    assert lse.shape[2] % LSE_ROWS == 0
    return *_backward(grad, q, k, v, out, lse[..., : q.shape[2]], is_causal, scale, bias), None


def _in_parts(x_TNH, ends):
    """Each part as a sequence of its own: [1, N, S, H]."""
    return [x_TNH[begin:end].transpose(0, 1)[None] for begin, end in pairwise(int(end) for end in ends.numpy())]


def _parts(q, k, v, q_ends, k_ends, queries, keys, dropout, is_causal, return_debug_mask, *, scale=None, **windows):
    each = [_in_parts(x, ends) for x, ends in ((q, q_ends), (k, k_ends), (v, k_ends))]
    for part in zip(*each, strict=True):
        _takes_flash(*part, is_causal)
    found = [_forward(*part, is_causal, scale) for part in zip(*each, strict=True)]
    out = torch.cat([part[0].transpose(0, 1) for part, _ in found])
    return out, torch.cat([lse[0] for _, lse in found], 1), _no_seed(), _no_seed(), torch.empty(0)


def _parts_backward(
    grad, q, k, v, out, lse, q_ends, k_ends, queries, keys, dropout, is_causal, seed, offset, *, scale=None, **windows
):
    ends = q_ends, q_ends, k_ends, k_ends, q_ends
    each = [_in_parts(x, at) for x, at in zip((grad, q, k, v, out), ends, strict=True)]
    lses = [part[:, :, :, 0] for part in _in_parts(lse.transpose(0, 1)[..., None], q_ends)]
    found = [_backward(*part, one, is_causal, scale) for *part, one in zip(*each, lses, strict=True)]
    dq, dk, dv = (torch.cat([part[at][0].transpose(0, 1) for part in found]) for at in range(3))
    return dq, dk, dv


# ---------------------------------------------------------------- products of 16 bits in fp32


def _addmm_wide(total, left, right, out_dtype, *, beta=1, alpha=1, out):
    return out.copy_(beta * total.to(out_dtype) + alpha * (left.to(out_dtype) @ right.to(out_dtype)))


def _mm_wide(left, right, out_dtype, *, out):
    return out.copy_(left.to(out_dtype) @ right.to(out_dtype))


KERNELS = {
    "_grouped_mm": _grouped_mm,
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention": _efficient,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "_flash_attention_forward": _parts,
    "_flash_attention_backward": _parts_backward,
    "addmm.dtype_out": _addmm_wide,
    "mm.dtype_out": _mm_wide,
}
