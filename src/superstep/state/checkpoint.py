"""Checkpoints: the whole model on disk, whatever layout wrote it.

    checkpoints/step-000200/
        model.safetensors        global weights, fp32, under Hugging Face names
        optimizer.safetensors    exp_avg.NAME and exp_avg_sq.NAME
        config.json              of the model, for other loaders
        tokenizer.json
        manifest.json            the position, and a hash of every tensor

Ranks write their own slices into the same files. Everything is written into a folder beside, which is renamed into
place once the manifest is in it: a checkpoint that can be seen is whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import struct
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from superstep.errors import Fault, StateError
from superstep.state.piece import Kind, Piece, spans

T = TypeVar("T")
FORMAT = 1
MANIFEST = "manifest.json"
FILES: Mapping[Kind, str] = {
    "weight": "model.safetensors",
    "exp_avg": "optimizer.safetensors",
    "exp_avg_sq": "optimizer.safetensors",
}


class Peers(Protocol):
    """The ranks that save or load together."""

    @property
    def rank(self) -> int:
        """This one's number."""

    @property
    def size(self) -> int:
        """How many there are."""

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order, on every rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where training stands.

    Attributes:
        step: finished steps, which is also the optimizer's count of updates.
        samples: sequences consumed: the cursor of the data.
        tokens: valid tokens consumed.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0


def entry(kind: Kind, name: str) -> str:
    """A tensor's name in its file."""
    return name if kind == "weight" else f"{kind}.{name}"


def save(
    folder: Path,
    pieces: Sequence[Piece],
    position: Position,
    peers: Peers,
    *,
    tensors: Mapping[Kind, Mapping[str, tuple[int, ...]]],
    beside: Mapping[str, str],
) -> int:
    """Write a checkpoint. Every rank calls this together.

    Args:
        folder: where it will stand; its parent exists, it does not.
        pieces: this rank's.
        position: where training stands.
        peers: the ranks.
        tensors: the shape of every global tensor of each kind.
        beside: text files to put beside the tensors.

    Returns:
        Bytes of tensors on disk.

    Raises:
        Fault: the disk is full or cannot be written. Nothing that was there before is touched.
    """
    partial = folder.with_name(folder.name + ".partial")
    layouts = _layouts(tensors)
    try:
        _together(peers, partial, lambda: _create(partial, layouts) if peers.rank == 0 else None)
        _together(peers, partial, lambda: _write(partial, layouts, pieces))
        hashes = _together(peers, partial, lambda: _hashes(partial, layouts, peers))
        merged = {name: digest for part in hashes for name, digest in part.items()}
        _together(
            peers,
            partial,
            lambda: _publish(partial, folder, layouts, merged, position, beside) if peers.rank == 0 else None,
        )
    except Fault:
        if peers.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return sum(layout.total for layout in layouts.values())


def load(folder: Path, pieces: Iterable[Piece], peers: Peers) -> Position:
    """Fill this rank's pieces from a checkpoint of any layout. Every rank calls this together.

    Raises:
        StateError: the checkpoint is not whole, or not of this model.
    """
    manifest = read_manifest(folder)
    wanted = list(pieces)
    # Every rank learns what any of them found: they go on together or not at all.
    foreign = [problem for part in peers.gather(_foreign(manifest, wanted)) for problem in part]
    if foreign:
        raise StateError(f"{folder} is of another model: {foreign[0]}; name the model that wrote it.")
    wrong = [problem for part in peers.gather(_verify(folder, manifest, peers)) for problem in part]
    if wrong:
        raise StateError(f"{folder} is damaged: {wrong[0]}; delete it and resume from an older checkpoint.")
    stored: dict[str, dict[str, Any]] = manifest["tensors"]
    maps: dict[str, NDArray[np.float32]] = {}
    for piece in wanted:
        name = entry(piece.kind, piece.name)
        found = stored[name]
        path = folder / found["file"]
        maps.setdefault(name, _open(path, found["offset"], piece.shape, "r"))
        values = np.empty(piece.values.numel(), dtype=np.float32)
        for part, at in spans(maps[name][piece.index], piece.low, piece.low + len(values)):
            values[at : at + part.size] = part.reshape(-1)
        piece.values.copy_(piece.values.new_tensor(values))
    return _position(manifest)


