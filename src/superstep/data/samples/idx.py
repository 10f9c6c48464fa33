"""idx files, the format of MNIST (http://yann.lecun.com/exdb/mnist): a header with the dims, then the numbers.

bytes 0, 1    0
byte 2        the dtype, see DTYPES
byte 3        the number of dims
4 each        the dims, big endian; then the numbers, big endian
"""

from __future__ import annotations

import gzip
import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from superstep.errors import DataError

DTYPES = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}
"""numpy's name of each dtype."""


def read_idx(path: str | Path) -> Tensor:
    """The numbers of an idx file, compressed by gzip or not.

    Raises:
        DataError: it is no whole idx file.
    """
    try:
        raw = Path(path).read_bytes()
        raw = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    except (OSError, EOFError) as error:
        raise DataError(
            f"'{path}' cannot be read ({error}); name an idx file, such as train-images-idx3-ubyte."
        ) from None
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] not in DTYPES:
        raise DataError(f"'{path}' is no idx file: it begins with {raw[:4].hex() or 'nothing'}.")
    dtype, first = np.dtype(DTYPES[raw[2]]), 4 + 4 * raw[3]
    dims = np.frombuffer(raw[4:first], ">u4").tolist()
    wanted = first + math.prod(dims) * dtype.itemsize
    if len(dims) != raw[3] or len(raw) != wanted:
        raise DataError(f"'{path}' is cut off or damaged: it has {len(raw)} bytes, and dims {dims} need {wanted}.")
    return torch.from_numpy(np.frombuffer(raw, dtype, offset=first).reshape(dims).astype(dtype.newbyteorder("=")))


def write_idx(path: Path, values: Tensor) -> None:
    """Write numbers as an idx file; raises KeyError for a dtype that the format lacks."""
    array = values.numpy()
    codes = {np.dtype(name).newbyteorder("="): code for code, name in DTYPES.items()}
    code = codes[array.dtype]
    header = bytes((0, 0, code, array.ndim)) + np.array(array.shape, ">u4").tobytes()
    path.write_bytes(header + array.astype(DTYPES[code]).tobytes())
