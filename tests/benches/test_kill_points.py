"""A short run of bench.faults: kills at random instants of a save, and flipped bits; and that both can see a fault."""

from unittest import mock

import pytest

from bench import faults, faults_copied
from longer import longer
from superstep.engine.flat.snapshots import Snapshots
from superstep.state.snapshots.memory_snapshot import WHOLE


@pytest.mark.long
def test_kills_leave_whole_checkpoints_and_flips_are_seen(tmp_path):
    killed = faults.kill_points(12, 1, tmp_path)
    assert killed["wrong"] == []
    assert sum(killed["left"].values()) == 12
    copied = faults_copied.snapshot_kills(6, 1, tmp_path)
    assert copied["wrong"] == []
    flipped = faults.flips(60, 1, tmp_path)
    assert flipped["unseen"] == []
    assert set(flipped["of"]) == {"config.json", "manifest.json", "model.safetensors", "optimizer.safetensors"}


def _torn(root, victim, after_s):
    """A save that overwrites a checkpoint in its place, killed half-way; or one that leaves a seen but half folder."""
    place = root / "step-000001"
    if victim is not None:
        data = (place / "model.safetensors").read_bytes()
        (place / "model.safetensors").write_bytes(data[:-4] + b"abcd")
    return 0.1


def test_a_torn_checkpoint_is_found_out(tmp_path):
    with mock.patch.object(faults, "save_and_kill", _torn):
        found = faults.kill_points(2, 1, tmp_path)
    assert found["left"] == {"unloadable": 2}
    assert len(found["wrong"]) == 2


def _marked_before(snapshots, unit, slot, ready, *, is_last):
    if is_last:
        snapshots._memory.put(slot, "state", WHOLE)
    snapshots._copy_now(unit, slot)
    return 0.0, 0.0


def _marked_with_the_first(snapshots, unit, slot, ready, *, is_last):
    snapshots._copy_now(unit, slot)
    snapshots._memory.put(slot, "state", WHOLE)
    return 0.0, 0.0


@pytest.mark.parametrize("planted", longer([_marked_before, _marked_with_the_first], lambda way: way is _marked_before))
def test_a_slot_that_is_said_to_be_whole_too_early_is_found_out_each_time(tmp_path, planted):
    with mock.patch.object(Snapshots, "_copy", planted):
        found = faults_copied.snapshot_points(tmp_path)
    assert found["wrong"]
    assert "mixed" in found["wrong"][0]


def test_a_copy_that_is_cut_off_anywhere_is_not_gone_on_from(tmp_path):
    found = faults_copied.snapshot_points(tmp_path)
    assert found["wrong"] == []
    assert found["points"] == 19, "nine numbers, three tensors of three units, and that it is whole"
