"""What survives a power cut: bytes and names that the disk has, not only the operating system."""

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
    """Make a folder and those above it; their names are on the disk afterwards."""
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in made:
        sync(folder.parent)


def write_text(path: Path, text: str) -> None:
    """Write a file whose bytes are on the disk afterwards; its name is there once its folder is synced."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def free_bytes(path: Path) -> int:
    """Bytes that are free on the disk that a folder lies on, or will lie on."""
    there = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.is_dir())
    return shutil.disk_usage(there).free
