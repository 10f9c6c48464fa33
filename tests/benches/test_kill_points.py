"""A short run of bench.faults: kills at random instants of a save, and flipped bits; and that both can see a fault."""

from unittest import mock

from bench import faults


def test_kills_leave_whole_checkpoints_and_flips_are_seen(tmp_path):
    killed = faults.kill_points(12, 1, tmp_path)
    assert killed["wrong"] == []
    assert sum(killed["left"].values()) == 12
    copied = faults.snapshot_kills(6, 1, tmp_path)
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
