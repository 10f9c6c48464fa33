"""Weights in and out of a Hugging Face folder: safetensors by global name, and a config.json.

folder/config.json
folder/model.safetensors                           all tensors, or
folder/model.safetensors.index.json                the file of each tensor, and
folder/model-00001-of-00004.safetensors ...        those files

Tensors in MXFP4 or FP8 are read as plain numbers (``model.files.mxfp4``, ``model.files.fp8``), and never written.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from superstep.errors import StateError
from superstep.model.files.fp8 import with_fp8
from superstep.model.files.mxfp4 import with_mxfp4
from superstep.plan.model.hf_config import to_hf_config
from superstep.plan.model.shape import ModelShape

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
HEADER_BYTES = 100_000_000
"""safetensors' limit of a file's header."""
ROWS_AT_ONCE = 4096
"""Rows of a matrix that are compared at once."""
_EMBED, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class HfTensor(Protocol):
    """A tensor in a file. Indexing it like a tensor reads only that part."""

    def get_shape(self) -> list[int]: ...

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Tensor: ...


class Weights(Mapping[str, HfTensor]):
    """The tensors of a folder by global name, not read yet. The files stay mapped while it lives.

    Args:
        path: of the folder or file.
        file_of: the opened file of each tensor, by name.
        progress: called before each tensor.
    """

    def __init__(self, path: Path, file_of: Mapping[str, Any], progress: Callable[[], None] = lambda: None) -> None:
        self.path = path
        self.progress = progress
        self._file_of = file_of

    def watch(self, progress: Callable[[], None]) -> Weights:
        """The same, with ``progress`` called before each tensor."""
        return Weights(self.path, self._file_of, progress)

    def __getitem__(self, name: str) -> HfTensor:
        self.progress()
        stored: HfTensor = self._file_of[name].get_slice(name)
        return stored

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)


def open_weights(path: Path) -> Weights:
    """The weights in a folder, or in one safetensors file, to be read slice by slice.

    Raises:
        StateError: there are none, or they cannot be read.
    """
    index = path / INDEX
    try:
        if path.is_file():
            files = [path]
        elif index.is_file():
            files = _index_files(path)
        else:
            files = [path / FILE]
        for file in files:
            require_regular(file)
            read_header(file)
        opened = [safe_open(file, framework="pt", device="cpu") for file in files]
    except OSError as error:
        raise StateError(f"{path} has no readable weights ({error}); it must hold {FILE} or {INDEX}.") from error
    except (SafetensorError, ValueError, RecursionError, KeyError, AttributeError, TypeError) as error:
        raise StateError(f"{path} is damaged: {error!r}; fetch or save it again.") from error
    return Weights(path, with_fp8(with_mxfp4({name: file for file in opened for name in file.keys()})))  # noqa: SIM118


def require_regular(file: Path) -> None:
    """Refuse files that may block forever: opening a FIFO waits for a writer, in safetensors with the GIL held.

    Raises:
        StateError: it is no regular file.
        OSError: it does not exist.
    """
    if not stat.S_ISREG(file.stat().st_mode):
        raise StateError(f"{file} is no regular file; name a file of weights.")


def read_header(file: Path) -> None:
    """Read the header first, without the GIL: if the read blocks, other threads continue."""
    with file.open("rb", buffering=0) as stream:
        size_bytes = int.from_bytes(stream.read(8), "little")
        stream.read(min(size_bytes, HEADER_BYTES))


def _index_files(folder: Path) -> list[Path]:
    """The files that a folder's index names.

    Raises:
        StateError: one lies outside of the folder: an index must not lead a reader out of it.
    """
    names = sorted(set(json.loads((folder / INDEX).read_text("utf-8"))["weight_map"].values()))
    for name in names:
        if name in ("", ".", "..") or Path(name).name != name:
            raise StateError(
                f"{folder / INDEX} names '{name}', which is no file beside it; name files of {folder} alone."
            )
    return [folder / name for name in names]


def check_weights(weights: Weights, shapes: Mapping[str, Sequence[int]]) -> None:
    """Compare a folder's tensors with the global shapes of a model.

    Raises:
        StateError: tensors are missing, unknown or of another shape, or the head of a tied model is not tied.
    """
    further = _further_layer(weights, shapes)
    faults = {
        "missing": [name for name in shapes if name not in weights],
        "not of this model": [name for name in weights if name not in shapes and not _is_spare(name, further)],
        "of another shape": [
            f"{name} {weights[name].get_shape()}, not {list(shape)}"
            for name, shape in shapes.items()
            if name in weights and weights[name].get_shape() != list(shape)
        ],
    }
    if any(faults.values()):
        message = "; ".join(f"{what}: {_first(names)}" for what, names in faults.items() if names)
        raise StateError(f"{weights.path}: {message}. Set model.name to the config.json beside these weights.")
    # Some tied checkpoints store the head a second time.
    if _HEAD in weights and _HEAD not in shapes and not _is_same(weights[_HEAD], weights[_EMBED]):
        raise StateError(
            f"{weights.path}: {_HEAD} differs from {_EMBED}, so they are not tied; set model.tied = false."
        )


def load_weights(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill whole tensors, by global name, in place; the stored dtype is cast to theirs.

    Raises:
        StateError: the folder has other tensors. Nothing has been filled then.
    """
    weights = open_weights(path)
    check_weights(weights, {name: tensor.shape for name, tensor in tensors.items()})
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(weights[name][:])


def save_weights(path: Path, tensors: Mapping[str, Tensor], shape: ModelShape) -> None:
    """Write whole tensors, by global name, as a Hugging Face folder."""
    path.mkdir(parents=True, exist_ok=True)
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    config = {**to_hf_config(shape), "torch_dtype": dtype}
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    # A reader sees the old file or the new one, never a part of it.
    unfinished = path / f"{FILE}.unfinished"
    save_file({name: x.detach().contiguous() for name, x in tensors.items()}, unfinished, {"format": "pt"})
    unfinished.replace(path / FILE)
    (path / INDEX).unlink(missing_ok=True)


def _is_same(one: HfTensor, other: HfTensor) -> bool:
    """Whether two matrices are equal; a few rows of them are in memory at a time."""
    if one.get_shape() != other.get_shape():
        return False
    starts = range(0, one.get_shape()[0], ROWS_AT_ONCE)
    return all(torch.equal(*(each[slice(start, start + ROWS_AT_ONCE)] for each in (one, other))) for start in starts)


def _further_layer(weights: Weights, shapes: Mapping[str, Sequence[int]]) -> str:
    """The prefix of the module for further tokens: DeepSeek's files have it as one more layer."""
    layers = [int(name.split(".")[2]) for name in shapes if name.startswith("model.layers.")]
    behind = f"model.layers.{max(layers, default=-1) + 1}."
    return behind if f"{behind}eh_proj.weight" in weights else "mtp."


def _is_spare(name: str, further: str) -> bool:
    """Whether a checkpoint may hold this tensor without use: old Llama files store the rotary frequencies, Qwen3-Next's
    and DeepSeek's modules for further tokens.
    """
    return name == _HEAD or name.endswith("rotary_emb.inv_freq") or name.startswith(("mtp.", further))


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