def read_position(folder: Path) -> Position:
    """Where training stood when a checkpoint was written.

    Raises:
        StateError: it is no checkpoint.
    """
    return _position(read_manifest(folder))


def _position(manifest: Mapping[str, Any]) -> Position:
    return Position(**manifest["position"])


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint.

    Raises:
        StateError: there is none, or it is of another format.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StateError(
            f"{folder} is no checkpoint: {MANIFEST} cannot be read ({error}); delete it and resume from another."
        ) from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise StateError(f"{folder} is a checkpoint of another format; this version reads format {FORMAT}.")
    try:
        _position(manifest)
        _ = [(t["file"], t["offset"], *t["shape"], t["blake2b"]) for t in manifest["tensors"].values()]
    except (KeyError, TypeError, AttributeError) as error:
        raise StateError(
            f"{folder} is damaged: {MANIFEST} is not what was written; delete it and resume from an older checkpoint."
        ) from error
    return manifest


def checkpoint_at(root: Path, step: int) -> Path:
    """Where the checkpoint of a step stands."""
    return root / f"step-{step:06d}"


def checkpoints(root: Path) -> list[Path]:
    """The whole checkpoints under a folder, oldest first."""
    found = [path for path in root.glob("step-*") if re.fullmatch(r"step-\d{6,}", path.name)]
    return sorted((path for path in found if (path / MANIFEST).is_file()), key=lambda p: int(p.name[5:]))


def prune(root: Path, keep: int) -> None:
    """Delete all but the newest ``keep`` checkpoints, and what a crash left half-written."""
    for old in checkpoints(root)[:-keep]:
        # Without its manifest a folder is no checkpoint: a crash in mid-deletion leaves nothing that would load.
        (old / MANIFEST).unlink()
        shutil.rmtree(old)
    for left in root.glob("step-*"):
        if not (left / MANIFEST).is_file() or left.suffix == ".partial":
            shutil.rmtree(left)


@dataclass(frozen=True, slots=True)
class _File:
    """A safetensors file: its header, and where each tensor starts."""

    header: bytes
    offsets: Mapping[str, int]
    shapes: Mapping[str, tuple[int, ...]]
    total: int


def _layouts(tensors: Mapping[Kind, Mapping[str, tuple[int, ...]]]) -> dict[str, _File]:
    contents: dict[str, dict[str, tuple[int, ...]]] = {}
    for kind, shapes in tensors.items():
        for name, shape in shapes.items():
            contents.setdefault(FILES[kind], {})[entry(kind, name)] = shape
    return {file: _layout(shapes) for file, shapes in contents.items()}


def _layout(shapes: Mapping[str, tuple[int, ...]]) -> _File:
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts: dict[str, int] = {}
    at = 0
    for name, shape in shapes.items():
        size = 4 * int(np.prod(shape))
        table[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + size]}
        starts[name] = at
        at += size
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 64)
    header = struct.pack("<Q", len(text)) + text
    return _File(header, {name: len(header) + start for name, start in starts.items()}, shapes, len(header) + at)


def _open(path: Path, offset: int, shape: tuple[int, ...], mode: str) -> NDArray[np.float32]:
    return np.memmap(path, dtype="<f4", mode=mode, offset=offset, shape=shape)  # type: ignore[call-overload, no-any-return]


def _create(partial: Path, layouts: Mapping[str, _File]) -> None:
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    for name, layout in layouts.items():
        with (partial / name).open("wb") as file:
            # Taking the room now turns a full disk into an error here, not into a bus error in a mapped page.
            if sys.platform == "linux":
                os.posix_fallocate(file.fileno(), 0, layout.total)
            else:
                file.truncate(layout.total)
            file.write(layout.header)


