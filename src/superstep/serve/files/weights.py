"""Weights from trainers to servers: snapshots, which other processes map.

    root/weights-3f2a.../model.safetensors     the tensors, under Hugging Face names
                         snapshot.json         the version, and a digest of each tensor
    root/.unfinished-.../                      one that is being written

A folder in shared memory, such as /dev/shm, costs one copy and no disk. A snapshot is written to a temporary folder and
renamed: a visible one is complete. Its version is a digest of its content: the names, dtypes, shapes and bytes of its
tensors, independent of their files.

A reader holds a lock on its snapshot, which the system releases when that process ends, however it ended. A newer one
may be published at any time; ``clean`` removes older ones without a lock.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from safetensors.torch import save_file
from torch import Tensor

from superstep.errors import StateError
from superstep.hardware.host import cores
from superstep.launch.temporary_folders import remove_unlocked
from superstep.model.files.hf import FILE, HfTensor, Weights, open_weights
from superstep.serve.files.reader import BackgroundReader
from superstep.state.fsync import make_folder, sync, write_text
from superstep.state.manifest import MANIFEST, read_manifest
from superstep.state.tensor_file import digest
from superstep.state.tensor_piece import bytes_of

MARK = "snapshot.json"
PREFIX, UNFINISHED, WRITER = "weights-", ".unfinished-", "writer"

KEEP = 2
"""Snapshots that stay without a lock: the newest, and the one before, which a reader may be about to open."""

YOUNG_S = 60.0
"""Age from which a writer's remains are removed: a new writer has locked its folder by then."""


@dataclass(frozen=True, slots=True)
class PublishedWeights:
    """A snapshot for readers: its folder and version."""

    path: Path
    version: str


class LockedWeights:
    """Weights to be read, locked while this lives.

    Args:
        weights: by global name.
        claims: the digest of each tensor from its writer, if known.
        lock: the lock's descriptor, if any.
    """

    def __init__(
        self, weights: Weights, claims: Mapping[str, str] = MappingProxyType({}), lock: Lock | None = None
    ) -> None:
        self.weights = weights
        self.claims = claims
        self._lock = lock

    def version(self) -> str:
        """The version of the weights. All of them are read.

        Raises:
            StateError: a tensor has changed; names it.
        """
        hashes = digests(self.weights)
        for name, claimed in self.claims.items():
            if hashes.get(name) != claimed:
                what = "is missing" if name not in hashes else "has other bits than were written"
                raise StateError(f"{self.weights.path} is damaged: {name} {what}; publish it again.")
        return version_of(self.weights, hashes)

    def close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.close()


