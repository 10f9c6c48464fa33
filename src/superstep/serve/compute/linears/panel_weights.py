"""Weights in the layout of the compiled products: panels of 64 outputs, with 4 bytes of each output side by side.

bf16 weights are stored losslessly in three quarters of their bytes (``kernels/short.h``), where their exponents lie as
close together as a model's do.

One layout serves any number of rows: for one row the panels are read in sequence; for many, each panel stays in the
cache for all rows. A row is summed in the order of its inputs, so that its bits do not depend on the other rows.

    O  outputs      I  inputs      T  rows      P  panels
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from ctypes import byref
from dataclasses import dataclass

import torch
from torch import Tensor

from superstep.serve.compute.kernels.calls import Short, Weight, pointer
from superstep.serve.compute.linears.fused_linears import Pack, Product
from superstep.serve.compute.linears.quantize import WeightFormat

PANEL = 64
BYTES = 4
"""Bytes of each output that lie side by side."""

SHORT_WORDS, WORDS = 96, 128
"""16-bit words of 64 outputs and two inputs, shortened and plain."""

MOST_WHOLE = 1 / 8
"""The largest share of a weight's steps that may be stored plain; above it the weight is not shortened."""

LARGE = 2**21
"""Bytes of a large page of memory."""


@dataclass(frozen=True, slots=True)
class QuantizedPanels:
    """Panels of shortened weights.

    Attributes:
        words: [P, I / 2, 96].
        base: exponent base of each panel.
        whole_begin: [P + 1], the index of each panel's first plain step.
        whole_steps: indices of the plain steps.
        whole: their values.
    """

    words: Tensor
    base: Tensor
    whole_begin: Tensor
    whole_steps: Tensor
    whole: Tensor


class PanelLinear:
    """A product with one weight.

    Args:
        library: the compiled decoder.
        values_OI: bf16, or codes of 8 bits.
        scale_O: of the codes; None where there are none.
        bias_O: None where there is none.
        cells: of exact mode's sums over the inputs; 0 in fast mode.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        values_OI: Tensor,
        *,
        scale_O: Tensor | None = None,
        bias_O: Tensor | None = None,
        cells: int = 0,
    ) -> None:
        outputs, inputs = values_OI.shape
        self._library = library
        self._outputs = outputs
        self._is_int8 = scale_O is not None
        side_by_side = BYTES // values_OI.element_size()
        panels = _fill(values_OI).view(-1, PANEL, inputs // side_by_side, side_by_side).transpose(1, 2).contiguous()
        short = None if self._is_int8 else shorten(library, panels)
        laid = in_large_pages(panels if short is None else short.words)
        scale, bias = (None if x is None else _fill(x.float()) for x in (scale_O, bias_O))
        sums = _fill(values_OI.sum(1, dtype=torch.int32)) if self._is_int8 else None
        # Keeps alive the memory that ``weight`` points to.
        self._held = (laid, scale, sums, bias)
        self._beside = () if short is None else (short.base, short.whole_begin, short.whole_steps, short.whole)
        shorts = Short(*map(pointer, self._beside))
        self.weight = Weight(*map(pointer, self._held), shorts, outputs, inputs, self._is_int8, cells)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., I] bf16 to [..., O] bf16."""
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        out = torch.empty(len(rows), self._outputs, dtype=torch.bfloat16)
        codes = torch.empty(rows.shape, dtype=torch.uint8) if self._is_int8 else None
        scale = torch.empty(len(rows), dtype=torch.float32) if self._is_int8 else None
        threads = torch.get_num_threads()
        rooms = torch.empty(threads, PANEL * rows.shape[1], dtype=torch.bfloat16) if self._beside else None
        self._library.superstep_product(
            byref(self.weight),
            ctypes.c_void_p(pointer(rows)),
            ctypes.c_int64(len(rows)),
            ctypes.c_void_p(pointer(out)),
            ctypes.c_void_p(pointer(codes)),
            ctypes.c_void_p(pointer(scale)),
            ctypes.c_void_p(pointer(rooms)),
            ctypes.c_int64(threads),
        )
        return out.view(*x.shape[:-1], -1)


def in_panels(library: ctypes.CDLL, otherwise: Pack, row: WeightFormat | None = None) -> Pack:
    """A ``Pack`` for the compiled products.

    Args:
        library: the compiled decoder.
        otherwise: for weights that these do not support: another dtype, or an odd number of inputs.
        row: the format of 8-bit weights and inputs; None keeps bf16.
    """

    def pack(weight_OI: Tensor, bias_O: Tensor | None) -> Product | None:
        if not takes(weight_OI):
            return otherwise(weight_OI, bias_O)
        if row is None:
            return PanelLinear(library, weight_OI, bias_O=bias_O)
        held = row.encode(weight_OI)
        return PanelLinear(library, held.codes, scale_O=held.scale[:, 0], bias_O=bias_O)

    return pack


def takes(weight_OI: Tensor) -> bool:
    """Whether the compiled products support a weight."""
    is_bf16 = weight_OI.dtype == torch.bfloat16 and weight_OI.device.type == "cpu"
    return is_bf16 and weight_OI.shape[1] % BYTES == 0


def shorten(library: ctypes.CDLL, panels: Tensor) -> QuantizedPanels | None:
    """Shortened panels of bf16 numbers [P, I / 2, 64, 2]; None where their exponents are too far apart."""
    count, steps = panels.shape[:2]
    threads = ctypes.c_int64(torch.get_num_threads())
    sizes = ctypes.c_int64(count), ctypes.c_int64(steps)
    base, begin = torch.empty(count, dtype=torch.int16), torch.zeros(count + 1, dtype=torch.int64)
    at = ctypes.c_void_p(pointer(panels))
    library.superstep_bases(at, *sizes, *(ctypes.c_void_p(pointer(x)) for x in (base, begin[1:])), threads)
    whole = int(begin.sum())
    if whole > MOST_WHOLE * count * steps:
        return None
    out = QuantizedPanels(
        words=torch.empty(count, steps, SHORT_WORDS, dtype=torch.int16),
        base=base,
        whole_begin=begin.cumsum(0),
        whole_steps=torch.empty(whole, dtype=torch.int32),
        whole=torch.empty(whole, WORDS, dtype=torch.bfloat16),
    )
    shorts = Short(*map(pointer, (out.base, out.whole_begin, None, None)))
    into = (ctypes.c_void_p(pointer(x)) for x in (out.words, out.whole_steps, out.whole))
    library.superstep_shorten(at, *sizes, byref(shorts), *into, threads)
    return out


def in_large_pages(x: Tensor) -> Tensor:
    """A contiguous copy in pages of 2 MiB, where the system has them: every step reads the whole weight, which is 5%
    faster with fewer page-table entries.
    """
    if x.nbytes < LARGE:
        return x.contiguous()
    room = mmap.mmap(-1, x.nbytes + LARGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(room)) % LARGE
    out = torch.frombuffer(room, dtype=x.dtype, count=x.numel(), offset=start).view(x.shape)
    with contextlib.suppress(AttributeError, OSError):  # other systems than Linux, or a Python without it
        room.madvise(mmap.MADV_HUGEPAGE, start, x.nbytes // LARGE * LARGE)
    return out.copy_(x)


def _fill(of_O: Tensor) -> Tensor:
    """Pad to a whole panel with copies of the first output; the results of the padding are not used."""
    missing = -len(of_O) % PANEL
    return torch.cat((of_O, of_O[:1].expand(missing, *of_O.shape[1:]))) if missing else of_O.contiguous()
