"""Attention of queries to a part of the keys, with results that can be combined: its reference and its kernels.

    B  sequences    N  query heads           S  queries    H  width of one head
                    K  key and value heads   T  keys

Each key and value head serves N / K neighbouring query heads. The log-sum-exp (lse) of each query's scores comes with
its output: it combines results over parts of the keys, and the backward pass computes scores again from it. There the
output and lse are those of *all* keys, and the result is these keys' share of the gradients.
"""

from __future__ import annotations

import ctypes
import math
from ctypes import Structure, byref, c_double, c_float, c_int64, c_void_p
from functools import cache
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from superstep.kernels import compile_cpp, triton_loader
from superstep.kernels.compile_cpp import BuildResult
from superstep.kernels.position_bias import Bias, Slopes

SOURCES = tuple(
    Path(__file__).parent / "cpu" / name
    for name in (
        *("attention.cpp", "attention.h", "attention_backward.h", "attention_forward.h", "grid.h"),
        *("paired.h", "paired_backward.h", "paired_forward.h", "product.h", "tiles.h", "vector.h"),
    )
)
FLAGS = (
    *("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math"),
    *("-fopenmp", "-std=c++20", "-fPIC", "-shared"),
)

LANES = 16
"""A head's width is a multiple of this in the kernel."""

DTYPES = (torch.float32, torch.bfloat16)

FASTER = 1.1
"""How many times faster pairs of bf16 must be to be chosen, so that chance does not decide: only then P is rounded."""

Qkv = tuple[Tensor, Tensor, Tensor]


def reference(
    q_BNSH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, *, is_causal: bool, starts_BS: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The output [B, N, S, H] and lse [B, N, S], from all scores at once. Autograd gives its gradients.

    Args:
        is_causal: whether a query sees only keys up to its own place.
        starts_BS: the first key that each query sees; None for 0.
    """
    group, places = q_BNSH.shape[1] // k_BKTH.shape[1], torch.arange(k_BKTH.shape[2])
    k, v = (x.repeat_interleave(group, dim=1) for x in (k_BKTH, v_BKTH))
    scores = q_BNSH @ k.mT / math.sqrt(q_BNSH.shape[-1])
    is_visible = torch.ones(scores.shape[-2:], dtype=torch.bool)
    is_visible = is_visible.tril() if is_causal else is_visible
    if starts_BS is not None:
        is_visible = is_visible & (places >= starts_BS[..., None])[:, None]
    scores = scores.masked_fill(~is_visible, -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


@cache
def compile_library() -> BuildResult:
    return compile_cpp.build(SOURCES, FLAGS, compile_cpp.folder_of(SOURCES[0]))


@cache
def has_tiles() -> bool:
    """Whether this processor multiplies tiles of bf16 (AMX), and the system allows it to this process."""
    library = compile_library().library
    return library is not None and bool(library.superstep_may_use_tiles())


@cache
def multiplies_pairs() -> bool:
    """Whether this processor is faster with pairs of bf16 than with widened numbers; measured once in a process. With
    AMX it is, eight times; of those that support both without AMX some need half the time, and some twice as long.
    """
    if has_tiles():
        return True
    library = compile_library().library
    assert library is not None, "it was chosen because it is there"
    library.superstep_pairs_over_floats.restype = c_double
    return bool(library.superstep_pairs_over_floats() * FASTER < 1.0)


def missing(device: torch.device) -> str:
    """Why a device has no kernel, in a line; empty where it has one."""
    if device.type != "cpu":
        return triton_loader.missing(device)
    return compile_library().why if compile_library().library is None else ""


def fits(*tensors: Tensor) -> bool:
    """Whether the device's kernel has loops for such heads, [..., H]; it ``takes`` contiguous ones."""
    if _of_gpu(tensors[0]) is not None:
        return takes(*(x.transpose(1, 2) for x in tensors))
    return all(
        x.device.type == "cpu" and x.dtype == tensors[0].dtype in DTYPES and x.shape[-1] % LANES == 0 for x in tensors
    )


def takes(*tensors: Tensor) -> bool:
    """Whether the device's kernel computes with such tensors, [B, heads, tokens, H]."""
    if (gpu := _of_gpu(tensors[0])) is not None:
        return bool(gpu.takes(*tensors))
    return fits(*tensors) and all(x.stride(-1) == 1 and x.stride(2) % 2 == 0 and x.data_ptr() % 4 == 0 for x in tensors)


def adds(bias: Bias) -> bool:
    """Whether the device's kernel adds the bias to scores: on a GPU one that is not learnt. It has T5's as well, but
    sums the gradient in no fixed order.
    """
    return bias.tensor.is_cuda and isinstance(bias, Slopes)


def attend(
    q_BNSH: Tensor,
    k_BKTH: Tensor,
    v_BKTH: Tensor,
    *,
    is_causal: bool,
    starts_BS: Tensor | None = None,
    bias: Bias | None = None,
) -> tuple[Tensor, Tensor]:
    """``reference`` by the kernel; see ``takes``, and ``adds`` for biases. A row of ``starts_BS`` never falls."""
    if (gpu := _of_gpu(q_BNSH)) is not None:
        result: tuple[Tensor, Tensor] = gpu.attend(
            q_BNSH, k_BKTH, v_BKTH, gpu.VisibleKeys(is_causal=is_causal, starts=starts_BS, bias=bias)
        )
        return result
    assert bias is None, "adds() says so"
    out, lse = empty_like(q_BNSH), torch.empty(q_BNSH.shape[:3])
    KernelArgs((q_BNSH, k_BKTH, v_BKTH), out, lse, is_causal=is_causal, starts=starts_BS).run("superstep_attention")
    return out, lse


def attend_backward(
    grad_BNSH: Tensor,
    inputs: Qkv,
    out_BNSH: Tensor,
    lse_BNS: Tensor,
    *,
    is_causal: bool,
    starts_BS: Tensor | None = None,
    bias: Bias | None = None,
) -> Qkv:
    """The keys' share of the gradients of ``inputs`` (q, k, v), by the kernel.

    Args:
        grad_BNSH: the gradient of the whole output; ``out_BNSH`` and ``lse_BNS`` are also of all keys.
        is_causal, starts_BS, bias: as in the forward pass.
    """
    q, k, v = inputs
    if (gpu := _of_gpu(q)) is not None:
        sees = gpu.VisibleKeys(is_causal=is_causal, starts=starts_BS, bias=bias)
        dq, dk, dv, _ = gpu.attend_backward(grad_BNSH, inputs, out_BNSH, lse_BNS, sees)
        return dq, dk, dv
    grads = empty_like(q), empty_like(k), empty_like(v)
    call = KernelArgs(inputs, out_BNSH, lse_BNS, is_causal=is_causal, starts=starts_BS, grads=(grad_BNSH, *grads))
    call.run("superstep_attention_backward")
    return grads


def _of_gpu(x: Tensor) -> ModuleType | None:
    """The kernels of the tensor's GPU; None on a CPU."""
    return triton_loader.module("attention") if x.is_cuda else None


def empty_like(x_BNSH: Tensor) -> Tensor:
    """An empty tensor with a model's memory layout: [B, S, N, H]."""
    B, N, S, H = x_BNSH.shape
    return x_BNSH.new_empty(B, S, N, H).transpose(1, 2)


class _View(Structure):
    _fields_ = (("at", c_void_p), ("batch", c_int64), ("token", c_int64), ("head", c_int64))

    @classmethod
    def of(cls, x_BNSH: Tensor) -> _View:
        return cls(x_BNSH.data_ptr(), x_BNSH.stride(0), x_BNSH.stride(2), x_BNSH.stride(1))


class _KernelArguments(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("batch", "heads", "kv_heads", "queries", "keys", "width")),
        *((name, c_int64) for name in ("is_bf16", "in_pairs", "is_causal")),
        ("scale", c_float),
        ("starts", c_void_p),
        ("behind", c_void_p),
        *((name, _View) for name in ("q", "k", "v", "out")),
        ("lse", c_void_p),
        *((name, _View) for name in ("grad", "dq", "dk", "dv")),
        ("first", c_int64),
        ("ends", c_void_p),
        ("parts", c_int64),
        *((name, c_float) for name in ("grid_scale", "grid_limit")),
        ("outside", c_void_p),
    )


