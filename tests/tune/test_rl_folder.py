"""A run of rewards whose directory is moved or removed: the state is saved, and nothing is made under the old name."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import reinforced
from superstep.cli.main import main
from superstep.errors import Fault, SuperstepError
from superstep.launch.ranks import World, launch_on, launch_parties
from superstep.observe.jsonl import last_line, read
from superstep.state.checkpoint_dirs import checkpoints, step_of
from superstep.train.weights import publish_weights
from superstep.tune.rl.colocated import reinforce
from superstep.tune.rl.disaggregated.disaggregated import worlds_of
from superstep.tune.rl.disaggregated.sampler_rank import sample_apart
from superstep.tune.rl.disaggregated.trainer_rank import train_apart
from superstep.tune.rl.job import RlJob
from superstep.tune.rl.rollout_log import NAME
from superstep.tune.rl.rollout_worker import RolloutWorker
from superstep.tune.rl.step_rewards import RlStepResult

Change = Callable[[Path], None]

RECIPE = """
[train]
steps = 100000

[plan]
microbatch = 2

[state]
dir = "run"
save_every = 100000
"""


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return reinforced.start(tmp_path_factory.mktemp("start"))


@pytest.fixture
def place(start, tmp_path, monkeypatch):
    (tmp_path / "rl.toml").write_text(reinforced.RECIPE.format(start=start, environment="tasks.py") + RECIPE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def once_it_trains(do):
    """Does something to the run directory once it has done a step."""

    def wait():
        while last_line(Path("run/metrics.jsonl")).get("event") not in {"step", "rolled"}:
            time.sleep(0.01)
        do()

    found = threading.Thread(target=wait, daemon=True)
    found.start()
    return found


def remove():
    """Remove the run directory, into which snapshots are written meanwhile."""
    while Path("run").exists():
        shutil.rmtree("run", ignore_errors=True)


def resume(name, *flags):
    """The steps that metrics.jsonl tells of once a run has gone on for two, and the one it went on after."""
    (checkpoint,) = checkpoints(Path(name, "checkpoints"))
    step = step_of(checkpoint)
    words = ["--state.dir", name, "--state.existing", "resume", "--train.steps", str(step + 2)]
    assert main(["tune", "rl", *words, *flags]) == 0
    return [told["step"] for told in read(Path(name, "metrics.jsonl")) if told["event"] == "step"], step


def _train(world: World, job: RlJob, change: Change, step: int = 1) -> bool:
    """The run directory changes once a step is done, before that is saved."""

    def tell(learnt: RlStepResult) -> None:
        if world.rank == 0 and learnt.step == step:
            change(job.folder.root)

    return (reinforce if job.rollout.placement == "shared" else train_apart)(world, job, tell)


def _launch(job: RlJob, change: Change) -> None:
    if job.rollout.placement == "shared":
        launch_on("cpu", 2, _train, job, change)
    else:
        launch_parties("cpu", worlds_of(job, partial(_train, change=change), sample_apart))


def _move(root: Path) -> None:
    root.rename(root.with_name("moved"))


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("placement", "change", "name"), [("shared", _move, "moved"), ("apart", shutil.rmtree, "run.rescued")]
)
def test_the_state_is_saved_before_the_run_ends(
    placement, change, name, start, tmp_path, tmp_path_factory, monkeypatch
):
    monkeypatch.setenv("TMPDIR", str(tmp_path_factory.mktemp("t")))  # a socket's path has to be short
    job = replace(
        reinforced.job(tmp_path / "run", start, dp=2, rollout={"placement": placement}), files={"run.toml": ""}
    )
    with pytest.raises(Fault, match=r"was (moved|removed)") as fault:
        _launch(job, change)
    assert fault.value.saved_in == str(tmp_path / name)
    assert [each.name for each in checkpoints(tmp_path / name / "checkpoints")] == ["step-000001"]
    assert not job.folder.root.exists()
    assert (tmp_path / name / (NAME if name == "moved" else "run.toml")).is_file()


def _train_and_publish(world: World, job: RlJob, change: Change, at: str) -> bool:
    """The run directory changes while the second version is published: before a call of that."""
    inner, published = getattr(publish_weights, at), []

    def changed(*args, **rest):
        published.append(args)
        if world.rank == 0 and len(published) == 2:
            change(job.folder.root)
        return inner(*args, **rest)

    setattr(publish_weights, at, changed)
    return train_apart(world, job, lambda learnt: None)


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("change", "name", "at"), [(_move, "moved", "save"), (shutil.rmtree, "run.rescued", "give_name")]
)
def test_the_state_is_saved_where_the_directory_goes_while_weights_are_published(
    change, name, at, start, tmp_path, tmp_path_factory, monkeypatch
):
    monkeypatch.setenv("TMPDIR", str(tmp_path_factory.mktemp("t")))  # a socket's path has to be short
    job = reinforced.job(tmp_path / "run", start, rollout={"placement": "apart"})
    job = replace(job, files={"run.toml": ""})
    with pytest.raises(Fault, match=r"was (moved|removed)") as fault:
        launch_parties("cpu", worlds_of(job, partial(_train_and_publish, change=change, at=at), sample_apart))
    assert fault.value.saved_in == str(tmp_path / name)
    assert [each.name for each in checkpoints(tmp_path / name / "checkpoints")] == ["step-000001"]
    assert not job.folder.root.exists()


def _sample_late(world: World, job: RlJob, number: int) -> None:
    """A sampler that opens its second version once the run directory is gone."""
    take, taken = RolloutWorker.take, []

    def late(self: RolloutWorker, version: Path, name: str) -> object:
        taken.append(version)
        while len(taken) > 1 and version.exists():
            time.sleep(0.01)
        try:
            return take(self, version, name)
        except SuperstepError:
            (job.folder.root.parent / "failed").touch()
            raise

    RolloutWorker.take = late
    sample_apart(world, job, number)


def _change_first(root: Path, change: Change) -> None:
    """The trainer looks where the run directory is once a sampler has missed its version."""
    change(root)
    while not (root.parent / "failed").exists():
        time.sleep(0.01)
    time.sleep(0.5)  # it would have told the launcher by then


@pytest.mark.multiproc
@pytest.mark.parametrize(("change", "name", "tp"), [(shutil.rmtree, "run.rescued", 1), (_move, "moved", 2)])
def test_a_sampler_that_misses_its_version_leaves_it_to_the_trainer_to_say_why(
    change, name, tp, start, tmp_path, tmp_path_factory, monkeypatch
):
    monkeypatch.setenv("TMPDIR", str(tmp_path_factory.mktemp("t")))  # a socket's path has to be short
    job = reinforced.job(tmp_path / "run", start, rollout={"placement": "apart", "tp": tp})
    train = partial(_train, change=partial(_change_first, change=change), step=2)
    with pytest.raises(Fault, match=r"was (moved|removed)") as fault:
        launch_parties("cpu", worlds_of(job, train, _sample_late))
    assert fault.value.saved_in == str(tmp_path / name)
    assert "step-000002" in [each.name for each in checkpoints(tmp_path / name / "checkpoints")]


@pytest.mark.long
@pytest.mark.multiproc
def test_a_run_whose_folder_is_moved_is_saved_in_its_new_place(place, capfd):
    thread = once_it_trains(lambda: Path("run").rename("moved"))
    assert main(["tune", "rl", "rl.toml", "--plan.dp", "2"]) == 1
    thread.join()
    said = capfd.readouterr().err
    assert f"'{place}/run' was moved to {place}/moved; the state is saved there." in said
    assert f"superstep tune rl --state.dir {place}/moved --state.existing resume" in said
    assert not Path("run").exists()
    steps, step = resume("moved")
    assert steps == list(range(1, step + 3)), "one file tells of every step, once"


@pytest.mark.long
@pytest.mark.multiproc
def test_a_run_whose_folder_is_removed_is_saved_beside(place, capfd):
    thread = once_it_trains(remove)
    assert main(["tune", "rl", "rl.toml", "--plan.dp", "2"]) == 1
    thread.join()
    assert f"the state is saved in {place}/run.rescued." in capfd.readouterr().err
    assert not Path("run").exists()
    steps, step = resume("run.rescued")
    assert steps == [step + 1, step + 2]
