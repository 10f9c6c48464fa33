"""fsync: bytes and names that survive a power cut, as they are on disk and not only in the operating system."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def sync(path: Path) -> None:
    """Wait until a file's bytes, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(path: Path) -> None:
    """Make a folder and its parents, with their names on disk."""
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in made:
        sync(folder.parent)


def write_text(path: Path, text: str) -> None:
    """Write a file with its bytes on disk; its name is there once its folder is synced."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def nearest_folder(path: Path) -> Path:
    """A folder, or the nearest one above it that exists."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.is_dir())


def free_bytes(path: Path) -> int:
    """Free bytes of the disk of a folder, which need not exist."""
    return shutil.disk_usage(nearest_folder(path)).free


def file_system(path: Path) -> str:
    """The kind of the file system of a folder, which need not exist, as /proc/self/mountinfo names it (proc(5)); empty
    if unknown.
    """
    there = nearest_folder(path).resolve()
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    kinds: dict[Path, str] = {}
    for line in lines:
        place, _, rest = line.partition(" - ")
        kinds[Path(place.split()[4])] = rest.split()[0]
    return next((kinds[folder] for folder in (there, *there.parents) if folder in kinds), "")
