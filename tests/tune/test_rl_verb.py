"""superstep tune rl: what it is told, what it writes, and that a run comes to one end however often it is killed."""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch

import reinforced
from ranks import ranks_below
from superstep.cli.arguments.tune.tune import read
from superstep.cli.main import main
from superstep.observe.page.report import run_value
from superstep.run.console import Silent
from superstep.run.reports.report import load_reported_run
from superstep.run.rl.prepare_rl import prepare_rl_job
from superstep.state.checkpoint_dirs import checkpoints
from superstep.train.run_folder.run_paths import RunFolder
from superstep.tune.recipe import write
from superstep.tune.rl.config import RlRecipe, read_rl
from superstep.tune.rl.rollout_log import NAME

RECIPE = """
[train]
steps = {steps}
lr = 3e-3

[plan]
dp = 2
microbatch = 2

[numerics]
exact = true

[state]
dir = "{root}"
save_every = 2
existing = "resume"
"""


STOPS = """
import os, signal
from pathlib import Path

judge = grade

def grade(task, rollout):
    once = Path(__file__).with_name("once")
    if not once.exists():
        once.touch()
        os.kill(os.getpid(), signal.SIGSTOP)
    return judge(task, rollout)
"""


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A model, and an environment of which one grader is stopped once."""
    folder = reinforced.start(tmp_path_factory.mktemp("start"))
    (folder / "stopping.py").write_text(reinforced.ENVIRONMENT + STOPS)
    return folder


def recipe(folder: Path, start: Path, name: str, steps: int = 4) -> tuple[Path, Path]:
    root, path = folder / name, folder / f"{name}.toml"
    text = reinforced.RECIPE.format(start=start, environment="stopping.py")
    path.write_text(text + RECIPE.format(root=root, steps=steps))
    return root, path


def begin(path: Path, *flags: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "superstep", "tune", "rl", str(path), *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)


def told(root: Path) -> list[tuple[object, ...]]:
    """Of each step what must be the same."""
    lines = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    steps = {line["step"]: line for line in lines if line["event"] == "step"}
    rolled = {line["step"]: line for line in lines if line["event"] == "rolled"}
    return [
        (step, line["loss"], line["grad_norm"], rolled[step]["reward"], rolled[step]["drawn_tokens"])
        for step, line in sorted(steps.items())
    ]


def test_a_recipe_is_read_back(start, tmp_path):
    _, path = recipe(tmp_path, start, "run")
    found = read_rl(path)
    assert (found.rl.lag, found.train.warmup_steps, found.train.min_lr_ratio) == (1, 0, 1.0)
    path.write_text(write(found))
    assert read_rl(path) == found
    assert read(["rl", str(path), "--rl.group", "8"]).rl.group == 8
    assert read(["rl"]) == RlRecipe()


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        ([], "superstep tune needs an action"),
        (["rlx"], "superstep tune has no action 'rlx'; did you mean 'rl'?"),
        (
            ["rl"],
            "start is left out; name a run, a checkpoint or a Hugging Face folder to begin with",
        ),
        (
            ["rl", "tasks.py"],
            "'tasks.py' is not a .toml file; name a recipe, or the tasks with --rl.environment",
        ),
        (["rl", "--rl.grup", "2"], "did you mean '--rl.group'"),
        (["rl", "--rl.estimator", "ppo"], "--rl.estimator = 'ppo' is not valid; it must be one of 'grpo'"),
    ],
)
def test_what_is_wrong_with_a_recipe_is_said_in_one_line(argv, error, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks.py").touch()
    assert main(["tune", *argv]) == 2
    said = capsys.readouterr().err
    assert error in said
    assert said.count("\n") == 1


@pytest.mark.long
@pytest.mark.multiproc
def test_a_run_by_the_verb_goes_on_where_it_was_stopped(start, tmp_path, capfd):
    root, path = recipe(tmp_path, start, "run")
    process = begin(path)
    while process.poll() is None and not (root / NAME).is_file():
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=300)[0].decode()
    assert process.returncode == 128 + signal.SIGTERM, said
    assert f"superstep tune rl --state.dir {root} --state.existing resume" in said
    assert (root / "report.html").is_file()
    again = said
    assert main(["tune", "rl", str(path)]) == 0
    said = capfd.readouterr().out
    assert re.search(r"graded again: its process \d+ was stopped \(SIGSTOP\) and did not go on: killed", again + said)
    assert "reward" in said
    assert "Results:" in said
    assert [step for step, *_ in told(root)] == [1, 2, 3, 4]
    assert not list((root / "weights").glob("weights-*"))  # every snapshot was retired
    # A folder as Hugging Face writes it, for who serves it.
    names = {file.name for file in checkpoints(RunFolder(root=root).checkpoints)[-1].iterdir()}
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= names
    assert "Reward" in dict(run_value(load_reported_run(RunFolder(root=root)))["measures"])
    assert (root / "report.html").is_file()
    assert main(["tune", "rl", str(path), "--rl.group", "2"]) == 2
    assert "rl.group = 2, and the run in state.dir" in capfd.readouterr().err


@pytest.mark.long
@pytest.mark.multiproc
def test_a_sampler_that_dies_is_named_and_the_run_goes_on_to_the_same_bits(
    pool, start, tmp_path, tmp_path_factory, monkeypatch
):
    apart = ("--rollout.placement", "apart", "--plan.dp", "1")
    root, path = recipe(tmp_path, start, "run", steps=3)
    beside = tmp_path_factory.mktemp("t")  # a socket's path has to be short
    monkeypatch.setenv("TMPDIR", str(beside))
    process = begin(path, *apart)
    while process.poll() is None and not (root / NAME).is_file():
        time.sleep(0.02)
    ranks = sorted(ranks_below(psutil.Process(process.pid)), key=lambda rank: rank.create_time())
    assert len(ranks) == 2
    ranks[1].kill()
    said = process.communicate(timeout=300)[0].decode()
    assert process.returncode == 1, said
    last = said.splitlines()[-1]
    assert last.startswith("superstep: fault: sampler 0, rank 0: the process was killed by SIGKILL"), said
    assert not psutil.pid_exists(ranks[0].pid)
    assert not list(beside.glob("[!t]*"))  # torchinductor's stays
    assert main(["tune", "rl", str(path), *apart]) == 0
    whole, path = recipe(tmp_path, start, "whole", steps=3)
    with prepare_rl_job(read(["rl", str(path), *apart]), None, Silent()) as job:
        steps = pool.run(1, reinforced.run, reinforced.in_turn(job))[0]
    names = ("step", "loss", "norm", "reward", "drawn_tokens")
    assert told(root) == [tuple(each[name] for name in names) for each in steps]
    ours, theirs = reinforced.weights(root), reinforced.weights(whole)
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize("placement", ["shared", "apart"])
def test_twenty_kills_of_any_process_change_no_bit(start, tmp_path, placement):
    """Trainers, samplers, their launcher and graders; with dp 2 and tp 2 in turn."""
    whole, path = recipe(tmp_path, start, "whole", steps=12)
    placed = ("--rollout.placement", placement)
    begin_s = time.monotonic()
    process = begin(path, *placed)
    said = process.communicate(timeout=500)[0].decode()
    assert process.returncode == 0, said
    took_s = time.monotonic() - begin_s
    root, path = recipe(tmp_path, start, "killed", steps=12)
    draw = random.Random(0)
    kills = dict.fromkeys(("launcher", "rank", "grader"), 0)
    ends = 0
    while sum(kills.values()) < 20 or not ends:
        flags = draw.choice([(), ("--plan.dp", "1", "--plan.tp", "2", "--rollout.tp", "2")])
        process = begin(path, *placed, *flags)
        if sum(kills.values()) < 20:
            kind = draw.choice(list(kills))
            kills[kind] += kill_one(process, kind, after_s=draw.uniform(0.0, 0.6) * took_s)
        said = process.communicate(timeout=500)[0].decode()
        assert process.returncode in (0, 1, -signal.SIGKILL), said
        if process.returncode == 0:
            ends += 1
            assert told(root) == told(whole)
            ours, theirs = reinforced.weights(root), reinforced.weights(whole)
            assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
            shutil.rmtree(root)
    assert min(kills.values()) > 0, kills


def kill_one(launcher: subprocess.Popen[bytes], kind: str, *, after_s: float) -> bool:
    """SIGKILL for one of a run's processes, so long after the first of its kind was there; whether one was."""
    is_there = False
    while launcher.poll() is None:
        found = processes(launcher.pid).get(kind, [])
        if found and is_there:
            with suppress(psutil.NoSuchProcess):
                random.choice(found).kill()
                return True
        is_there = bool(found)
        time.sleep(after_s if is_there else 0.05)
    return False


def processes(launcher: int) -> dict[str, list[psutil.Process]]:
    """The processes of a run, by kind."""
    found: dict[str, list[psutil.Process]] = {"launcher": [psutil.Process(launcher)]}
    with suppress(psutil.Error):  # it has ended already
        for process in psutil.Process(launcher).children(recursive=True):
            kind = "grader" if "superstep.grade.workers.grader_worker" in " ".join(process.cmdline()) else "rank"
            found.setdefault(kind, []).append(process)
    return found
