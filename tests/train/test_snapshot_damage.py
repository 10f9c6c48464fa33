"""A flipped bit in a snapshot is never gone on from, nor written as a checkpoint."""

import json
import multiprocessing
import os
import signal
import threading
import time

import pytest

import hurting
import runs
from superstep.cli.main import main
from superstep.errors import RankLost
from superstep.run import launch_ranks
from superstep.state.checkpoint_dirs import checkpoints, step_of
from superstep.state.snapshots import background_checkpoint
from superstep.state.verify import verify

pytestmark = pytest.mark.multiproc

FLAGS = ["run.toml", "--numerics.exact", "true", "--train.steps", "18", "--train.eval-every", "18",
         "--state.keep", "9", "--plan.dp", "2", "--plan.zero", "1"]  # fmt: skip
SAVED = ["--state.save-every", "5"]


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
    assert main(["train", *FLAGS, *SAVED, "--state.dir", "whole"]) == 0
    return tmp_path


def test_a_copy_that_is_damaged_on_its_way_to_the_disk_is_not_written_and_another_is(folder, monkeypatch, capfd):
    planted, wanted = [], background_checkpoint.oldest_wanted

    def wanting(memories):
        found = wanted(memories)
        if found is not None and not planted:
            planted.append(found.position.step)
            _flip(memories[1], found.slots[1])
        return found

    monkeypatch.setattr(background_checkpoint, "oldest_wanted", wanting)
    assert main(["train", *FLAGS, *SAVED, "--state.snapshot-every", "1", "--state.dir", "hurt"]) == 0
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


def _kill(name, memories, steps):
    """Kill a rank once the memory of each rank has the states of these steps and of no other."""
    deadline_s = time.monotonic() + 240
    while any(set(memory.whole()) != steps for memory in memories) and time.monotonic() < deadline_s:
        time.sleep(0.005)
    (rank,) = (process for process in multiprocessing.active_children() if process.name == name)
    os.kill(rank.pid, signal.SIGKILL)


def test_a_damaged_copy_is_refused_by_name_and_the_next_best_state_is_gone_on_from(folder, monkeypatch, capfd):
    """First the newest copy is damaged, then every copy of a rank: then the newest checkpoint is gone on from.

    A rank is killed where all ranks wait: two of their three slots are to be written, the third has the newest state,
    and nothing newer than step 0, 6 and 18 is written before the first loss, before the second and after it.
    """
    plan = [("rank 0", {3, 6, 7}, {7}), ("rank 1", {9, 12, 13}, {9, 12, 13})]
    limits, written_to = iter((0, 6, 18)), [0]
    wanted, recovering = background_checkpoint.oldest_wanted, launch_ranks.recovering

    def wanting(memories):
        found = wanted(memories)
        return found if found is not None and found.position.step <= written_to[-1] else None

    def recovers(launch, memories, idle, restore):
        def launched(lost):
            written_to.append(next(limits))
            if not plan:
                return launch(lost)
            name, steps, damaged = plan.pop(0)
            killer = threading.Thread(target=_kill, args=(name, memories, steps), daemon=True)
            killer.start()
            try:
                return launch(lost)
            except RankLost:
                killer.join()
                for step in damaged:
                    _flip(memories[1], memories[1].whole()[step])
                raise

        return recovering(launched, memories, idle, restore)

    monkeypatch.setattr(background_checkpoint, "oldest_wanted", wanting)
    monkeypatch.setattr(launch_ranks, "recovering", recovers)
    flags = [*FLAGS, "--state.save-every", "3", "--state.snapshot-every", "1", "--state.dir", "hurt"]
    assert main(["train", *flags]) == 0
    said = capfd.readouterr().out
    assert _losses(folder / "hurt") == _losses(folder / "whole"), said
    first, second = hurting.resumed(folder / "hurt")
    refused = "rank 1: the copy of step {} in memory has other bits than were copied"
    assert first["passed_over"] == [refused.format(7)]
    assert (first["step"], first["path"]) == (6, "")
    assert second["passed_over"] == [refused.format(step) for step in (13, 12, 9)], "the newest first"
    assert second["step"] == 6
    assert second["path"].endswith("step-000006"), "the newest checkpoint"
    assert f"passed over: {refused.format(7)}" in said
    assert [step_of(place) for place in checkpoints(folder / "hurt" / "checkpoints")] == [3, 6, 9, 12, 15, 18]
