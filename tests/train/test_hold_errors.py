"""A run directory that cannot be made: the field, why, and the mend, in the words of every other disk error."""

import errno
import os

import pytest

from superstep.errors import DiskFault, StateError
from superstep.train.run_folder import run_lock as holding
from superstep.train.run_folder.run_paths import RunFolder


@pytest.mark.parametrize(
    ("number", "error", "mend"),
    [
        (errno.ENOSPC, DiskFault, "make room on its disk."),
        (errno.EDQUOT, DiskFault, "make room on its disk."),
        (errno.EROFS, StateError, "make its file system writable, or name another --state.dir."),
        (errno.EMFILE, StateError, "raise the limit of open files (ulimit -n), or name another --state.dir."),
    ],
    ids=["full", "quota", "read-only", "too many files"],
)
def test_a_folder_that_cannot_be_made_names_the_mend(number, error, mend, tmp_path, monkeypatch):
    def refuse(*args, **rest):
        raise OSError(number, os.strerror(number), str(tmp_path))

    monkeypatch.setattr(holding.os, "open", refuse)
    with pytest.raises(error) as found, holding.hold(RunFolder(root=tmp_path / "run")):
        pass
    assert str(found.value) == f"state.dir = '{tmp_path}/run' cannot be created: {os.strerror(number)}; {mend}"
