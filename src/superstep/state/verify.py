"""Whether a checkpoint is what was written: at a glance, or every byte of it.

A glance reads the manifest, the sizes and headers of the files of tensors, and the small files beside them. It is free,
and finds what a crash, a full disk or a lost file leaves. What a broken disk does to a tensor, only reading it shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from superstep.errors import Damaged, Fault, StateError
from superstep.state.folders import checkpoints, is_crowded
from superstep.state.manifest import MANIFEST, Manifest, read_manifest
from superstep.state.tensor_file import ADAPTER_FILE, FILES, digest, digest_of, size_of
from superstep.state.together import Peers, together

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Alone:
    """One process that reads or writes a whole checkpoint."""

    rank: int = 0
    size: int = 1

    def gather(self, value: T) -> list[T]:
        """The one value."""
        return [value]


def glance(folder: Path) -> Manifest:
    """The manifest of a checkpoint whose small parts are what was written.

    Raises:
        Damaged: one of them is not.
        StateError: it is of another format, or this user may not read it.
    """
    manifest = read_manifest(folder)
    try:
        wrong = _wrong_files(folder, manifest) + _wrong_headers(folder, manifest)
    except PermissionError as error:
        raise StateError(f"{error.filename or folder} cannot be read ({error.strerror}); grant access.") from error
    if wrong:
        raise Damaged(f"{folder} is damaged: {wrong[0]}")
    return manifest


def verify(folder: Path, peers: Peers | None = None) -> Manifest:
    """The manifest of a checkpoint of which every byte is what was written. Every rank calls this together, and reads
    its share of the tensors.

    Raises:
        Damaged: something is not: on every rank the same.
        StateError: it is of another format, or this user may not read it.
    """
    peers = peers or Alone()

    unreadable = _unreadable(folder, "resume from another")
    manifest = together(peers, lambda: glance(folder) if peers.rank == 0 else None, unreadable)[0]
    assert manifest is not None
    _require_tensors(folder, manifest, peers, unreadable)
    return manifest


def verify_weights(folder: Path, peers: Peers | None = None) -> None:
    """See that the weights of a checkpoint are what was written, and what stands beside them; its moments are not read.
    A folder without a manifest, as other tools write it, has nothing that it could be held against. Every rank calls
    this together, and reads its share.

    Raises:
        Damaged: something is not: on every rank the same.
        StateError: it is of another format, or this user may not read it.
    """
    peers = peers or Alone()

    unreadable = _unreadable(folder, "name another")

    def look() -> Manifest | None:
        return glance(folder) if peers.rank == 0 and (folder / MANIFEST).is_file() else None

    manifest = together(peers, look, unreadable)[0]
    if manifest is None:
        return
    weights = {name: at for name, at in manifest.tensors.items() if at.file in (FILES["weight"], ADAPTER_FILE)}
    _require_tensors(folder, replace(manifest, tensors=weights), peers, unreadable)


def _unreadable(folder: Path, mend: str) -> Callable[[Exception], StateError]:
    return lambda error: StateError(f"{folder} cannot be read ({error}); {mend}.")


def _require_tensors(
    folder: Path, manifest: Manifest, peers: Peers, unreadable: Callable[[Exception], StateError]
) -> None:
    """See that every tensor of a manifest is what was written; each rank reads its share."""
    for found in together(peers, lambda: _wrong_tensors(folder, manifest, peers), unreadable):
        if found:
            raise Damaged(f"{folder} is damaged: {found[0]}")


def newest(root: Path, look: Callable[[Path], object] = glance) -> Path | None:
    """The newest checkpoint under a folder that ``look`` finds nothing wrong with; None where there is none at all.

    Raises:
        StateError: there are some, and each is damaged; or one is of another format, or may not be read.
    """
    first = ""
    for folder in reversed(checkpoints(root)):
        try:
            look(folder)
        except Damaged as error:
            first = first or error.why
        else:
            return folder
    if first:
        raise nothing_whole(first)
    return None


def nothing_whole(why: str) -> StateError:
    """What to say where no checkpoint of a run can be gone on from."""
    return StateError(
        f"{why}; no older checkpoint of the run is whole. Put one back, or begin again by --state.existing new."
    )


def require_newest(folder: Path, keep: int, peers: Peers) -> None:
    """Where ``prune`` would delete a checkpoint now, read the newest back first: one that is whole always stays. Every
    rank calls this together.

    Raises:
        Fault: the newest, just written, is not what was written; nothing has been deleted.
    """

    def unreadable(error: Exception) -> Fault:
        return Fault(f"{folder.parent} cannot be read ({error}); mend that, then resume.")

    if not together(peers, lambda: peers.rank == 0 and is_crowded(folder.parent, keep), unreadable)[0]:
        return
    try:
        verify(folder, peers)
    except Damaged as error:
        raise Fault(
            f"{error.why}, although it has just been written: the disk loses bits. Older checkpoints are untouched. "
            "Mend that, then resume."
        ) from error


def _wrong_tensors(folder: Path, manifest: Manifest, peers: Peers) -> list[str]:
    """Of this rank's share of the tensors, those that have other bits."""
    parts = [(t.file, t.offset, size_of(t.shape), t.blake2b, name) for name, t in manifest.tensors.items()]
    return _wrong_parts(folder, parts[peers.rank :: peers.size])


def _wrong_headers(folder: Path, manifest: Manifest) -> list[str]:
    headers = [(name, 0, file.header_bytes, file.blake2b, "the header") for name, file in manifest.files.items()]
    return _wrong_parts(folder, headers)


def _wrong_parts(folder: Path, parts: list[tuple[str, int, int, str, str]]) -> list[str]:
    wrong = []
    for file, offset, size, expected, what in parts:
        try:
            is_same = digest_of(folder / file, offset, size) == expected
        except PermissionError:
            raise
        except OSError as error:
            wrong.append(f"{file} cannot be read ({error})")
        else:
            if not is_same:
                wrong.append(f"{what} in {file} has other bits than were written")
    return wrong


def _wrong_files(folder: Path, manifest: Manifest) -> list[str]:
    """Files that are missing or of another size, and small ones that have other bits."""
    wrong = []
    for name, file in manifest.files.items():
        try:
            size = (folder / name).stat().st_size
        except PermissionError:
            raise
        except OSError as error:
            wrong.append(f"{name} cannot be read ({error})")
        else:
            if size != file.bytes:
                wrong.append(f"{name} has {size} bytes, not the {file.bytes} that were written")
    for name, expected in manifest.beside.items():
        try:
            is_same = digest((folder / name).read_bytes()) == expected
        except PermissionError:
            raise
        except OSError as error:
            wrong.append(f"{name} cannot be read ({error})")
        else:
            if not is_same:
                wrong.append(f"{name} has other bits than were written")
    return wrong
