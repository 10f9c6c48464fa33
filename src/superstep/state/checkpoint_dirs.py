"""The folders of checkpoints: which are complete, which may be deleted, and how one is published.

    step-000200.partial/    being written; holds the file "superstep-unfinished" until all else is on the disk
    step-000200/            complete, unless it holds that mark: then it was being deleted
    step-000200.aside/      was in the way and may not be ours: moved, never deleted
    step-000200.rolled-back/    after the target of a rollback: likewise
    step-000200.damaged/    skipped by a resumed run, as it is damaged: likewise

Only a folder with exactly such a name that holds a manifest of ours, or that mark, is ever deleted.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from superstep.errors import Fault, disk_fault
from superstep.state.fsync import sync, write_text
from superstep.state.manifest import MANIFEST, is_manifest_of_ours

MARK = "superstep-unfinished"
_PARTIAL = ".partial"


def checkpoint_at(root: Path, step: int) -> Path:
    """The path of a step's checkpoint."""
    assert step >= 0, f"a checkpoint of step {step}"
    return root / f"step-{step:06d}"


def partial_of(folder: Path) -> Path:
    """The path of an unfinished checkpoint."""
    return folder.with_name(folder.name + _PARTIAL)


def checkpoints(root: Path) -> list[Path]:
    """The complete checkpoints in a folder, oldest first."""
    by_step = {step: path for path in _folders(root) if (step := step_named(path.name)) is not None}
    return [path for _, path in sorted(by_step.items()) if (path / MANIFEST).is_file() and not _is_marked(path)]


def leftovers(root: Path) -> list[Path]:
    """Folders beside the checkpoints: unfinished, deleted, or moved aside."""
    whole = checkpoints(root)
    return sorted(
        path for path in _folders(root) if path not in whole and step_named(path.name.partition(".")[0]) is not None
    )


def prune(root: Path, keep: int) -> tuple[str, ...]:
    """Delete all but the newest ``keep`` checkpoints, and remains of a crash.

    Returns:
        One line for each folder that could not be deleted. The next call tries it again.
    """
    problems = []
    try:
        folders = [*_ours(root)[:-keep], *_leavings(root)]
    except OSError as error:
        return (disk_fault(error, root, what="read").message,)
    for path in folders:
        try:
            _delete(path)
        except OSError as error:
            problems.append(disk_fault(error, path, what="deleted").message)
    return tuple(problems)


def is_crowded(root: Path, keep: int) -> bool:
    """Whether ``prune`` would delete a complete checkpoint."""
    return len(_ours(root)) > keep


def _ours(root: Path) -> list[Path]:
    return [path for path in checkpoints(root) if is_manifest_of_ours(path / MANIFEST) and not path.is_symlink()]


def begin(folder: Path) -> Path:
    """Make the folder for an unfinished checkpoint, with only its mark.

    Raises:
        Fault: a complete checkpoint has its final name.
    """
    if folder in checkpoints(folder.parent):
        raise Fault(f"{folder} already holds a checkpoint; move it away.")
    partial = partial_of(folder)
    _clear_the_way(partial)
    if not partial.parent.exists():
        partial.parent.mkdir()  # not the run's own folder: a moved one is not made again under its old name
        sync(partial.parent.parent)
    partial.mkdir()
    write_text(partial / MARK, "")
    return partial


def publish(partial: Path, folder: Path) -> None:
    """Rename a checkpoint to its final name, once every file in it is on the disk."""
    (partial / MARK).unlink()
    sync(partial)
    _clear_the_way(folder)
    partial.rename(folder)
    try:
        sync(folder.parent)
    except OSError:
        folder.rename(partial)  # the new name may not be on disk and must not be visible
        raise


def discard(partial: Path) -> None:
    """Delete an unfinished checkpoint."""
    if _is_left(partial):
        _delete(partial)


def set_aside(folder: Path, why: Literal["damaged", "rolled-back"] = "damaged") -> Path:
    """Move an unusable checkpoint aside; its new path."""
    return _move_aside(folder, why)


def step_of(checkpoint: Path) -> int:
    """The step in a checkpoint's name."""
    step = step_named(checkpoint.name)
    assert step is not None, f"{checkpoint} is no checkpoint's name"
    return step


def _clear_the_way(path: Path) -> None:
    if not path.exists() and not path.is_symlink():
        return
    if _is_left(path):
        _delete(path)
        return
    _move_aside(path, "aside")


def _move_aside(path: Path, ending: str) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.name}.{ending}{'' if number == 1 else f'-{number}'}")).exists():
        number += 1
    return path.rename(aside)


def step_named(name: str) -> int | None:
    """The step of a checkpoint's folder; None for any other name."""
    if not re.fullmatch("step-[0-9]{6,}", name):
        return None
    step = int(name[5:])
    return step if checkpoint_at(Path(), step).name == name else None


def _folders(root: Path) -> Iterator[Path]:
    return (path for path in root.glob("step-*") if path.is_dir())


def _leavings(root: Path) -> list[Path]:
    """Remains of checkpoints after a crash or a failed disk."""
    partial = (path for path in _folders(root) if step_named(path.name.removesuffix(_PARTIAL)) is not None)
    return [path for path in partial if _is_left(path)]


def _is_marked(path: Path) -> bool:
    return (path / MARK).is_file()


def _is_left(path: Path) -> bool:
    """Whether a folder is an unfinished checkpoint of ours: marked, or written but not yet renamed, or just made."""
    if path.is_symlink() or not path.is_dir():
        return False
    is_written = path.name.endswith(_PARTIAL) and is_manifest_of_ours(path / MANIFEST)
    is_empty = path.name.endswith(_PARTIAL) and not any(path.iterdir())
    return _is_marked(path) or is_written or is_empty


def _delete(path: Path) -> None:
    """Delete a folder. Its mark is added first and removed last: after a crash the rest is no checkpoint, and ours."""
    write_text(path / MARK, "")
    sync(path)
    aside = partial_of(path)
    if not path.name.endswith(_PARTIAL) and not aside.exists():
        path = path.rename(aside)  # even empty it is recognised as ours then
    for child in path.iterdir():
        if child.name == MARK:
            continue
        if child.is_dir() and not child.is_symlink():
            shutil.rmtree(child)
        else:
            child.unlink()
    (path / MARK).unlink()
    path.rmdir()