class KernelArgs:
    """The arguments of ``attention.cpp``; keeps the tensors of its addresses alive.

    Args:
        inputs: queries, keys and values, [B, heads, tokens, H].
        out: their output, or memory for it, likewise.
        lse: [B, N, S], fp32.
        is_causal: whether a query sees only keys up to its own place.
        starts: the first key that each query sees, int64 [B, S]; None for 0.
        ends: one past the last that it sees, likewise; None where ``is_causal`` says it.
        first: the place of the first query among the keys.
        grads: of a backward pass, the gradients of the output, queries, keys and values.
    """

    def __init__(  # noqa: PLR0913
        self,
        inputs: Qkv,
        out: Tensor,
        lse: Tensor,
        *,
        is_causal: bool,
        starts: Tensor | None = None,
        ends: Tensor | None = None,
        first: int = 0,
        grads: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
    ) -> None:
        q, k, _ = inputs
        B, N, S, H = q.shape
        starts, ends = (None if x is None else x.contiguous() for x in (starts, ends))
        lse = lse.contiguous()
        self._held: tuple[object, ...] = inputs, out, lse, grads, starts, ends
        is_bf16 = q.dtype == torch.bfloat16
        kind = is_bf16, is_bf16 and multiplies_pairs(), is_causal
        sizes = _KernelArguments(B, N, k.shape[1], S, k.shape[2], H, *kind, 1 / math.sqrt(H))
        sizes.starts, sizes.behind = (None if x is None else x.data_ptr() for x in (starts, ends))
        sizes.q, sizes.k, sizes.v, sizes.out = (_View.of(x) for x in (*inputs, out))
        sizes.lse = lse.data_ptr()
        if grads is not None:
            sizes.grad, sizes.dq, sizes.dk, sizes.dv = (_View.of(x) for x in grads)
        sizes.first, sizes.parts = first, 1
        self._arguments = sizes

    def sum_by(self, ends: Tensor, scale: float, limit: float, outside: Tensor) -> None:
        """Sum what queries give keys in parts, on a grid: see ``kernels.exact_attention``.

        Args:
            ends: of the parts, int64.
            scale: of the grid.
            limit: of a part's sum.
            outside: fp32 [1]; receives the largest sum that is not below the limit.
        """
        self._held = *self._held, ends, outside
        arguments = self._arguments
        arguments.ends, arguments.parts, arguments.outside = ends.data_ptr(), len(ends), outside.data_ptr()
        arguments.grid_scale, arguments.grid_limit = scale, limit

    def run(self, name: str) -> None:
        library = compile_library().library
        assert library is not None, "it was chosen because it is there"
        function: ctypes._NamedFuncPointer = getattr(library, name)
        function.restype = None
        function(byref(self._arguments), c_int64(torch.get_num_threads()))
