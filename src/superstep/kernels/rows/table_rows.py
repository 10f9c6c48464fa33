"""Chosen rows of a table: cut out, put back, added to, squared, updated, set to zero; by C++ on a CPU, else by torch.

U  chosen rows    N  rows of a table    W  its width
"""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_float, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from superstep.kernels import compile_cpp
from superstep.kernels.attention import FLAGS
from superstep.kernels.compile_cpp import BuildResult

_FILES = ("rows.cpp", "table_rows.h", "word_pairs.h", "numbers.h", "vector.h")
SOURCES = tuple(Path(__file__).parents[1] / "cpu" / name for name in _FILES)


@cache
def compile_library() -> BuildResult:
    return compile_cpp.build(SOURCES, FLAGS, compile_cpp.folder_of(SOURCES[0]))


def is_compiled() -> bool:
    """Whether the library is available."""
    return compile_library().library is not None


def run(name: str, *arguments: Tensor | int | float) -> float:
    """Call a function of the library; tensors are passed by address, and the caller keeps them alive."""
    library = compile_library().library
    assert library is not None, "it was chosen because it is there"
    function: ctypes._NamedFuncPointer = getattr(library, f"superstep_{name}")
    function.restype = c_double if name == "square_rows" else None
    return function(*map(_to_c, arguments)) or 0.0


def _to_c(argument: Tensor | float) -> c_void_p | c_int64 | c_float:
    match argument:
        case Tensor():
            return c_void_p(argument.data_ptr())
        case float():
            return c_float(argument)
        case _:
            return c_int64(argument)


def _takes(*tables: Tensor) -> bool:
    return all(x.device.type == "cpu" and x.dtype == torch.float32 and x.is_contiguous() for x in tables) and (
        is_compiled()
    )


def add_rows(table_NW: Tensor, rows_U: Tensor, values_UW: Tensor) -> None:
    """``table[rows] += values``; a row may come several times, and is summed in the order of ``rows``."""
    if _takes(table_NW) and values_UW.dtype == torch.float32 and values_UW.stride(1) == 1:
        run("add_rows", table_NW, rows_U.contiguous(), *values_UW.shape, values_UW, values_UW.stride(0))
    elif rows_U.is_cuda:  # sorted, so that the sum has one order
        table_NW.index_put_((rows_U,), values_UW, accumulate=True)
    else:
        table_NW.index_add_(0, rows_U, values_UW)


def cut_rows(table_NW: Tensor, rows_U: Tensor) -> Tensor:
    """``table[rows]``, [U, W], which are zero from now on."""
    if not _takes(table_NW):
        packed = table_NW.index_select(0, rows_U)
        table_NW.index_fill_(0, rows_U, 0)
        return packed
    packed = table_NW.new_empty(len(rows_U), table_NW.shape[1])
    run("cut_rows", table_NW, rows_U, *packed.shape, packed)
    return packed


def put_rows(table_NW: Tensor, rows_U: Tensor, packed_UW: Tensor) -> None:
    """``table[rows] = packed``."""
    if _takes(table_NW, packed_UW):
        run("put_rows", table_NW, rows_U, *packed_UW.shape, packed_UW)
    else:
        table_NW.index_copy_(0, rows_U, packed_UW)


def zero_rows(table_NW: Tensor, rows_U: Tensor) -> None:
    """``table[rows] = 0``."""
    if _takes(table_NW):
        run("zero_rows", table_NW, rows_U, len(rows_U), table_NW.shape[1])
    else:
        table_NW.index_fill_(0, rows_U, 0)


def square_rows(table_NW: Tensor, rows_U: Tensor) -> Tensor:
    """The sum of squares of the rows, fp64."""
    if _takes(table_NW):
        return torch.tensor(run("square_rows", table_NW, rows_U, len(rows_U), table_NW.shape[1]), dtype=torch.float64)
    return row_squares(table_NW.index_select(0, rows_U)).double().sum()


def update_rows(
    table_NW: Tensor, rows_U: Tensor, grads: Tensor, *, lr: float, scale: float, most_norm: float, is_packed: bool
) -> None:
    """``table[rows] -= lr · g``, where g is the rows' gradient divided by ``scale``, each row shortened to
    ``most_norm``. The bits of a row do not depend on the others.

    Args:
        grads: as the table, [N, W]; packed those of the rows alone, [U, W].
    """
    if _takes(table_NW, grads):
        numbers = int(is_packed), float(lr), float(scale), float(most_norm)
        run("update_rows", table_NW, rows_U, len(rows_U), table_NW.shape[1], grads, *numbers)
        return
    grads = grads if is_packed else grads.index_select(0, rows_U)
    norms = row_squares(grads).sqrt() / scale
    by = torch.where(norms > most_norm, most_norm / norms * lr, lr) / scale
    table_NW.index_copy_(0, rows_U, table_NW.index_select(0, rows_U) - by[:, None] * grads)


def row_squares(rows_UW: Tensor) -> Tensor:
    """The sum of squares of each row, fp32 [U], by halves: of elements alone, so that its bits depend on the row."""
    width = 1 << (rows_UW.shape[1] - 1).bit_length()
    squares = torch.nn.functional.pad(rows_UW * rows_UW, (0, width - rows_UW.shape[1]))
    while squares.shape[1] > 1:
        low, high = squares.chunk(2, 1)
        squares = low + high
    return squares[:, 0]
