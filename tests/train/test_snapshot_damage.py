"""A flipped bit in a snapshot is never gone on from, nor written as a checkpoint."""

import json

import pytest

import hurting
import runs
from superstep.cli.main import main
from superstep.cli.train import job
from superstep.errors import Lost
from superstep.state import flush
from superstep.state.folders import checkpoints, step_of
from superstep.state.snapshot import common
from superstep.state.verify import verify

pytestmark = pytest.mark.multiproc

FLAGS = ["run.toml", "--numerics.exact", "true", "--train.steps", "18", "--train.eval-every", "18",
         "--state.save-every", "5", "--state.keep", "9", "--plan.dp", "2", "--plan.zero", "1"]  # fmt: skip


def _flip(memory, slot):
    """A bit in the middle of the state, low enough that nothing else would find it."""
    memory.words(slot)[memory.slot_bytes // 8] ^= 1 << 12


def _losses(run):
    return [(line["step"], line["loss"], line["grad_norm"]) for line in runs.events(run, "step")]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """With a run that nothing was done to."""
    runs.make_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["train", *FLAGS, "--state.dir", "whole"]) == 0
    return tmp_path


def test_a_copy_that_is_damaged_on_its_way_to_the_disk_is_not_written_and_another_is(folder, monkeypatch, capfd):
    planted, wanted = [], flush.wanted

    def wanting(memories):
        found = wanted(memories)
        if found is not None and not planted:
            planted.append(found.position.step)
            _flip(memories[1], found.slots[1])
        return found

    monkeypatch.setattr(flush, "wanted", wanting)
    assert main(["train", *FLAGS, "--state.snapshot-every", "1", "--state.dir", "hurt"]) == 0
    assert planted == [5]
    assert _losses(folder / "hurt") == _losses(folder / "whole")
    (told,) = runs.events(folder / "hurt", "corrupted")
    assert (told["found"], told["ranks"], told["how"]) == (5, [1], "checksum")
    assert "corrupt: the copy in memory of rank 1 on " in capfd.readouterr().out
    places = {step_of(place): place for place in checkpoints(folder / "hurt" / "checkpoints")}
    assert set(places) == {told["step"], 10, 15, 18}, "what is damaged is not written, and its step is copied again"
    for place in places.values():
        verify(place)
    for step in (10, 15, 18):
        one, other = (json.loads((folder / run / "checkpoints" / places[step].name / "manifest.json").read_text())
                      for run in ("whole", "hurt"))  # fmt: skip
        assert one["tensors"] == other["tensors"]


def test_a_damaged_copy_is_refused_by_name_and_the_next_best_state_is_gone_on_from(folder, monkeypatch, capfd):
    """First the newest copy, then every copy of a rank: then the newest checkpoint."""
    planted, recovering = [], job.recovering

    def recovers(launch, memories, idle):
        def launched(lost):
            try:
                return launch(lost)
            except Lost:
                whole, newest = memories[1].whole(), common(memories)
                damaged = set(whole) if planted else {newest}
                planted.append((newest, damaged, (set(memories[0].whole()) & set(whole)) - damaged))
                for step in damaged:
                    _flip(memories[1], whole[step])
                raise

        return recovering(launched, memories, idle)

    monkeypatch.setattr(job, "recovering", recovers)
    hurter = hurting.Hurter(folder / "hurt", [("killed", "rank 0", 8), ("killed", "rank 1", 16)])
    hurter.start()
    assert main(["train", *FLAGS, "--state.snapshot-every", "1", "--state.dir", "hurt"]) == 0
    hurter.join()
    said = capfd.readouterr().out
    assert _losses(folder / "hurt") == _losses(folder / "whole"), said
    first, second = hurting.resumed(folder / "hurt")
    refused = "rank 1: the copy of step {} in memory has other bits than were copied"
    (newest, _, others), (last, every, _) = planted
    assert first["passed_over"] == [refused.format(newest)]
    if others:  # the slot was not being copied over
        assert (first["step"], first["path"]) == (max(others), "")
    # Which of them is whole when it is looked at depends on how far the next copy had come.
    assert second["passed_over"]
    assert set(second["passed_over"]) <= {refused.format(step) for step in {last, *every}}
    assert second["step"] in (5, 10, 15)
    assert second["path"].endswith(f"step-{second['step']:06d}"), "the newest checkpoint"
    assert f"passed over: {refused.format(newest)}" in said
    assert [step_of(place) for place in checkpoints(folder / "hurt" / "checkpoints")] == [5, 10, 15, 18]
