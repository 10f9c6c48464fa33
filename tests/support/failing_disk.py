"""A disk that fails once: the n-th call of the system that Python makes to it raises an error of the system's.

    with FailingDisk() as counted: ...              counted.calls: how many there are
    with FailingDisk(at=17, error=errno.EIO): ...   the 17th fails, all others are made

Counted are calls by name through ``os`` (``pathlib`` and ``shutil`` make theirs so), and those of files that
``pathlib`` opens. A close that fails has closed the file, as Linux does it.
"""

import io
import os
from contextlib import ExitStack
from unittest import mock

NAMES = (
    "close", "fsync", "lstat", "mkdir", "open", "posix_fallocate", "preadv", "pwrite", "rename", "replace", "rmdir",
    "scandir", "stat", "unlink",
)  # fmt: skip


class FailingDisk:
    """Within its block the ``at``-th call fails; none where that is None."""

    def __init__(self, at=None, error=0):
        self.at, self.error = at, error
        self.calls = 0
        self.failed = ""
        """The call that did."""
        self._stack = ExitStack()

    def __enter__(self):
        self._stack.enter_context(mock.patch.multiple(os, **{name: self._call(name) for name in NAMES}))
        self._stack.enter_context(mock.patch.object(io, "open", self._open))
        return self

    def __exit__(self, *error):
        self._stack.close()

    def count(self, name, path=None):
        """Count a call that is about to be made.

        Raises:
            OSError: it is the one that fails.
        """
        self.calls += 1
        if self.calls - 1 == self.at:
            self.failed = name
            told = () if path is None or isinstance(path, int) else (os.fspath(path),)
            raise OSError(self.error, os.strerror(self.error), *told)

    def _call(self, name):
        inner = getattr(os, name)

        def call(*args, **rest):
            if name == "close":
                inner(*args)
                return self.count(name)
            self.count(name, args[0])
            return inner(*args, **rest)

        return call

    def _open(self, path, mode="r", buffering=-1, encoding=None, errors=None, newline=None):
        self.count("open", path)
        raw = _File(path, mode.replace("b", ""), self)
        if buffering == 0:
            return raw
        buffered = io.BufferedReader(raw) if "r" in mode else io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding, errors, newline)


class _File(io.FileIO):
    def __init__(self, path, mode, disk):
        super().__init__(path, mode)
        self._disk = disk

    def write(self, data):
        self._disk.count("write")
        return super().write(data)

    def readinto(self, room):
        self._disk.count("read")
        return super().readinto(room)

    def readall(self):
        self._disk.count("read")
        return super().readall()

    def close(self):
        if not self.closed:
            super().close()
            self._disk.count("close")