def _write(partial: Path, layouts: Mapping[str, _File], pieces: Sequence[Piece]) -> None:
    for piece in pieces:
        if not piece.is_owner:
            continue
        name, file = entry(piece.kind, piece.name), FILES[piece.kind]
        tensor = _open(partial / file, layouts[file].offsets[name], piece.shape, "r+")
        values = piece.values.detach().cpu().numpy()
        for part, at in spans(tensor[piece.index], piece.low, piece.low + len(values)):
            part[...] = values[at : at + part.size].reshape(part.shape)
        tensor.flush()  # type: ignore[attr-defined]


def _hashes(partial: Path, layouts: Mapping[str, _File], peers: Peers) -> dict[str, str]:
    """The hash of every tensor, shared out over the ranks."""
    every = [(file, name) for file, layout in layouts.items() for name in layout.shapes]
    return {
        name: _hash(partial / file, layouts[file].offsets[name], layouts[file].shapes[name])
        for file, name in every[peers.rank :: peers.size]
    }


def _hash(path: Path, offset: int, shape: tuple[int, ...]) -> str:
    return hashlib.blake2b(_open(path, offset, shape, "r").data.cast("B"), digest_size=16).hexdigest()


def _publish(
    partial: Path,
    folder: Path,
    layouts: Mapping[str, _File],
    hashes: Mapping[str, str],
    position: Position,
    beside: Mapping[str, str],
) -> None:
    for name, text in beside.items():
        (partial / name).write_text(text, encoding="utf-8")
    manifest = {
        "format": FORMAT,
        "position": asdict(position),
        "tensors": {
            name: {
                "file": file,
                "offset": layout.offsets[name],
                "dtype": "F32",
                "shape": list(layout.shapes[name]),
                "blake2b": hashes[name],
            }
            for file, layout in layouts.items()
            for name in layout.shapes
        },
    }
    path = partial / MANIFEST
    with path.open("w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    for name in layouts:
        with (partial / name).open("rb") as data:
            os.fsync(data.fileno())
    if not (folder / MANIFEST).is_file():
        shutil.rmtree(folder, ignore_errors=True)  # a crash in mid-deletion may have left a part of one
    partial.rename(folder)
    handle = os.open(folder.parent, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _foreign(manifest: Mapping[str, Any], pieces: Sequence[Piece]) -> list[str]:
    """What this rank needs and the checkpoint does not have."""
    stored = manifest["tensors"]
    return [
        f"the run needs {name} {list(piece.shape)}, and the checkpoint "
        + (f"has it as {stored[name]['shape']}" if name in stored else "does not have it")
        for piece in pieces
        if (name := entry(piece.kind, piece.name)) not in stored or tuple(stored[name]["shape"]) != piece.shape
    ]


def _verify(folder: Path, manifest: Mapping[str, Any], peers: Peers) -> list[str]:
    """What is wrong with this rank's share of the tensors."""
    wrong = []
    for name, found in list(manifest["tensors"].items())[peers.rank :: peers.size]:
        try:
            digest = _hash(folder / found["file"], found["offset"], tuple(found["shape"]))
        except (OSError, TypeError, ValueError) as error:
            wrong.append(f"{found['file']} cannot be read ({error})")
        else:
            if digest != found["blake2b"]:
                wrong.append(f"{name} in {found['file']} has other bits than were written")
    return wrong


def _together(peers: Peers, partial: Path, work: Any) -> list[Any]:  # noqa: ANN401
    """Do the work on every rank; if any rank fails, all raise its error, and none goes on."""
    value, problem = None, ""
    try:
        value = work()
    except OSError as error:
        problem = f"{error.filename or partial}: {error.strerror}"
    answers = peers.gather((value, problem))
    for rank, (_, problem_there) in enumerate(answers):
        if problem_there:
            raise Fault(
                f"the checkpoint cannot be written: {problem_there}; older checkpoints are untouched. "
                "Free space, then resume.",
                rank=rank,
            )
    return [value_there for value_there, _ in answers]
