"""Weights as the compiled products read them: in panels of 64 outputs, of which 4 bytes of each lie side by side.

Numbers of bf16 take three quarters of their bytes, to the bit (``kernels/short.h``), where their exponents are as near
to each other as a model's are.

One layout serves any number of rows: for one row the panels are read from the first byte to the last, for many each
stays in the cache while rows go by. A row's sums are made in the order of its inputs, so that its bits do not depend on
the rows beside it.

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
"""Of each output, side by side."""

SHORT_WORDS, WORDS = 96, 128
"""Words of 16 bits that 64 outputs and two inputs take, short and long."""

MOST_WHOLE = 1 / 8
"""Of the steps of a weight, those that may be kept whole; with more of them it stays as it is."""

LARGE = 2**21
"""Bytes of a large page."""


@dataclass(frozen=True, slots=True)
class QuantizedPanels:
    """Panels of short weights.

    Attributes:
        words: [P, I / 2, 96].
        base: of each panel.
        whole_begin: [P + 1]: where its whole steps begin.
        whole_steps: their numbers.
        whole: them.
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
        # The memory that ``weight`` points into.
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
    """How weights are laid out for the compiled products.

    Args:
        library: the compiled decoder.
        otherwise: for weights that these do not take: of another dtype, or of an odd number of inputs.
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
    """Whether the compiled products take a weight."""
    is_bf16 = weight_OI.dtype == torch.bfloat16 and weight_OI.device.type == "cpu"
    return is_bf16 and weight_OI.shape[1] % BYTES == 0


def shorten(library: ctypes.CDLL, panels: Tensor) -> QuantizedPanels | None:
    """Panels of bf16 numbers [P, I / 2, 64, 2] in fewer bytes; None where their exponents are too far apart."""
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
    """The same numbers, contiguous, in pages of 2 MiB where the system gives them: a weight is read from end to end at
    every step, which goes a twentieth faster where fewer pages are looked up.
    """
    if x.nbytes < LARGE:
        return x.contiguous()
    room = mmap.mmap(-1, x.nbytes + LARGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(room)) % LARGE
    out = torch.frombuffer(room, dtype=x.dtype, count=x.numel(), offset=start).view(x.shape)
    with contextlib.suppress(AttributeError, OSError):  # elsewhere than on Linux, or where it was built without
        room.madvise(mmap.MADV_HUGEPAGE, start, x.nbytes // LARGE * LARGE)
    return out.copy_(x)


def _fill(of_O: Tensor) -> Tensor:
    """With the first of them again, up to a whole panel: nobody reads what comes of it."""
    missing = -len(of_O) % PANEL
    return torch.cat((of_O, of_O[:1].expand(missing, *of_O.shape[1:]))) if missing else of_O.contiguous()
