"""WebDataset's tar files (https://github.com/webdataset/webdataset): a sample is files of one name, by their endings.

000.jpg  000.cls  001.jpg  001.cls  ...      {"jpg": ..., "cls": ...}, {"jpg": ..., "cls": ...}
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterable
from pathlib import Path

from superstep.errors import DataError

Place = tuple[int, int]
"""The first byte of a file in its tar, and its size."""


class TarSamples:
    """The samples of some tars, by number: the bytes of each file by its ending. Tars are read by place, not unpacked.

    Args:
        paths: of the tars, in this order; they must not be compressed.

    Raises:
        DataError: a file is no tar, or has no samples.
    """

    def __init__(self, paths: Iterable[str | Path]) -> None:
        self._samples: list[tuple[Path, dict[str, Place]]] = []
        for path in map(Path, paths):
            samples = _index(path)
            if not samples:
                raise DataError(f"'{path}' has no samples: files such as 000.jpg and 000.cls.")
            self._samples += [(path, files) for files in samples]
        if not self._samples:
            raise DataError("there are no tar files; name at least one.")

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, bytes]:
        path, files = self._samples[index]
        sample = {}
        with path.open("rb") as tar:
            for ending, (start, size) in files.items():
                tar.seek(start)
                sample[ending] = tar.read(size)
        return sample


def _index(path: Path) -> list[dict[str, Place]]:
    """The files of each sample of a tar: its name ends at the first dot behind the last slash."""
    samples: dict[str, dict[str, Place]] = {}
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                folder, slash, file = member.name.rpartition("/")
                name, dot, ending = file.partition(".")
                if not (member.isfile() and name and dot):
                    continue
                files = samples.setdefault(f"{folder}{slash}{name}", {})
                if ending.lower() in files:
                    raise DataError(f"'{path}' has '{member.name}' twice; give each sample a name of its own.")
                files[ending.lower()] = member.offset_data, member.size
    except (OSError, tarfile.TarError) as error:
        raise DataError(f"'{path}' cannot be read as a tar without compression ({error}).") from None
    return list(samples.values())
