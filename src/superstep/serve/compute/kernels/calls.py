"""ctypes of the compiled decoder: the structures of ``decoder.cpp``, field by field."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from ctypes import POINTER, c_double, c_int64, c_void_p
from typing import ClassVar

from torch import Tensor

Fields = list[tuple[str, type]]


class Short(ctypes.Structure):
    """Extra arrays of panels with shortened weights."""

    _fields_: ClassVar[Fields] = [
        ("base", c_void_p),
        ("whole_begin", c_void_p),
        ("whole_steps", c_void_p),
        ("whole", c_void_p),
    ]


class Weight(ctypes.Structure):
    """A weight in panels."""

    _fields_: ClassVar[Fields] = [
        ("panels", c_void_p),
        ("scale", c_void_p),
        ("sums", c_void_p),
        ("bias", c_void_p),
        ("shorts", Short),
        ("outputs", c_int64),
        ("inputs", c_int64),
        ("is_int8", c_int64),
        ("cells", c_int64),
    ]


class BlockArgs(ctypes.Structure):
    """A layer."""

    _fields_: ClassVar[Fields] = [
        ("norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("norm_after", c_void_p),
        ("qkv", Weight),
        ("out", Weight),
        ("gate_up", Weight),
        ("down", Weight),
    ]


class ModelArgs(ctypes.Structure):
    """A dense decoder without its embedding."""

    _fields_: ClassVar[Fields] = [
        ("embedding", c_void_p),
        ("blocks", POINTER(BlockArgs)),
        ("layers", c_int64),
        ("width", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("inner", c_int64),
        ("eps", c_double),
        ("norm", c_void_p),
        ("exponentials", c_void_p),
        ("roots", c_void_p),
        ("attend", c_void_p),
        ("head", Weight),
    ]


class KvCacheArgs(ctypes.Structure):
    """The keys and values of all layers."""

    _fields_: ClassVar[Fields] = [("keys", c_void_p), ("values", c_void_p), ("layer_size", c_int64)]


class LayerKvArgs(ctypes.Structure):
    """The keys and values of one layer."""

    _fields_: ClassVar[Fields] = [
        ("keys", c_void_p),
        ("values", c_void_p),
        ("kv_heads", c_int64),
        ("width", c_int64),
    ]


class Places(ctypes.Structure):
    """Positions of a step's rows, and the pages of their keys."""

    _fields_: ClassVar[Fields] = [
        ("parts", c_void_p),
        ("count", c_int64),
        ("pages", c_void_p),
        ("page_tokens", c_int64),
        ("window", c_int64),
    ]


class Queries(ctypes.Structure):
    """Rows that attend."""

    _fields_: ClassVar[Fields] = [("rows", c_void_p), ("stride", c_int64), ("out", c_void_p), ("heads", c_int64)]


class LoraArgs(ctypes.Structure):
    """One adapter's addition to a linear."""

    _fields_: ClassVar[Fields] = [("a", c_void_p), ("b", c_void_p), ("rank", c_int64), ("scale", c_double)]


class AdapterArgs(ctypes.Structure):
    """The adapters of a step, and each row's adapter."""

    _fields_: ClassVar[Fields] = [("parts", c_void_p), ("count", c_int64), ("of_row", c_void_p)]


class StepArgs(ctypes.Structure):
    """Arguments of one call."""

    _fields_: ClassVar[Fields] = [
        ("rows", c_int64),
        ("tokens", c_void_p),
        ("cosine", c_void_p),
        ("sine", c_void_p),
        ("places", Places),
        ("wanted", c_void_p),
        ("wants", c_int64),
        ("logits", c_void_p),
        ("scratch", c_void_p),
        ("adapted", AdapterArgs),
    ]


def as_array(numbers: Sequence[int], kind: str) -> array[int]:
    """Numbers in memory; ``kind`` as in ``array``: q is int64, i is int32."""
    return array(kind, numbers)


def address(of: array[int]) -> int:
    """The address of an array. The caller keeps the array alive."""
    return of.buffer_info()[0]


def pointer(tensor: Tensor | None) -> int | None:
    """The address of a contiguous tensor. The caller keeps it alive."""
    if tensor is None:
        return None
    assert tensor.is_contiguous()
    assert tensor.device.type == "cpu"
    return tensor.data_ptr()
