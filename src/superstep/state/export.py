"""Export of a checkpoint's weights as a folder for other loaders: in shards, in fp32 or bf16, without training state.

    out/model.safetensors                                    or, above the size of a shard,
    out/model-00001-of-00002.safetensors ...                 shards, and
    out/model.safetensors.index.json                         the shard of each tensor
    out/config.json, tokenizer.json, ...                     the files beside the weights

All hashes are verified on the way, with a few megabytes in memory at a time. The folder gets its name once all of it is
on disk.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

import torch

from superstep.errors import ConfigError, DamagedCheckpoint, Fault, StateError, is_full
from superstep.model.files.hf import FILE, INDEX
from superstep.state.fsync import sync, write_text
from superstep.state.manifest import Manifest, StoredTensor
from superstep.state.tensor_file import BLOCK_BYTES, FILES
from superstep.state.tensor_piece import bytes_of
from superstep.state.verify import glance

Dtype = Literal["fp32", "bf16"]
OF_TRAINING = ("corpus.json",)
"""Files that only a resumed run needs."""

_NAMES: Mapping[Dtype, tuple[str, str, torch.dtype, int]] = {
    "fp32": ("F32", "float32", torch.float32, 4),
    "bf16": ("BF16", "bfloat16", torch.bfloat16, 2),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportResult:
    """The result of an export.

    Attributes:
        files: the files of tensors.
        bytes: of tensors.
        has_config: whether other loaders can build the model; a user's own model has no ``config.json``.
    """

    files: tuple[str, ...]
    bytes: int
    has_config: bool


def export(checkpoint: Path, out: Path, *, dtype: Dtype, shard_bytes: int) -> ExportResult:
    """Write the weights of a checkpoint to a folder.

    Raises:
        ConfigError: ``out`` exists, or other loaders have no such model.
        Damaged: the checkpoint is damaged.
        StateError: it holds no model's weights, or cannot be read.
        Fault: ``out`` cannot be written. Nothing of it is left.
    """
    if out.exists():
        raise ConfigError(f"--out = '{out}' is there already; name a folder that is not.")
    manifest = glance(checkpoint)
    weights = {name: at for name, at in manifest.tensors.items() if at.file == FILES["weight"]}
    if not weights:
        raise StateError(
            f"{checkpoint} holds an adapter and no model; put it into its base by superstep tune merge RUN --out DIR."
        )
    _require_other_loaders(checkpoint, manifest)
    unfinished = out.with_name(f"{out.name}.unfinished")
    try:
        unfinished.mkdir(parents=True)
    except OSError as error:
        raise _unwritable(unfinished, error) from error
    try:
        return _write(checkpoint, manifest, weights, unfinished, out, dtype, shard_bytes)
    except OSError as error:
        raise _unwritable(out, error) from error
    finally:
        with suppress(OSError):
            shutil.rmtree(unfinished)


def _require_other_loaders(checkpoint: Path, manifest: Manifest) -> None:
    """Raises ConfigError for a model with positions that no other loader of such folders has."""
    if "config.json" not in manifest.beside:
        return
    positions = json.loads((checkpoint / "config.json").read_text(encoding="utf-8")).get("positions", "rope")
    if positions != "rope":
        raise ConfigError(
            f"{checkpoint}: model.positions = '{positions}', and Hugging Face's format has no such attention; serve or "
            "resume the run's own folder, or train with model.positions = 'rope'."
        )


def _unwritable(path: Path, error: OSError) -> Fault:
    mend = "free space" if is_full(error) else "mend that, or name another"
    return Fault(f"--out = '{path}' cannot be written: {error.strerror or error}; {mend}.")


def _write(
    checkpoint: Path,
    manifest: Manifest,
    weights: Mapping[str, StoredTensor],
    unfinished: Path,
    out: Path,
    dtype: Dtype,
    shard_bytes: int,
) -> ExportResult:
    shards = _shards(weights, dtype, shard_bytes)
    files = [FILE] if len(shards) == 1 else [_shard(number, len(shards)) for number in range(1, len(shards) + 1)]
    for file, names in zip(files, shards, strict=True):
        with (unfinished / file).open("wb") as opened:
            opened.write(_header({name: weights[name] for name in names}, dtype))
            for name in names:
                _copy(checkpoint, name, weights[name], opened, dtype)
        sync(unfinished / file)
    total = sum(_size(at, dtype) for at in weights.values())
    if len(shards) > 1:
        of = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": of}
        write_text(unfinished / INDEX, json.dumps(index, indent=2) + "\n")
    for name in manifest.beside:
        if name not in OF_TRAINING:
            text = (checkpoint / name).read_text(encoding="utf-8")
            write_text(unfinished / name, _config(text, dtype) if name == "config.json" else text)
    sync(unfinished)
    unfinished.rename(out)
    sync(out.parent)
    return ExportResult(files=tuple(files), bytes=total, has_config="config.json" in manifest.beside)


def _shards(weights: Mapping[str, StoredTensor], dtype: Dtype, most_bytes: int) -> list[list[str]]:
    """The names of each shard, in order; a tensor larger than a shard has one of its own."""
    shards: list[list[str]] = [[]]
    held = 0
    for name, at in weights.items():
        size = _size(at, dtype)
        if shards[-1] and held + size > most_bytes:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += size
    return shards


def _shard(number: int, count: int) -> str:
    return f"{Path(FILE).stem}-{number:05d}-of-{count:05d}.safetensors"


def _size(at: StoredTensor, dtype: Dtype) -> int:
    return at.bytes // 4 * _NAMES[dtype][3]


def _header(tensors: Mapping[str, StoredTensor], dtype: Dtype) -> bytes:
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    low = 0
    for name, at in tensors.items():
        high = low + _size(at, dtype)
        table[name] = {"dtype": _NAMES[dtype][0], "shape": list(at.shape), "data_offsets": [low, high]}
        low = high
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _copy(checkpoint: Path, name: str, at: StoredTensor, into: IO[bytes], dtype: Dtype) -> None:
    """Append a tensor's values, after verifying their hash."""
    left, digest = at.bytes, hashlib.blake2b(digest_size=16)
    with (checkpoint / at.file).open("rb") as file:
        file.seek(at.offset)
        while left:
            data = bytearray(file.read(min(left, BLOCK_BYTES)))
            if not data:
                raise DamagedCheckpoint(f"{checkpoint} is damaged: {at.file} ends within {name}")
            digest.update(data)
            left -= len(data)
            values = torch.frombuffer(data, dtype=torch.float32).to(_NAMES[dtype][2])
            into.write(bytes_of(values))
    if digest.hexdigest() != at.blake2b:
        raise DamagedCheckpoint(f"{checkpoint} is damaged: {name} in {at.file} has other bits than were written")


def _config(text: str, dtype: Dtype) -> str:
    """A model's configuration, with the dtype of its weights."""
    return json.dumps({**json.loads(text), "torch_dtype": _NAMES[dtype][1]}, indent=2) + "\n"
