"""Saves of a run of rewards: one that fails is tried again later, and ends the run only where it is the last."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from superstep.errors import DiskFault
from superstep.monitor.status_page import NoHeartbeats
from superstep.observe.events import Saved, Warned
from superstep.plan.config import RunConfig, StateConfig
from superstep.state.manifest import Position
from superstep.state.verify import SingleProcess
from superstep.train import save_schedule
from superstep.train.run_folder.after_checkpoint import WrittenCheckpoint
from superstep.train.save_schedule import SaveSchedule
from superstep.train.snapshot_schedule import SnapshotSchedule
from superstep.tune.rl.config import RlConfig, RolloutConfig
from superstep.tune.rl.rl_step import RlTraining

STEPS = 10


class Disk:
    """A trainer that can do nothing but save, some times in vain."""

    def __init__(self, failures: int) -> None:
        config = RunConfig(state=StateConfig(dir="run", save_every=2, save_patience=2))
        config = replace(config, data=replace(config.data, sequence_tokens=8))
        self.run = SimpleNamespace(config=config)
        self.position = Position(step=0)
        self.saves = SaveSchedule(2, 2)
        self.heart = NoHeartbeats()
        self.copies = SnapshotSchedule(None)
        self.peers = SingleProcess()
        self.failures = failures
        self.told: list[Saved | Warned] = []

    def follow_folder(self) -> None:
        """The run directory is where it was."""

    def retry_step_s(self) -> None:
        """By the clock nothing is due: the program says when."""

    def save(self, position: Position) -> WrittenCheckpoint:
        if self.failures:
            self.failures -= 1
            raise DiskFault("run/checkpoints cannot be written: No space left on device.")
        return WrittenCheckpoint(Path(f"step-{position.step:06}"), 1, ())

    def training(self) -> RlTraining:
        rl = RlConfig(environment="tasks.py")
        return RlTraining(rl, RolloutConfig(), STEPS, self, lambda learnt: None, self.told.append)

    def save_after(self, training: RlTraining, step: int) -> None:
        self.position = Position(step=step)
        training.save()


@pytest.fixture
def pauses(monkeypatch):
    slept: list[float] = []
    monkeypatch.setattr(save_schedule, "PAUSES_S", (1.0, 2.0))
    monkeypatch.setattr(save_schedule, "time", SimpleNamespace(sleep=slept.append))
    return slept


def test_a_run_trains_on_after_a_save_that_failed_and_saves_at_the_next(pauses):
    disk = Disk(failures=1)
    training = disk.training()
    for step in (2, 4):
        disk.save_after(training, step)
    warned, done = disk.told
    assert isinstance(warned, Warned)
    assert warned.text.endswith("No space left on device. Training continues and saves again after step 4.")
    assert isinstance(done, Saved)
    assert (done.step, pauses) == (4, [])


def test_the_last_save_is_tried_again_at_once_for_what_it_holds_is_in_no_other(pauses):
    disk = Disk(failures=2)
    disk.save_after(disk.training(), STEPS)
    assert [type(each) for each in disk.told] == [Warned, Warned, Saved]
    assert pauses == [1.0, 2.0]


def test_a_run_whose_newest_checkpoint_is_too_old_ends(pauses):
    disk = Disk(failures=100)
    training = disk.training()
    disk.save_after(training, 2)
    with pytest.raises(DiskFault, match="No space left on device"):
        disk.save_after(training, 4)
    assert pauses == [1.0, 2.0]
