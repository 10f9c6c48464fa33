"""Pictures in folders, one folder for each class: ``cats/1.png``, ``cats/2.png``, ``dogs/1.png``, ..."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from superstep.errors import DataError

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".webp")


@dataclass(frozen=True, slots=True)
class ClassFolder:
    """The pictures of a folder.

    Attributes:
        classes: names of the folders inside, sorted; a class number is a place in it.
        pictures: paths, class by class and sorted within, each with its class number.
    """

    classes: tuple[str, ...]
    pictures: tuple[tuple[Path, int], ...]


def list_pictures(folder: str | Path) -> ClassFolder:
    """The pictures in the folders of ``folder``, whatever order the disk lists them in.

    Raises:
        DataError: there are none.
    """
    root = Path(folder)
    classes = sorted(path.name for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
    pictures = tuple(
        (path, number)
        for number, name in enumerate(classes)
        for path in sorted((root / name).rglob("*"))
        if path.suffix.lower() in SUFFIXES
    )
    if not pictures:
        raise DataError(
            f"'{folder}' has no folders with pictures; make one for each class, with {', '.join(SUFFIXES)}."
        )
    return ClassFolder(tuple(classes), pictures)
