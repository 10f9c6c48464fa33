"""Checkpoint folders: only our own are deleted, and the disk has one before it is seen, wherever a crash comes."""

import json
import os
import shutil
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch

import saved
from superstep.errors import Fault
from superstep.state.checkpoint import load
from superstep.state.checkpoint_dirs import MARK, checkpoint_at, checkpoints, prune
from superstep.state.manifest import MANIFEST


def _loads(place):
    target = saved.pieces(saved.zeros)
    load(place, target, saved.Alone())
    return all(
        torch.equal(got.values, wanted.values) for got, wanted in zip(target, saved.pieces(saved.truth), strict=True)
    )


def _names(root):
    return sorted(path.name for path in root.iterdir())


def test_prune_keeps_the_newest_and_clears_what_we_left(tmp_path):
    root = tmp_path / "c"
    for step in (1, 2, 3, 10, 1_234_567):
        saved.write(root, step)
    (root / "step-000011.partial").mkdir()
    half = root / "step-000012.partial"
    half.mkdir()
    (half / MARK).touch()
    (half / "model.safetensors").write_bytes(b"half")
    (root / "step-000003" / MARK).touch()
    prune(root, 2)
    assert _names(root) == ["step-000010", "step-1234567"]
    assert all(_loads(place) for place in checkpoints(root))


FOREIGN = {
    "step-notes": {"thesis.txt": "mine"},
    "step-7": {"thesis.txt": "mine"},
    "step-0000007": {MANIFEST: json.dumps({"format": 2, "position": {}, "tensors": {}})},
    "step-\u0660\u0660\u0660\u0660\u0660\u0667": {MANIFEST: json.dumps({"format": 2, "position": {}, "tensors": {}})},
    "step-000007": {"model.safetensors": "mine"},
    "step-000008": {MANIFEST: "{}"},
    "step-000009": {MANIFEST: "no JSON"},
    "step-000010.partial": {"model.safetensors": "mine"},
    "step-000011.partial": {MANIFEST: "[]"},
    "step-000012.best": {MANIFEST: json.dumps({"format": 2, "position": {}, "tensors": {}})},
    "step-000013": {},
}


def test_prune_leaves_all_that_is_not_ours(tmp_path):
    root = tmp_path / "c"
    for step in (1, 2):
        saved.write(root, step)
    for name, files in FOREIGN.items():
        (root / name).mkdir()
        for file, text in files.items():
            (root / name / file).write_text(text)
    (root / "step-000014").write_text("a file")
    kept = tmp_path / "elsewhere"
    shutil.copytree(root / "step-000001", kept)
    (root / "step-000000").symlink_to(kept)
    (root / "step-000015.partial").symlink_to(kept)
    before = _names(root)
    prune(root, 1)
    assert _names(root) == [name for name in before if name != "step-000001"]
    assert _loads(root / "step-000002")
    assert _loads(kept)
    for name, files in FOREIGN.items():
        assert {path.name: path.read_text() for path in (root / name).iterdir()} == files


def test_what_is_in_the_way_is_moved_aside_never_deleted(tmp_path):
    root = tmp_path / "c"
    for name in ("step-000007", "step-000007.partial", "step-000007.aside"):
        (root / name).mkdir(parents=True)
        (root / name / "thesis.txt").write_text(name)
    assert _loads(saved.write(root, 7))
    assert _names(root) == [
        "step-000007", "step-000007.aside", "step-000007.aside-2", "step-000007.partial.aside",
    ]  # fmt: skip
    assert (root / "step-000007.aside-2" / "thesis.txt").read_text() == "step-000007"
    assert (root / "step-000007.partial.aside" / "thesis.txt").read_text() == "step-000007.partial"


def test_a_checkpoint_is_not_written_over(tmp_path):
    place = saved.write(tmp_path, 7)
    with pytest.raises(Fault, match=r"step-000007 already holds a checkpoint; move it away"):
        saved.write(tmp_path, 7)
    assert _loads(place)
    assert _names(tmp_path) == ["step-000007"]


@contextmanager
def _calls(before):
    """Every change of the disk is told to ``before(name, path, other path)`` first."""

    def told(name, inner):
        def call(*args, **rest):
            at = args[0]
            before(name, os.readlink(f"/proc/self/fd/{at}") if isinstance(at, int) else os.fspath(at), args[1:])
            return inner(*args, **rest)

        return call

    with mock.patch.multiple(
        os,
        **{name: told(name, getattr(os, name)) for name in ("fsync", "pwrite", "rename", "unlink", "rmdir", "mkdir")},
    ):
        yield


def test_the_disk_has_everything_before_the_checkpoint_is_seen(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    seen = []
    with _calls(lambda name, path, rest: seen.append((name, path))):
        place = saved.write(run / "checkpoints", 7)
    partial = f"{place}.partial"
    renamed = seen.index(("rename", partial))
    manifest = seen.index(("fsync", f"{partial}/{MANIFEST}"))
    for path in place.iterdir():
        written = [at for at, event in enumerate(seen) if event == ("pwrite", f"{partial}/{path.name}")]
        synced = [at for at, event in enumerate(seen) if event == ("fsync", f"{partial}/{path.name}")]
        assert synced, f"{path.name} is not synced"
        assert max(written, default=0) < max(synced) <= manifest
    assert seen.index(("unlink", f"{partial}/{MARK}")) > manifest
    folder = [at for at, event in enumerate(seen) if event == ("fsync", partial)]
    assert seen.index(("unlink", f"{partial}/{MARK}")) < max(folder) < renamed
    assert seen[renamed + 1] == ("fsync", str(run / "checkpoints")), "the new name too"
    assert ("fsync", str(run)) in seen[:renamed], "and that of the folder of all checkpoints"


class Crash(BaseException):
    """As a killed process: nothing of ours runs after it."""


def _save_and_prune_until(root, calls):
    """Whether both came to their end, or died before so many changes of the disk."""
    left = [calls]

    def count(*_):
        left[0] -= 1
        if left[0] < 0:
            raise Crash

    try:
        with _calls(count):
            saved.write(root, 3)
            prune(root, 2)
    except Crash:
        return False
    return True


def test_a_crash_at_any_point_leaves_whole_checkpoints_and_no_litter(tmp_path):
    original = tmp_path / "original"
    for step in (1, 2):
        saved.write(original, step)
    calls = 0
    while True:
        root = tmp_path / "c"
        shutil.copytree(original, root)
        is_done = _save_and_prune_until(root, calls)
        found = checkpoints(root)
        assert [place.name for place in found][-2:] in (["step-000001", "step-000002"], ["step-000002", "step-000003"])
        assert all(_loads(place) for place in found), f"after {calls} calls"
        if found[-1] != checkpoint_at(root, 3):
            saved.write(root, 3)  # the next process comes by that step again
        prune(root, 2)
        assert _names(root) == ["step-000002", "step-000003"], f"after {calls} calls"
        assert all(_loads(place) for place in checkpoints(root))
        shutil.rmtree(root)
        if is_done:
            break
        calls += 1
    assert calls > 30


def test_steps_are_in_order_of_their_numbers(tmp_path):
    for step in (1_000_000, 999_999, 5):
        saved.write(tmp_path, step)
    assert [place.name for place in checkpoints(tmp_path)] == ["step-000005", "step-999999", "step-1000000"]
    assert not checkpoints(tmp_path / "nowhere")
    with pytest.raises(AssertionError, match="a checkpoint of step -1"):
        checkpoint_at(Path(), -1)