class Lock:
    """A shared lock on a snapshot, which protects it from removal.

    Raises:
        StateError: it is being removed, or is gone.
    """

    def __init__(self, folder: Path) -> None:
        gone = StateError(f"{folder} is being cleaned away; take a newer snapshot.")
        try:
            self._handle = os.open(folder / MARK, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            raise gone from None
        try:
            fcntl.flock(self._handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            is_there = os.path.samestat(os.fstat(self._handle), (folder / MARK).stat())
        except OSError:
            is_there = False
        if not is_there:
            self.close()
            raise gone

    def close(self) -> None:
        """Release it; a second call has no effect."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def hold(path: Path) -> Lock | None:
    """A lock on a snapshot; other folders need none.

    Raises:
        StateError: it is being removed.
    """
    return Lock(path) if (path / MARK).is_file() else None


def open_source(path: Path) -> LockedWeights:
    """Weights to be read: of a snapshot, a checkpoint, a Hugging Face folder or one safetensors file.

    Raises:
        StateError: there are none, they cannot be read, or the files beside them are damaged.
    """
    lock = hold(path)
    try:
        return LockedWeights(open_weights(path), _claims(path), lock)
    except BaseException:
        if lock is not None:
            lock.close()
        raise


def read_version(path: Path) -> str:
    """The version of a folder's weights. All of them are read and verified.

    Raises:
        StateError: they have changed.
    """
    source = open_source(path)
    try:
        return source.version()
    finally:
        source.close()


def weights_in_memory(tensors: Mapping[str, Tensor]) -> Weights:
    """Whole tensors of this process, with the interface of files."""
    return Weights(Path("what was given"), {name: _Given(tensor.detach()) for name, tensor in tensors.items()})


@dataclass(frozen=True, slots=True)
class _Given:
    tensor: Tensor

    def get_slice(self, name: str) -> _Given:
        return self

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Tensor:
        return self.tensor[index]


def digests(weights: Mapping[str, HfTensor]) -> dict[str, str]:
    """A digest of each tensor's bytes, by name."""

    def one(name: str) -> str:
        held = weights[name][:].detach().cpu().contiguous()
        return digest(bytes_of(held))

    # Hashing lets other threads run. A pool's threads would be waited for at the process's end, even a hung one.
    left = iter(list(weights))
    readers = [
        BackgroundReader("the weights", lambda progress: {name: one(name) for name in left}, timeout_s=math.inf)
        for _ in range(min(8, cores()))
    ]
    hashes = {name: digest for reader in readers for name, digest in reader.result().items()}
    return {name: hashes[name] for name in weights}


def version_of(weights: Mapping[str, HfTensor], hashes: Mapping[str, str] | None = None) -> str:
    """The version of weights: a digest of their content, independent of their files.

    Args:
        weights: by global name.
        hashes: the digest of each, if known.
    """
    hashes = digests(weights) if hashes is None else hashes
    lines = [f"{name} {_dtype(weights[name])} {weights[name].get_shape()} {hashes[name]}\n" for name in sorted(weights)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


def publish(
    root: Path, tensors: Mapping[str, Tensor], *, keep: int = KEEP, beside: Sequence[Path] = ()
) -> PublishedWeights:
    """Write a snapshot, and remove older ones without a lock.

    Args:
        root: the folder of snapshots, such as one in /dev/shm; created if missing.
        tensors: whole, by global name, in any dtype.
        keep: newest snapshots that always stay.
        beside: files to copy beside the tensors, such as a config.json, which a server compares with its model.
    """
    make_folder(root)
    with open_unfinished(root) as folder:
        save_file({name: x.detach().cpu().contiguous() for name, x in tensors.items()}, folder / FILE, {"format": "pt"})
        for file in beside:
            shutil.copyfile(file, folder / file.name)
        weights = open_weights(folder)
        done = give_name(root, folder, weights, digests(weights))
    clean(root, keep)
    return done


@contextmanager
def open_unfinished(root: Path) -> Iterator[Path]:
    """A folder to write a snapshot into; its remains are removed at the end.

    Args:
        root: of the snapshots; created if its parent exists, which may be a moved run's.
    """
    if not root.is_dir():
        root.mkdir(exist_ok=True)
        sync(root.parent)
    outer = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=root))
    try:
        with (outer / WRITER).open("w") as writer:
            fcntl.flock(writer, fcntl.LOCK_EX)
            folder = outer / "snapshot"
            folder.mkdir()
            yield folder
    finally:
        shutil.rmtree(outer, ignore_errors=True)


def give_name(root: Path, folder: Path, weights: Weights, hashes: Mapping[str, str]) -> PublishedWeights:
    """Turn a folder of weights into a snapshot, under its name.

    Args:
        root: of the snapshots.
        folder: of the weights, within ``open_unfinished``.
        weights: in it.
        hashes: the digest of each.
    """
    version = version_of(weights, hashes)
    write_text(folder / MARK, json.dumps({"version": version, "tensors": dict(hashes)}, indent=1) + "\n")
    for file in folder.iterdir():
        sync(file)
    sync(folder)
    place = root / f"{PREFIX}{version}"
    try:
        folder.rename(place)
    except OSError:
        if not (place / MARK).is_file():
            raise
        os.utime(place / MARK)  # the same content again: it becomes the newest
    sync(root)
    return PublishedWeights(place, version)


def snapshots(root: Path) -> list[Path]:
    """The snapshots in a folder, the oldest first."""
    folders = []
    for path in root.glob(f"{PREFIX}*"):
        with suppress(OSError):  # another process may be cleaning
            folders.append(((path / MARK).stat().st_mtime_ns, path.name, path))
    return [path for _, _, path in sorted(folders)]


def clean(root: Path, keep: int = KEEP) -> None:
    """Remove snapshots without a lock, except the newest ones, and remains of dead writers."""
    for old in snapshots(root)[: -keep or None]:
        with suppress(OSError):  # another process has locked it
            remove_unlocked(old, MARK)
    for left in root.glob(f"{UNFINISHED}*"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > YOUNG_S:
                (left / WRITER).touch()  # its writer may have ended before it made the file
                remove_unlocked(left, WRITER)


def _claims(path: Path) -> Mapping[str, str]:
    """The digests beside the tensors, from a writer of ours."""
    if (path / MARK).is_file():
        try:
            tensors = json.loads((path / MARK).read_text(encoding="utf-8"))["tensors"]
            return {str(name): str(value) for name, value in tensors.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise StateError(f"{path} is damaged: {MARK} cannot be read ({error!r}); publish it again.") from error
    if (path / MANIFEST).is_file():
        manifest = read_manifest(path)
        return {name: stored.blake2b for name, stored in manifest.tensors.items() if stored.file == FILE}
    return {}


def _dtype(stored: HfTensor) -> str:
    """Torch's name of the dtype; no value is read."""
    empty = stored[tuple(slice(0, 0) for _ in stored.get_shape()) or slice(0, 0)]
    return str(empty.dtype).removeprefix("torch.")
