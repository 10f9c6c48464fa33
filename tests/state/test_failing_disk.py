"""A disk that fails at any call of a save: nothing older is lost or mixed, what is told says where, and the next save
succeeds.
"""

import errno
import os
import re
import shutil
from unittest import mock

import pytest
import torch

import saved
from failing_disk import FailingDisk
from superstep.errors import DiskFault, disk_fault
from superstep.state.checkpoint import load
from superstep.state.checkpoint_dirs import checkpoints, prune
from superstep.state.verify import drop_old

KEEP = 2
ERRORS = (errno.EIO, errno.ENOSPC, errno.EMFILE)


def _names(root):
    return [path.name for path in sorted(root.iterdir())]


def _is_whole(place):
    target = saved.pieces(saved.zeros)
    load(place, target, saved.Alone())
    return all(torch.equal(a.values, b.values) for a, b in zip(target, saved.pieces(saved.truth), strict=True))


def _save(root, step):
    """As a run saves: write, read back, delete what is too old; what could not be deleted."""
    return drop_old(saved.write(root, step), KEEP, saved.Alone())


def _open_files():
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def original(tmp_path):
    """Two checkpoints, of steps 1 and 2."""
    for step in (1, 2):
        saved.write(tmp_path / "original", step)
    return tmp_path / "original"


def _calls(original):
    root = original.with_name("counted")
    shutil.copytree(original, root)
    with FailingDisk() as disk:
        assert _save(root, 3) == ()
    assert _names(root) == ["step-000002", "step-000003"]
    return disk.calls


def _fail_once(original, at, error):
    root = original.with_name("root")
    shutil.copytree(original, root)
    before = _open_files()
    problems = ()
    with FailingDisk(at, error) as disk:
        try:
            problems = _save(root, 3)
            is_saved = True
        except DiskFault as fault:
            problems, is_saved = (str(fault),), False
    where = f"call {at}, {disk.failed}: {errno.errorcode[error]}: {problems}"
    assert disk.failed, where
    assert _open_files() == before, where
    for told in problems:
        is_read_back = "has just been written is not whole" in told
        assert is_read_back or re.search(r"/\S* cannot be (written|read|deleted): .+; (make|raise|check) ", told), where
        assert "resume" not in told, "there may be nothing to go on from"
    found = checkpoints(root)
    assert ("step-000003" in [place.name for place in found]) == is_saved, where
    assert "step-000002" in [place.name for place in found], where
    assert all(_is_whole(place) for place in found), where
    assert _save(root, 4) == (), where
    kept = [name for name in _names(root) if not name.endswith(".damaged")]  # which could not be read back
    assert kept == ["step-000003" if is_saved else "step-000002", "step-000004"], where
    assert all(_is_whole(place) for place in checkpoints(root)), where
    shutil.rmtree(root)


def test_a_call_that_fails_costs_one_checkpoint_at_most(original):
    calls = _calls(original)
    assert calls > 150
    for at in range(0, calls, 7):
        _fail_once(original, at, ERRORS[at % len(ERRORS)])


@pytest.mark.long
def test_any_call_that_fails_costs_one_checkpoint_at_most(original):
    for at in range(_calls(original)):
        for error in ERRORS:
            _fail_once(original, at, error)


def test_an_old_checkpoint_that_cannot_be_deleted_is_told_and_deleted_later(original):
    with mock.patch.object(os, "rename", side_effect=OSError(errno.EIO, "Input/output error")):
        (told,) = prune(original, 1)
    assert told == f"{original}/step-000001 cannot be deleted: Input/output error; check the disk that it is on."
    assert [place.name for place in checkpoints(original)] == ["step-000002"]
    assert prune(original, 1) == ()
    assert _names(original) == ["step-000002"]


def test_what_is_told_of_the_system_names_path_and_fix():
    full = disk_fault(OSError(errno.ENOSPC, "No space left on device"), "/runs/a")
    assert str(full) == "/runs/a cannot be written: No space left on device; make room on its disk."
    named = disk_fault(OSError(errno.EMFILE, "Too many open files", "/runs/a/b"), "/runs/a", what="read")
    assert str(named) == ("/runs/a/b cannot be read: Too many open files; raise the limit of open files (ulimit -n).")
    assert type(disk_fault(ValueError("odd"), "/runs/a")) is not DiskFault
