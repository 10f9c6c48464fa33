"""Trackers of others: what their own clients read of what was sent, offline, and that none keeps or ends a run."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest

import runs
from reported import ROUTERS, STARTED, STEP
from superstep.cli.main import main
from superstep.observe.events import Evaluated, Resumed, Saved
from superstep.observe.metric_names import Scalars
from superstep.observe.trackers import Mlflow, TrackedRun, TrackerSink, Trackio, Wandb
from superstep.run.reports import sinks as sinks_module

ASKED = TrackedRun(project="p", name="n", run=None, settings={"train.lr": 1e-3, "plan.dp": 2}, folder="")
TOLD = [Scalars(1, {"train/loss": 2.5, "train/lr": 1e-3}), Scalars(2, {"train/loss": 2.25})]
LATER = [Scalars(2, {"train/loss": 2.0}), Scalars(3, {"train/loss": 1.5})]
"""Of a launch that goes on from step 1."""


def records(raw):
    """Those of a file of wandb's: LevelDB's log, behind seven bytes (leveldb, doc/log_format.md)."""
    at, data = 7, b""
    while at + 7 <= len(raw):
        if (left := 2**15 - at % 2**15) < 7:
            at += left
            continue
        size, kind = int.from_bytes(raw[at + 4 : at + 6], "little"), raw[at + 6]
        data += raw[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last piece
            yield data
            data = b""


def twice(make, asked):
    """Tell a run, and go on with it in a second launch; by what the tracker knows it."""
    first = make(asked)
    first.log(TOLD)
    first.finish()
    again = make(replace(asked, run=first.run))
    again.log(LATER)
    again.finish()
    assert again.run == first.run
    return first.run


@pytest.mark.long
def test_wandb_reads_what_was_sent(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="wandb is not installed: 62 MB of its own, so not a developer's tool")
    from wandb.proto import wandb_internal_pb2 as messages

    monkeypatch.setenv("WANDB_MODE", "offline")
    run = twice(lambda asked: Wandb(wandb, asked), replace(ASKED, folder=str(tmp_path)))
    found, configs = [], []
    for path in sorted(tmp_path.glob(f"wandb/offline-run-*/run-{run}.wandb")):
        for data in records(path.read_bytes()):
            record = messages.Record()
            record.ParseFromString(data)
            items = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
            if items:
                found.append((int(items["step"]), float(items["train/loss"])))
            configs += [item.key for item in record.run.config.update]
    assert found == [(1, 2.5), (2, 2.25), (2, 2.0), (3, 1.5)]
    assert {"train.lr", "plan.dp"} <= set(configs)


@pytest.mark.long
def test_mlflow_reads_what_was_sent(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="mlflow-skinny is not installed: make setup")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tmp_path.as_uri())
    run = twice(lambda asked: Mlflow(mlflow, asked), ASKED)
    client = mlflow.MlflowClient()
    found = client.get_run(run)
    assert found.data.params == {"train.lr": "0.001", "plan.dp": "2"}
    assert (found.info.run_name, found.info.status) == ("n", "FINISHED")
    assert client.get_experiment(found.info.experiment_id).name == "p"
    losses = [(one.step, one.value) for one in client.get_metric_history(run, "train/loss")]
    assert losses == [(1, 2.5), (2, 2.25), (2, 2.0), (3, 1.5)]
    # A second run is of the same experiment.
    assert client.get_run(Mlflow(mlflow, ASKED).run).info.experiment_id == found.info.experiment_id


@pytest.mark.long
def test_trackio_reads_what_was_sent(tmp_path, monkeypatch, capsys):
    pytest.importorskip("trackio", reason="trackio is not installed: make setup")
    import trackio
    from trackio import sqlite_storage

    for module in (trackio.utils, sqlite_storage):
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path)
    run = twice(lambda asked: Trackio(trackio, asked), ASKED)
    logs = sqlite_storage.SQLiteStorage.get_logs("p", run)
    assert [(one["step"], one["train/loss"]) for one in logs] == [(1, 2.5), (2, 2.25), (2, 2.0), (3, 1.5)]
    assert logs[0]["train/lr"] == 1e-3
    assert capsys.readouterr().out == "", "the terminal is the run's"


class Kept:
    """A tracker that notes what it is sent, once it may."""

    run = "r"

    def __init__(self, error=None):
        self.told, self.is_finished, self.error, self.may = [], False, error, threading.Event()

    def log(self, told):
        self.may.wait(20)
        if self.error is not None:
            raise self.error
        self.told += told

    def finish(self):
        self.is_finished = True


def test_a_run_does_not_wait_for_a_slow_tracker():
    kept, said = Kept(), []
    sink = TrackerSink("slow", kept, said.append)
    began_s = time.monotonic()
    for event in (STARTED, *(replace(STEP, step=k) for k in range(1, 200)), ROUTERS, Resumed(step=3, path="")):
        sink.write(event)
    assert time.monotonic() - began_s < 5
    kept.may.set()
    sink.write(Evaluated(step=199, loss=1.0, bits_per_byte=None, seconds=0.1))
    sink.write(Saved(step=199, path="", seconds=0.1, bytes=1))
    sink.close()
    assert [one.step for one in kept.told] == [*range(1, 200), ROUTERS.step, 199]
    assert kept.told[-1].points == {"validation/loss": 1.0}
    assert (kept.is_finished, said) == (True, [])
    sink.close()


def test_what_fails_is_told_once_and_the_run_goes_on():
    kept, said = Kept(RuntimeError("no such host\nand more")), []
    kept.may.set()
    sink = TrackerSink("away", kept, said.append)
    for step in range(50):
        sink.write(replace(STEP, step=step))
        time.sleep(0.001)
    sink.close()
    assert said == ["away has failed, and is told nothing more: no such host"]
    stuck = TrackerSink("stuck", Kept(), said.append, leaving_s=0.1)
    stuck.write(STEP)
    stuck.close()
    assert said[1] == "stuck has not taken all within 0 s; metrics.jsonl has it"
    stuck._tracker.may.set()


def test_a_client_that_is_missing_or_refuses_is_named_before_the_run_begins(tmp_path, monkeypatch, capsys):
    runs.make_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sinks_module, "find_spec", lambda name: None)
    assert main(["train", "run.toml", "--observe.trackers", "wandb", "mlflow"]) == 2
    assert "observe.trackers has 'wandb', whose client is not installed: pip install wandb;" in capsys.readouterr().err
    assert main(["train", "run.toml", "--observe.trackers", "mlflow"]) == 2
    assert "pip install mlflow-skinny;" in capsys.readouterr().err
    assert main(["train", "run.toml", "--observe.trackers", "weights"]) == 2
    assert not (tmp_path / "run").exists()


def test_a_run_sends_its_curves_and_goes_on_in_the_same_run(tmp_path, monkeypatch, capsys):
    runs.make_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    opened = []

    class Client(Kept):
        def __init__(self, module, asked):
            super().__init__()
            self.asked, self.run = asked, asked.run or "the first"
            self.may.set()
            opened.append(self)

    def refuses(module, asked):
        raise RuntimeError("No API key configured")

    monkeypatch.setattr(sinks_module, "find_spec", lambda name: name)
    monkeypatch.setattr(sinks_module, "import_module", lambda name: name)
    monkeypatch.setitem(sinks_module.CLIENTS, "wandb", (refuses, "wandb"))
    asked = ["train", "run.toml", "--observe.trackers"]
    assert main([*asked, "wandb"]) == 2
    assert "wandb cannot begin a run (No API key configured); fix its own settings" in capsys.readouterr().err
    assert not (tmp_path / "run" / "run.toml").exists()
    monkeypatch.setitem(sinks_module.CLIENTS, "trackio", (Client, "trackio"))
    assert main([*asked, "trackio", "--train.steps", "3"]) == 0
    assert main([*asked, "trackio", "--train.steps", "6", "--state.existing", "resume"]) == 0
    first, again = opened
    assert (first.asked.run, again.asked.run) == (None, "the first")
    assert (first.asked.project, first.asked.name) == ("superstep", "run")
    assert first.asked.settings["train.batch_sequences"] == 4
    losses = [
        (one.step, one.points["train/loss"]) for each in opened for one in each.told if "train/loss" in one.points
    ]
    assert losses == [(line["step"], line["loss"]) for line in runs.events(tmp_path / "run", "step")]
    assert first.is_finished
    assert again.is_finished
