"""The safetensors files of a checkpoint: the place of each global tensor, before any byte is written."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from superstep.plan.optimizers import Moment
from superstep.plan.resolution.lora import PREFIX
from superstep.state.tensor_piece import SCALE, Kind

FILES: Mapping[Kind, str] = {
    "weight": "model.safetensors",
    **dict.fromkeys(get_args(Moment), "optimizer.safetensors"),
}
ADAPTER_FILE = "adapter_model.safetensors"
"""The file of adapters' weights, under PEFT's names."""
StoredDtype = Literal["F32", "U8"]
ELEMENT_BYTES: Mapping[StoredDtype, int] = {"F32": 4, "U8": 1}
BLOCK_BYTES = 1 << 22
"""Bytes that are read and hashed at once."""


@dataclass(frozen=True, slots=True)
class TensorFile:
    """A safetensors file: its header, and each tensor's offset, shape and dtype."""

    header: bytes
    offsets: Mapping[str, int]
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, StoredDtype]
    total: int

    def size(self, name: str) -> int:
        """Bytes of a tensor."""
        return size_of(self.shapes[name], self.dtypes[name])


def entry(kind: Kind, name: str) -> str:
    """A tensor's name in its file."""
    return name if kind == "weight" else f"{kind}.{name}"


def file_of(kind: Kind, name: str) -> str:
    """The file of a tensor."""
    return ADAPTER_FILE if kind == "weight" and name.startswith(PREFIX) else FILES[kind]


def size_of(shape: tuple[int, ...], dtype: StoredDtype = "F32") -> int:
    """Bytes of a tensor; one without dims has one element."""
    return ELEMENT_BYTES[dtype] * math.prod(shape)


def tensor_files(tensors: Mapping[Kind, Mapping[str, tuple[int, ...]]]) -> dict[str, TensorFile]:
    """The files for global tensors of these kinds, names and shapes."""
    contents: dict[str, dict[str, tuple[int, ...]]] = {}
    for kind, shapes in tensors.items():
        for name, shape in shapes.items():
            contents.setdefault(file_of(kind, name), {})[entry(kind, name)] = shape
    return {file: _tensor_file(shapes) for file, shapes in contents.items()}


def _tensor_file(shapes: Mapping[str, tuple[int, ...]]) -> TensorFile:
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts: dict[str, int] = {}
    # What has scales is in 8 bits.
    dtypes: dict[str, StoredDtype] = {name: "U8" if name + SCALE in shapes else "F32" for name in shapes}
    at = 0
    for name, shape in shapes.items():
        size = size_of(shape, dtypes[name])
        table[name] = {"dtype": dtypes[name], "shape": list(shape), "data_offsets": [at, at + size]}
        starts[name] = at
        at += size
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 64)
    header = struct.pack("<Q", len(text)) + text
    offsets = {name: len(header) + start for name, start in starts.items()}
    return TensorFile(header, offsets, shapes, dtypes, len(header) + at)


def digest(data: bytes | memoryview) -> str:
    """The hash in manifests."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def digest_of(path: Path, offset: int, size: int) -> str:
    """The hash of a part of a file.

    Raises:
        OSError: it cannot be read, or ends early.
    """
    digest = hashlib.blake2b(digest_size=16)
    buffer = memoryview(bytearray(min(size, BLOCK_BYTES)))
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        while size:
            got = file.readinto(buffer[:size])
            if not got:
                raise OSError(f"it ends at byte {file.tell()}")
            digest.update(buffer[:got])
            size -= got
    return digest.hexdigest()
