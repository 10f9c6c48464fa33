"""The manifest of a checkpoint: the position, and hashes of every byte of the folder.

    {"format": 2, "position": {...}, "files": {...}, "tensors": {...}, "beside": {...}, "blake2b": "..."}

The last entry is the hash of all others, as text. The text of a content is unique: any other text is an error, so that
no byte of it can change undetected.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from superstep.errors import DamagedCheckpoint, StateError
from superstep.numerics.loss_scale import LossScale
from superstep.state.tensor_file import StoredDtype, digest, size_of

FORMAT = 2
MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """The position of training.

    Attributes:
        step: finished steps, which is also the optimizer's count of updates.
        samples: sequences consumed: the cursor of the data.
        tokens: valid tokens consumed.
        loss_scale: of fp16, for the next step; None in other formats.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0
    loss_scale: LossScale | None = None


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of tensors: its size, the size of its header, and the header's hash."""

    bytes: int
    header_bytes: int
    blake2b: str


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor's place in its file, its hash and its dtype."""

    file: str
    offset: int
    shape: tuple[int, ...]
    blake2b: str
    dtype: StoredDtype = "F32"

    @property
    def bytes(self) -> int:
        """Its size in the file."""
        return size_of(self.shape, self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of a checkpoint.

    Attributes:
        files: the files of tensors, by name.
        tensors: the tensors by name, "exp_avg.NAME" for a moment.
        beside: the hashes of the other files, by name.
    """

    position: Position
    files: Mapping[str, StoredFile]
    tensors: Mapping[str, StoredTensor]
    beside: Mapping[str, str]


def write_manifest(manifest: Manifest) -> str:
    """The text of a manifest."""
    content = {
        "format": FORMAT,
        "position": _describe_position(manifest.position),
        "files": {name: asdict(file) for name, file in manifest.files.items()},
        "tensors": {
            name: {
                "file": tensor.file,
                "offset": tensor.offset,
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "blake2b": tensor.blake2b,
            }
            for name, tensor in manifest.tensors.items()
        },
        "beside": dict(manifest.beside),
    }
    return seal(content)


def seal(content: Mapping[str, Any]) -> str:
    """The unique text of a manifest's content, with its hash."""
    return json.dumps({**content, "blake2b": digest(json.dumps(content, indent=1).encode())}, indent=1) + "\n"


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint. Its paths lie within the folder; its tensors are not read.

    Raises:
        Damaged: it is missing, damaged, or names files outside of the folder.
        StateError: it has another format, or this user may not read it.
    """
    try:
        data = (folder / MANIFEST).read_bytes()
    except PermissionError as error:
        raise StateError(f"{folder / MANIFEST} cannot be read ({error.strerror}); grant access.") from error
    except OSError as error:
        raise DamagedCheckpoint(f"{folder} is no checkpoint: {MANIFEST} cannot be read ({error})") from error
    manifest = manifest_of(data, str(folder))
    _refuse_outside(folder, manifest)
    return manifest


def manifest_of(data: bytes, folder: str) -> Manifest:
    """Parse a manifest, of a checkpoint with this name. Each of its names is a single file name.

    Raises:
        Damaged: it is damaged, or names files outside of the folder.
        StateError: it has another format.
    """
    try:
        text = data.decode()
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{folder} is no checkpoint: {MANIFEST} cannot be read ({error})") from error
    version = content.get("format") if isinstance(content, dict) else None
    if version == 1:
        raise StateError(
            f"{folder} is a checkpoint of the older format 1, which cannot show that its position and names are what "
            f"was written; this version reads format {FORMAT}. Go on with the run by the version that wrote it."
        )
    if version != FORMAT:
        raise StateError(f"{folder} is a checkpoint of another format; this version reads format {FORMAT}.")
    if seal({key: value for key, value in content.items() if key != "blake2b"}) != text:
        raise DamagedCheckpoint(f"{folder} is damaged: {MANIFEST} has other bits than were written")
    try:
        manifest = _parse(content)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise DamagedCheckpoint(f"{folder} is damaged: {MANIFEST} is not what was written ({error!r})") from error
    for name in (*manifest.files, *manifest.beside):
        if not _is_plain(name):
            raise _outside(folder, name)
    return manifest


def is_manifest_of_ours(path: Path) -> bool:
    """Whether a file is a manifest of any format, by a quick check."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return (
        isinstance(content, dict) and isinstance(content.get("format"), int) and {"position", "tensors"} <= set(content)
    )


def _parse(content: Mapping[str, Any]) -> Manifest:
    manifest = Manifest(
        position=_parse_position(content["position"]),
        files={
            name: StoredFile(_count(file["bytes"], name), _count(file["header_bytes"], name), file["blake2b"])
            for name, file in content["files"].items()
        },
        tensors={
            name: StoredTensor(
                tensor["file"],
                _count(tensor["offset"], name),
                tuple(_count(size, name) for size in tensor["shape"]),
                tensor["blake2b"],
                _parse_dtype(tensor["dtype"], name),
            )
            for name, tensor in content["tensors"].items()
        },
        beside=dict(content["beside"]),
    )
    for name, tensor in manifest.tensors.items():
        if tensor.offset + tensor.bytes > manifest.files[tensor.file].bytes:
            raise ValueError(f"{name} ends beyond {tensor.file}")
    return manifest


def _describe_position(position: Position) -> dict[str, Any]:
    """A position without the loss scale that it does not have."""
    return {name: value for name, value in asdict(position).items() if value is not None}


def _parse_position(content: Mapping[str, Any]) -> Position:
    step, samples, tokens = (_count(content[name], name) for name in ("step", "samples", "tokens"))
    scale = {name: _count(value, name) for name, value in content.get("loss_scale", {}).items()}
    return Position(step=step, samples=samples, tokens=tokens, loss_scale=LossScale(**scale) if scale else None)


def _parse_dtype(value: object, name: str) -> StoredDtype:
    if value == "F32" or value == "U8":
        return value
    raise ValueError(f"{name} has the dtype {value!r}")


def _count(value: object, name: str) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{name} = {value!r} is no count")
    return value


def _refuse_outside(folder: Path, manifest: Manifest) -> None:
    for name in (*manifest.files, *manifest.beside):
        if not _is_inside(folder, name):
            raise _outside(str(folder), name)
        path = folder / name
        if path.exists() and not path.is_file():
            raise DamagedCheckpoint(f"{folder}: '{name}' is no regular file and was not written so")


def _outside(folder: str, name: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(
        f"{folder}: {MANIFEST} names '{name}', which lies outside the checkpoint and was not written so"
    )


def _is_plain(name: str) -> bool:
    return name not in ("", ".", "..") and not any(sign in name for sign in "/\\\0")


def _is_inside(folder: Path, name: str) -> bool:
    try:
        return (folder / name).resolve().parent == folder.resolve()
    except (OSError, RuntimeError):  # a link that leads to itself
        return False
