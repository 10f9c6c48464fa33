"""Checkpoints in an object store: copies of those on the disk, under a URL that fsspec supports.

    s3://bucket/run/step-000200/model.safetensors
                               /optimizer.safetensors ...
                               /manifest.json           written last, removed first

Objects cannot be renamed there. So a checkpoint is complete once its manifest exists: remains of a crash have none, and
are removed with the next copy. Every object's size is checked before that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from superstep.errors import DamagedCheckpoint, Fault, StateError
from superstep.state import checkpoint_dirs
from superstep.state.fsync import sync
from superstep.state.manifest import MANIFEST, Manifest, manifest_of, read_manifest
from superstep.state.tensor_file import BLOCK_BYTES, digest

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem


def is_url(text: str) -> bool:
    """Whether a text names a store and no folder."""
    return "://" in text


class CheckpointStore:
    """The checkpoints under a URL.

    Args:
        url: of their folder.

    Raises:
        StateError: fsspec's package for it is not installed, or the URL is not supported.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._fs, self._root = _open_store(self.url)

    def steps(self) -> list[int]:
        """Steps of complete checkpoints, oldest first."""
        steps = []
        with self._asking("listed"):
            for name in self._names(self._root):
                step = checkpoint_dirs.step_named(name)
                if step is not None and self._fs.exists(self._at(step, MANIFEST)):
                    steps.append(step)
        return sorted(steps)

    def push(self, checkpoint: Path) -> None:
        """Copy a complete checkpoint to the store; an existing one of its step is replaced.

        Raises:
            Fault: it cannot be written, or is incomplete afterwards.
            Damaged: it is incomplete on the disk.
        """
        manifest, step = read_manifest(checkpoint), checkpoint_dirs.step_of(checkpoint)
        sizes = {name: file.bytes for name, file in manifest.files.items()}
        sizes |= {name: (checkpoint / name).stat().st_size for name in manifest.beside}
        with self._asking("written"):
            self._remove(step)
            self._fs.makedirs(self._at(step), exist_ok=True)
            for name in sizes:
                self._fs.put_file(str(checkpoint / name), self._at(step, name))
            self._fs.invalidate_cache()
            for name, size in sizes.items():
                if (stored_bytes := int(self._fs.info(self._at(step, name))["size"])) != size:
                    raise Fault(
                        f"{self.url}: {name} of step {step} has {stored_bytes} bytes there, not {size}; copy it again."
                    )
            self._fs.pipe_file(self._at(step, MANIFEST), (checkpoint / MANIFEST).read_bytes())

    def has(self, checkpoint: Path) -> bool:
        """Whether this very checkpoint is in the store, complete."""
        step = checkpoint_dirs.step_of(checkpoint)
        with self._asking("read"):
            self._fs.invalidate_cache()
            try:
                return bool(self._fs.cat_file(self._at(step, MANIFEST)) == (checkpoint / MANIFEST).read_bytes())
            except FileNotFoundError:
                return False

    def remove(self, step: int) -> None:
        """Remove a checkpoint, its manifest first."""
        with self._asking("removed"):
            self._remove(step)

    def fetch(self, step: int, root: Path) -> Path:
        """Copy a checkpoint from the store to a local folder, where it gets its name once it is complete.

        Raises:
            Damaged: it is incomplete in the store.
            Fault: it cannot be read or written.
        """
        manifest = self.manifest(step)
        place = checkpoint_dirs.checkpoint_at(root, step)
        partial = checkpoint_dirs.begin(place)
        try:
            with self._asking("read"):
                for name in (*manifest.files, *manifest.beside, MANIFEST):
                    self._fs.get_file(self._at(step, name), str(partial / name))
        except Exception:
            checkpoint_dirs.discard(partial)
            raise
        for path in partial.iterdir():
            sync(path)
        checkpoint_dirs.publish(partial, place)
        return place

    def manifest(self, step: int) -> Manifest:
        """The manifest of a checkpoint, after checking the sizes of its files.

        Raises:
            Damaged: it is damaged, or a file is missing or of another size.
        """
        with self._asking("read"):
            self._fs.invalidate_cache()
            try:
                manifest = manifest_of(self._fs.cat_file(self._at(step, MANIFEST)), self.url_of(step))
                for name, file in manifest.files.items():
                    if (stored_bytes := self._size(step, name)) != file.bytes:
                        raise DamagedCheckpoint(
                            f"{self.url_of(step)} is damaged: {name} has {stored_bytes} bytes, not {file.bytes}"
                        )
            except FileNotFoundError as error:
                raise DamagedCheckpoint(f"{self.url_of(step)} is damaged: it lacks {error.args[-1]}") from error
        return manifest

    def verify(self, step: int) -> Manifest:
        """The manifest of a checkpoint, after verifying every byte.

        Raises:
            Damaged: something has changed.
        """
        manifest = self.manifest(step)
        with self._asking("read"):
            for name, expected in manifest.beside.items():
                if digest(self._fs.cat_file(self._at(step, name))) != expected:
                    raise DamagedCheckpoint(f"{self.url_of(step)} is damaged: {name} has other bits than were written")
            parts = [(name, 0, file.header_bytes, file.blake2b, "the header") for name, file in manifest.files.items()]
            parts += [(t.file, t.offset, t.bytes, t.blake2b, name) for name, t in manifest.tensors.items()]
            for file, offset, size, expected, what in parts:
                if self._digest(self._at(step, file), offset, size) != expected:
                    raise DamagedCheckpoint(
                        f"{self.url_of(step)} is damaged: {what} in {file} has other bits than were written"
                    )
        return manifest

    def prune(self, keep: int) -> None:
        """Remove all but the newest ``keep`` checkpoints, and remains of a crash; the newest is verified first, so that
        a complete one always stays.

        Raises:
            Damaged: the newest is damaged; nothing has been removed.
        """
        whole = self.steps()
        if len(whole) > keep:
            self.verify(whole[-1])
        with self._asking("removed"):
            for name in self._names(self._root):
                step = checkpoint_dirs.step_named(name)
                # A step after the newest complete one may be in transfer.
                if step is not None and whole and step not in whole[-keep:] and step < whole[-1]:
                    self._remove(step)

    def url_of(self, step: int) -> str:
        """A checkpoint's URL."""
        return f"{self.url}/{checkpoint_dirs.checkpoint_at(Path(), step).name}"

    def _remove(self, step: int) -> None:
        self._fs.invalidate_cache()
        if self._fs.exists(self._at(step, MANIFEST)):
            self._fs.rm_file(self._at(step, MANIFEST))
        for name in self._names(self._at(step)):
            self._fs.rm_file(self._at(step, name))
        if self._fs.isdir(self._at(step)):  # of a store with folders
            self._fs.rmdir(self._at(step))

    def _names(self, path: str) -> list[str]:
        self._fs.invalidate_cache()
        try:
            listed = self._fs.ls(path, detail=False)
        except FileNotFoundError:
            return []
        return sorted({str(each).rstrip("/").rpartition("/")[2] for each in listed} - {path.rpartition("/")[2], ""})

    def _at(self, step: int, name: str = "") -> str:
        folder = f"{self._root}/{checkpoint_dirs.checkpoint_at(Path(), step).name}"
        return f"{folder}/{name}" if name else folder

    def _size(self, step: int, name: str) -> int:
        return int(self._fs.info(self._at(step, name))["size"])

    def _digest(self, path: str, offset: int, size: int) -> str:
        hasher = hashlib.blake2b(digest_size=16)
        while size:
            data = self._fs.cat_file(path, start=offset, end=offset + min(size, BLOCK_BYTES))
            if not data:
                return ""
            hasher.update(data)
            offset, size = offset + len(data), size - len(data)
        return hasher.hexdigest()

    @contextmanager
    def _asking(self, what: str) -> Iterator[None]:
        """Converts any error of a store's client into a fault with its URL."""
        try:
            yield
        except (Fault, StateError):
            raise
        except Exception as error:
            raise Fault(
                f"{self.url} cannot be {what} ({type(error).__name__}: {error}); fix this, then resume. What is on "
                "the disk is whole."
            ) from error


def _open_store(url: str) -> tuple[AbstractFileSystem, str]:
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise _missing(url, error) from error
    try:
        fs, root = url_to_fs(url)
    except ImportError as error:
        raise _missing(url, error) from error
    except ValueError as error:
        raise StateError(f"state.store = '{url}': {error}; use s3://bucket/folder, say.") from error
    return fs, str(root).rstrip("/")


def _missing(url: str, error: ImportError) -> StateError:
    return StateError(f"state.store = '{url}' needs more packages ({error}); pip install 'superstep[store]'.")
