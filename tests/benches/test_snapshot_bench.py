"""A short run of bench.snapshots: every figure is there, of the same bytes."""

import pytest

from bench.snapshots import Asked, measured, ratios


@pytest.mark.long
@pytest.mark.multiproc
def test_every_way_is_timed_on_the_same_bytes(tmp_path):
    found = measured(Asked(layers=1, width=64, sequence=16, repeats=1), tmp_path)
    numel = 4096 * 64 + 64 * (4 * 64 + 3 * 256 + 2) + 64
    assert found["bytes"] == pytest.approx(12 * numel, rel=0.01)
    assert found["largest_tensor_bytes"] == 4 * 4096 * 64
    assert all(each["median"] > 0 for name, each in found["seconds"].items())
    assert all(value == value for value in found["ratios"].values())


def test_a_stall_is_what_a_step_takes_longer():
    each = {"step": 1.0, "step with a snapshot": 1.1, "memcpy": 0.2, "snapshot, bare": 0.4, "torch.save": 2.0,
            "dcp.save": 3.0, "dcp.async_save returns": 0.5, "save": 1.0, "load": 0.5}  # fmt: skip
    found = {"bytes": 1000, "load_peak_bytes": 30, "largest_tensor_bytes": 20}
    seconds = {name: {"median": value, "all": [value]} for name, value in each.items()}
    # A machine that is slow for a while is so in a step and the next: medians of each would differ by 0.3.
    seconds["step"]["all"], seconds["step with a snapshot"]["all"] = [1.0, 2.0, 0.7], [1.1, 2.1, 1.0]
    told = ratios({**found, "seconds": seconds}, (4000.0, 2000.0))
    assert told["stall_over_memcpy"] == pytest.approx(0.5)
    assert told["hidden"] == pytest.approx(0.75)
    assert told["dcp_async_over_stall"] == pytest.approx(5.0)
    assert (told["save_of_disk_rate"], told["load_of_disk_rate"]) == (0.5, 0.5)
    assert told["load_peak_over_largest_tensor"] == 1.5
