"""Verification of a checkpoint: a quick glance, or every byte.

A glance reads the manifest, the sizes and headers of the files of tensors, and the small files beside them. It costs
almost nothing, and detects the results of a crash, a full disk or a lost file. Damage of tensors by a broken disk shows
only when they are read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from superstep.errors import DamagedCheckpoint, DiskFault, Fault, StateError, SuperstepError, disk_fault
from superstep.state.all_or_none import Peers, together
from superstep.state.checkpoint_dirs import checkpoints, is_crowded, prune, set_aside
from superstep.state.manifest import MANIFEST, Manifest, read_manifest
from superstep.state.tensor_file import ADAPTER_FILE, FILES, digest, digest_of

if TYPE_CHECKING:
    from typing_extensions import TypeForm

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SingleProcess:
    """One process that reads or writes a whole checkpoint."""

    rank: int = 0
    size: int = 1

    def gather(self, value: T, form: TypeForm[T]) -> list[T]:
        return [value]


def glance(folder: Path) -> Manifest:
    """The manifest of a checkpoint, after checking its small parts.

    Raises:
        Damaged: one of them has changed.
        StateError: it has another format, or this user may not read it.
    """
    manifest = read_manifest(folder)
    try:
        wrong = _wrong_files(folder, manifest) + _wrong_headers(folder, manifest)
    except PermissionError as error:
        raise StateError(f"{error.filename or folder} cannot be read ({error.strerror}); grant access.") from error
    if wrong:
        raise DamagedCheckpoint(f"{folder} is damaged: {wrong[0]}")
    return manifest


def verify(
    folder: Path, peers: Peers | None = None, unreadable: Callable[[Exception], SuperstepError] | None = None
) -> Manifest:
    """The manifest of a checkpoint, after verifying every byte. Every rank calls this together, and reads its share of
    the tensors.

    Args:
        folder: the checkpoint.
        peers: the ranks; None for one rank.
        unreadable: converts the system's errors; to a StateError by default.

    Raises:
        Damaged: something has changed: on every rank the same.
        StateError: it has another format, or this user may not read it.
    """
    peers = peers or SingleProcess()
    unreadable = unreadable or _unreadable(folder, "resume from another")
    manifest = together(peers, lambda: glance(folder) if peers.rank == 0 else None, unreadable, Manifest | None)[0]
    assert manifest is not None
    _require_tensors(folder, manifest, peers, unreadable)
    return manifest


def verify_weights(folder: Path, peers: Peers | None = None) -> None:
    """Verify the weights of a checkpoint, and the files beside them; its moments are not read. A folder of other tools
    has no manifest to compare with. Every rank calls this together, and reads its share.

    Raises:
        Damaged: something has changed: on every rank the same.
        StateError: it has another format, or this user may not read it.
    """
    peers = peers or SingleProcess()

    unreadable = _unreadable(folder, "name another")

    def look() -> Manifest | None:
        return glance(folder) if peers.rank == 0 and (folder / MANIFEST).is_file() else None

    manifest = together(peers, look, unreadable, Manifest | None)[0]
    if manifest is None:
        return
    weights = {name: at for name, at in manifest.tensors.items() if at.file in (FILES["weight"], ADAPTER_FILE)}
    _require_tensors(folder, replace(manifest, tensors=weights), peers, unreadable)


def _unreadable(folder: Path, mend: str) -> Callable[[Exception], StateError]:
    return lambda error: StateError(f"{folder} cannot be read ({error}); {mend}.")


def _require_tensors(
    folder: Path, manifest: Manifest, peers: Peers, unreadable: Callable[[Exception], SuperstepError]
) -> None:
    """Verify every tensor of a manifest; each rank reads its share."""
    for wrong in together(peers, lambda: _wrong_tensors(folder, manifest, peers), unreadable, list[str]):
        if wrong:
            raise DamagedCheckpoint(f"{folder} is damaged: {wrong[0]}")


def newest(root: Path, look: Callable[[Path], object] = glance) -> Path | None:
    """The newest checkpoint in a folder for which ``look`` raises nothing; None if there is none at all.

    Raises:
        StateError: all of them are damaged; or one has another format, or may not be read.
    """
    first = ""
    for folder in reversed(checkpoints(root)):
        try:
            look(folder)
        except DamagedCheckpoint as error:
            first = first or error.why
        else:
            return folder
    if first:
        raise nothing_whole(first)
    return None


def nothing_whole(why: str) -> StateError:
    """The error for a run without a usable checkpoint."""
    return StateError(
        f"{why}; no older checkpoint of the run is whole. Put one back, or begin again by --state.existing new."
    )


def is_there(peers: Peers, place: Path) -> bool:
    """Whether a checkpoint exists already, as after a recovery. Every rank calls this together."""

    def unreadable(error: Exception) -> Fault:
        return disk_fault(error, place.parent, what="read")

    return together(peers, lambda: not peers.rank and place in checkpoints(place.parent), unreadable, bool)[0]


def checkpoints_of(root: Path, peers: Peers, unreadable: Callable[[Exception], SuperstepError]) -> list[Path]:
    """The checkpoints in a folder, as rank 0 reads it: on a network file system other ranks may see an older state.
    Every rank calls this together.
    """
    return together(peers, lambda: [] if peers.rank else checkpoints(root), unreadable, list[Path])[0]


def drop_old(newest: Path, keep: int, peers: Peers) -> tuple[str, ...]:
    """Delete all but ``keep`` checkpoints, after verifying the newest: a complete one always stays. Every rank calls
    this together.

    Returns:
        One line for each problem: old checkpoints stay longer then.

    Raises:
        DiskFault: the newest is damaged: it has been moved aside, and nothing deleted.
    """
    root = newest.parent

    def look() -> tuple[bool, tuple[str, ...]]:
        try:
            return is_crowded(root, keep), ()
        except OSError as error:
            return False, (disk_fault(error, root, what="read").message,)

    looked = look() if peers.rank == 0 else None
    is_full, problems = peers.gather(looked, tuple[bool, tuple[str, ...]] | None)[0] or (False, ())
    if is_full:
        _require_whole(newest, peers)
    if not problems and peers.rank == 0:
        problems = prune(root, keep)
    return peers.gather(problems, tuple[str, ...])[0]


def _require_whole(newest: Path, peers: Peers) -> None:
    def unreadable(error: Exception) -> Fault:
        return disk_fault(error, newest, what="read")

    try:
        verify(newest, peers, unreadable)
    except (DamagedCheckpoint, DiskFault) as error:
        together(peers, lambda: None if peers.rank else set_aside(newest), unreadable, Path | None)
        why = error.why if isinstance(error, DamagedCheckpoint) else error.message
        raise DiskFault(
            f"a checkpoint that has just been written is not whole, and is moved aside; older ones are untouched: {why}"
        ) from error


def _wrong_tensors(folder: Path, manifest: Manifest, peers: Peers) -> list[str]:
    """Damaged tensors in this rank's share."""
    parts = [(t.file, t.offset, t.bytes, t.blake2b, name) for name, t in manifest.tensors.items()]
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
    """Files that are missing or of another size, and damaged small ones."""
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
