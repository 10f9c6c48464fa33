"""What is wrong is refused before torch, which takes seconds, is imported anywhere: here, or for the ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

import model_folder
import runs
from superstep.cli.arguments import train
from superstep.cli.main import main
from superstep.errors import ConfigError
from superstep.plan.resolution.resolve import resolve

# A command line, and what its refusal must say.
WRONG = {
    "train --plan.dp 3": "does not split over plan.dp = 3",
    "train --plan.dp 1 --train.lr -1": "train.lr = -1.0 must be above 0",
    "train --plan.dq 2": "--plan.dq",
    "train --model.name nope": "model.name = 'nope'",
    "train --data.sequence-tokens 99999": "data.sequence_tokens = 99999",
    "train --model.source mine.py --train.steps 0": "train.steps = 0",
    "train --model.source mine.py": "model.source = 'mine.py' is not a Python file",
    "train --state.dir taken": "state.dir = 'taken' already holds a run",
    "train --state.dir start": "holds files but no run",
    "train --train.elastic true": "train.elastic = true needs several hosts",
    "train --web --web-port 70000": "--web-port = 70000",
    "train no.toml": "no.toml cannot be read",
    "plan nope --cluster 64xH100": "model.name = 'nope'",
    "plan llama3-8b --cluster 64xH1000": "H1000",
    "plan llama3-8b --cluster 64xH100 --out taken/run.toml": "--out = 'taken/run.toml' is there already",
    "prove --plan.dp 3": "does not split over plan.dp = 3",
    "prove --exact --steps 1": "--steps = 1",
    "prove taken --plan.tp 3": "plan.tp = 3",
    "tune sft": "start is left out",
    "tune sft --start nowhere": "'nowhere' is not there",
    "tune sft --start start --plan.dp 3": "does not split over plan.dp = 3",
    "tune sft --start start --sft.epochs -1": "sft.epochs = -1",
    "tune sft --start start --state.dir taken": "state.dir = 'taken' already holds a run",
    "tune dpo --start start --dpo.beta 0": "dpo.beta = 0.0",
    "tune rl": "start is left out",
    "tune rl --start start": "rl.environment is empty",
    "tune rl --start start --rl.environment tasks.py --rl.group 1": "rl.group = 1",
    "tune rl --start start --rl.environment tasks.py --plan.dp 3": "plan.dp = 3",
    "tune serve nowhere": "'nowhere' is not there",
    "serve": "no model is given",
    "serve nowhere": "'nowhere' is not there",
    "serve start --port 70000": "--port = 70000",
    "serve start --plan.tp 3": "plan.tp = 3",
    "serve start --serve.context-tokens 99999": "serve.context_tokens = 99999",
    "serve start --serve.pages 1": "serve.pages = 1",
    "serve start --serve.quantize int8 --numerics.exact true": "serve.quantize = 'int8'",
    "measure --out taken/run.toml": "--out = 'taken/run.toml' is there already",
    "measure --out /proc/cluster.toml": "--out = '/proc/cluster.toml' cannot be written",
    "measure --model nope": "model.name = 'nope'",
}

# Where somebody asks for torch nothing may come of it; and nothing else may be begun that would.
ALONE = """
import contextlib, io, json, sys
from multiprocessing import forkserver

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise AssertionError("torch is imported")

sys.meta_path.insert(0, NoTorch())
from superstep.cli.main import main

found = {}
for line in json.loads(sys.argv[1]):
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            status = main(line.split())
        except AssertionError as error:
            status = str(error)
    found[line] = [status, said.getvalue()]
assert forkserver._forkserver._forkserver_pid is None
print(json.dumps(found))
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A model, a folder that holds a run, and nothing else."""
    model_folder.write_folder(tmp_path / "start")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "run.toml").write_text('[model]\nname = "tiny"\n', encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_what_is_wrong_is_refused_before_torch_is_imported(place):
    done = subprocess.run([sys.executable, "-c", ALONE, json.dumps(list(WRONG))], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {line: status for line, (status, _) in found.items()} == dict.fromkeys(WRONG, 2), found
    assert [line for line, said in WRONG.items() if said not in found[line][1]] == [], found
    assert sorted(each.name for each in place.iterdir()) == ["start", "taken"]


def test_a_disk_without_room_to_measure_it_is_refused_before_anything_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("superstep.cli.measure.measure.launch_on", None)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=2**26 - 1))
    assert main(["measure", "--quick", "--out", str(tmp_path / "cluster.toml")]) == 2
    assert f"the disk is measured with a file of 64 MiB in '{tmp_path}'" in capsys.readouterr().err


def test_a_disk_without_room_for_the_checkpoints_is_refused_before_text_is_prepared(tmp_path, monkeypatch, capsys):
    runs.make_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    one = 12 * train.read(["run.toml"]).resolved(resolve).outline.numel
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=3 * one))

    def prepared(*_, **__):
        raise ConfigError("prepared")

    monkeypatch.setattr("superstep.cli.train.make_tokens.prepare_with_progress", prepared)
    flags = ["train", "run.toml", "--train.steps", "100", "--state.save-every", "10"]
    assert main([*flags, "--state.keep", "3"]) == 2
    said = capsys.readouterr().err
    assert "state.keep = 3: 4 more checkpoints of" in said
    assert "set state.keep to 2, or name a state.dir with more room" in said
    # As many as fit, and as few as a short run writes, are left to go on.
    for fits in (["--state.keep", "2"], ["--state.keep", "3", "--train.steps", "30"]):
        assert main([*flags, *fits]) == 2
        assert "prepared" in capsys.readouterr().err
