"""Weights handed over from who trains to who serves: snapshots, which other processes map.

    root/weights-3f2a.../model.safetensors     the tensors, under Hugging Face names
                         snapshot.json         the version, and a digest of each tensor
    root/.unfinished-.../                      one that is being written

A folder in shared memory, such as /dev/shm, costs one copy and no disk. A snapshot is written beside and renamed: what
can be seen is whole. Its version is a digest of its content: the names, dtypes, shapes and bytes of its tensors, in
whatever files they lie.

Who reads a snapshot holds a lock on it, which the system takes back when that process ends, however it ended. A newer
one may be published at any time; ``clean`` removes older ones that nobody holds.
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
from superstep.model.hf import FILE, HfTensor, Weights, open_weights
from superstep.serve.files.reader import BackgroundReader
from superstep.state.fsync import make_folder, sync, write_text
from superstep.state.manifest import MANIFEST, read_manifest
from superstep.state.tensor_file import digest
from superstep.state.tensor_piece import bytes_of

MARK = "snapshot.json"
PREFIX, UNFINISHED, WRITER = "weights-", ".unfinished-", "writer"

KEEP = 2
"""Snapshots that stay though nobody holds them: the newest, and the one before, which somebody may be about to open."""

YOUNG_S = 60.0
"""How old what a writer left must be: a new one has locked its folder by then."""


@dataclass(frozen=True, slots=True)
class PublishedWeights:
    """A snapshot that others may open: where it is, and what its weights are called."""

    path: Path
    version: str


class LockedWeights:
    """Weights to be read, locked while this lives.

    Args:
        weights: by global name.
        claims: the digest that each tensor had when it was written, where that is known.
        lock: the descriptor that holds the lock, where there is one.
    """

    def __init__(
        self, weights: Weights, claims: Mapping[str, str] = MappingProxyType({}), lock: Lock | None = None
    ) -> None:
        self.weights = weights
        self.claims = claims
        self._lock = lock

    def version(self) -> str:
        """What the weights are called. All of them are read.

        Raises:
            StateError: a tensor is not what was written; names it.
        """
        hashes = digests(self.weights)
        for name, claimed in self.claims.items():
            if hashes.get(name) != claimed:
                what = "is missing" if name not in hashes else "has other bits than were written"
                raise StateError(f"{self.weights.path} is damaged: {name} {what}; publish it again.")
        return version_of(self.weights, hashes)

    def close(self) -> None:
        """Let go of the lock."""
        if self._lock is not None:
            self._lock.close()


class Lock:
    """A shared lock on a snapshot: as long as somebody has one, nobody cleans it away.

    Raises:
        StateError: it is just being cleaned away, or is gone.
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
        """Let go. To do so twice is no mistake."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def hold(path: Path) -> Lock | None:
    """A lock on what a path names, where it is a snapshot; other folders need none.

    Raises:
        StateError: it is just being cleaned away.
    """
    return Lock(path) if (path / MARK).is_file() else None


def open_source(path: Path) -> LockedWeights:
    """Weights to be read: a snapshot's, a checkpoint's, those of a Hugging Face folder or of one safetensors file.

    Raises:
        StateError: there are none, they cannot be read, or what stands beside them is damaged.
    """
    lock = hold(path)
    try:
        return LockedWeights(open_weights(path), _claims(path), lock)
    except BaseException:
        if lock is not None:
            lock.close()
        raise


def read_version(path: Path) -> str:
    """What the weights of a folder are called. All of them are read, and held against what their writer noted.

    Raises:
        StateError: they are not what was written.
    """
    source = open_source(path)
    try:
        return source.version()
    finally:
        source.close()


def weights_in_memory(tensors: Mapping[str, Tensor]) -> Weights:
    """Tensors of this process, whole, as if they lay in a file."""
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

    # Hashing lets other threads run. A pool's threads would be waited for at the process's end, also one that hangs.
    left = iter(list(weights))
    readers = [
        BackgroundReader("the weights", lambda progress: {name: one(name) for name in left}, timeout_s=math.inf)
        for _ in range(min(8, cores()))
    ]
    hashes = {name: digest for reader in readers for name, digest in reader.result().items()}
    return {name: hashes[name] for name in weights}


def version_of(weights: Mapping[str, HfTensor], hashes: Mapping[str, str] | None = None) -> str:
    """What weights are called: a digest of their content, the same in whatever files they lie.

    Args:
        weights: by global name.
        hashes: the digest of each, where it is known.
    """
    hashes = digests(weights) if hashes is None else hashes
    lines = [f"{name} {_dtype(weights[name])} {weights[name].get_shape()} {hashes[name]}\n" for name in sorted(weights)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


def publish(
    root: Path, tensors: Mapping[str, Tensor], *, keep: int = KEEP, beside: Sequence[Path] = ()
) -> PublishedWeights:
    """Write a snapshot, and remove older ones that nobody holds.

    Args:
        root: the folder of snapshots, such as one in /dev/shm; it is made where it is not there.
        tensors: whole, by global name, in any dtype.
        keep: newest snapshots that stay in any case.
        beside: files to copy beside the tensors, such as a config.json; a server holds its model against that.
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
    """A folder to write a snapshot into; what is left of it at the end goes away.

    Args:
        root: of the snapshots; made where the folder above it is there, which may be a run's that was moved.
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
    """Make a folder that holds weights a snapshot, under its name.

    Args:
        root: of the snapshots.
        folder: of the weights, within ``open_unfinished``.
        weights: that lie there.
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
        os.utime(place / MARK)  # the same content again: it is the newest from here on
    sync(root)
    return PublishedWeights(place, version)


def snapshots(root: Path) -> list[Path]:
    """The snapshots under a folder, the oldest first."""
    folders = []
    for path in root.glob(f"{PREFIX}*"):
        with suppress(OSError):  # somebody else may be cleaning
            folders.append(((path / MARK).stat().st_mtime_ns, path.name, path))
    return [path for _, _, path in sorted(folders)]


def clean(root: Path, keep: int = KEEP) -> None:
    """Remove snapshots that nobody holds, but for the newest ones, and what dead writers left."""
    for old in snapshots(root)[: -keep or None]:
        with suppress(OSError):  # somebody holds it
            remove_unlocked(old, MARK)
    for left in root.glob(f"{UNFINISHED}*"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > YOUNG_S:
                (left / WRITER).touch()  # its writer may have ended before it made the file
                remove_unlocked(left, WRITER)


def _claims(path: Path) -> Mapping[str, str]:
    """The digests that a writer of ours left beside the tensors."""
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
    """As torch calls it; no value is read."""
    empty = stored[tuple(slice(0, 0) for _ in stored.get_shape()) or slice(0, 0)]
    return str(empty.dtype).removeprefix("torch.")
