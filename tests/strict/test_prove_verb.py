"""superstep prove --device strict, as a user calls it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from picture_samples import write_pictures
from ragged import write_ragged

pytestmark = pytest.mark.strict

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/howto/emulate-gpus.md"
SMALL = (
    "--model.layers",
    "1",
    "--data.sequence-tokens",
    "64",
    "--train.batch-sequences",
    "8",
    "--plan.microbatch",
    "4",
)


def plant(folder, call, function):
    """The recipe's own model, with a call in the place of its block's feed-forward, and the called function."""
    source = (ROOT / "recipes/own_model.py").read_text(encoding="utf-8")
    planted = source.replace("self.mlp(self.norm_2(h_BSD))", call)
    assert planted != source
    model = folder / "own_model.py"
    first, rest = planted.split("\n\n\n", 1)
    model.write_text(f"{first}\n\n{function}\n\n{rest}", encoding="utf-8")
    return model


def prove(*argv):
    command = [sys.executable, "-m", "superstep", "prove", *map(str, argv)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=ROOT)


def test_a_layout_is_proven_and_the_order_of_a_step_is_written(text, tmp_path):
    out = tmp_path / "order.json"
    done = prove("recipes/own_model.toml", *SMALL, *text, "--device", "strict:2x1GiB", "--out", out)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "On 2 emulated GPUs with 1 GiB" in done.stdout
    assert re.search(r"races +none in \d{1,3},\d{3} kernels", done.stdout)
    assert re.search(r"peak +\d+\.?\d* MiB in a step", done.stdout)
    events = json.loads(out.read_text(encoding="utf-8"))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in slices} == {0, 1}
    names = {event["name"] for event in slices}
    assert any("all_gather_single" in name for name in names)
    assert any(name.startswith("addmm") for name in names)
    assert any("own_model.py:" in event["args"]["line"] for event in slices)


@pytest.mark.parametrize("name", ["sounds", "words"])
def test_ragged_samples_are_proven_without_races(tmp_path, name):
    file = write_ragged(tmp_path, name)
    done = prove(tmp_path / "run.toml", "--model.source", file, "--data.source", file, "--device", "strict")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "samples or paddings begin within a row" in done.stdout
    assert re.search(r"races +none in \d{1,3},\d{3} kernels", done.stdout)


@pytest.mark.parametrize(
    "layout",
    [
        ("--plan.dp", "2", "--plan.zero", "3"),
        ("--plan.dp", "1", "--plan.pp", "2"),
        ("--plan.dp", "1", "--plan.pp", "2", "--plan.encoder", "bubbles"),
    ],
)
def test_pictures_in_text_are_proven_without_races(tmp_path, layout):
    file = write_pictures(tmp_path, deepstack=(0,))
    layout = (*layout, *(() if "--plan.zero" in layout else ("--plan.zero", "0")))
    done = prove(tmp_path / "run.toml", "--model.source", file, "--data.source", file, "--device", "strict", *layout)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert re.search(r"races +none in \d{1,3},\d{3} kernels", done.stdout)


@pytest.mark.parametrize("recipe", ["recipes/own_model.toml", "recipes/dp_zero3.toml"])
def test_a_plan_that_is_too_large_for_its_gpus_is_refused_before_it_runs(recipe, text):
    done = prove(recipe, *SMALL, *text, "--device", "strict:2x1MiB")
    assert done.returncode == 2, done.stdout[-2000:] + done.stderr[-2000:]
    line = r"superstep: plan: pipeline rank 0 needs .* \(.*\), a rank has 1 MiB, and its .* do not fit; .*"
    assert re.fullmatch(rf"{line}, or emulate GPUs of at least \d+MiB\.\n", done.stderr), done.stderr
    assert not done.stdout


def test_the_race_of_the_page_is_found_in_a_model_of_ones_own(text, tmp_path):
    function = re.search(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)[1]
    model = plant(tmp_path, "self.mlp(norm_beside(self.norm_2, h_BSD))", function)
    done = prove("recipes/own_model.toml", "--model.source", model, *SMALL, *text, "--device", "strict")
    assert done.returncode == 1, done.stdout[-2000:] + done.stderr[-2000:]
    line = max(n for n, line in enumerate(model.read_text().splitlines(), 1) if line == "        return norm(h_BSD)")
    assert re.search(
        rf"\d+x all_gather_single .* reads bytes that \S+ \({model}:{line} .* writes, and no event", done.stdout
    )
    assert "RACES" in done.stdout.splitlines()[-1]


def test_a_race_is_named_too_where_the_run_then_fails(text, tmp_path):
    beside = """
def fails(h_BSD):
    if h_BSD.is_cuda:
        doubled, side = h_BSD * 2, torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            doubled.sum()
        del doubled
        raise ArithmeticError("the model fails")
    return 0.0
"""
    model = plant(tmp_path, "self.mlp(self.norm_2(h_BSD)) + fails(h_BSD)", beside)
    done = prove("recipes/own_model.toml", "--model.source", model, *SMALL, *text, "--device", "strict")
    assert done.returncode == 1
    assert re.match(r"superstep: fault: rank [01]: ArithmeticError: the model fails\n", done.stderr), done.stderr
    lines = model.read_text().splitlines()
    freed, used = (
        next(n for n, line in enumerate(lines, 1) if text in line) for text in ("del doubled", "doubled.sum")
    )
    race = rf"1x memory is freed \({model}:{freed} .* while sum\S* \({model}:{used} .*\) reads it"
    assert re.search(rf"\nRACES before this:\n +{race}", done.stderr), done.stderr


def test_use_of_another_ranks_gpu_is_named_with_its_line(text, tmp_path):
    beside = """
import threading


def in_a_thread(h_BSD):
    if h_BSD.is_cuda:
        thread = threading.Thread(target=lambda: torch.ones(1, device="cuda"))
        thread.start()
        thread.join()
    return 0.0
"""
    model = plant(tmp_path, "self.mlp(self.norm_2(h_BSD)) + in_a_thread(h_BSD)", beside)
    done = prove("recipes/own_model.toml", "--model.source", model, *SMALL, *text, "--device", "strict")
    assert done.returncode == 1, done.stdout[-2000:] + done.stderr[-2000:]
    line = next(n for n, line in enumerate(model.read_text().splitlines(), 1) if "target=lambda" in line)
    assert f"rank 1 also uses cuda:0, first in {model}:{line}; its own GPU is cuda:1" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("NO RACE, BUT A RANK USES ANOTHER RANK'S GPU")


def test_a_collective_that_differs_between_ranks_is_named_in_one_line(text, tmp_path):
    source = (ROOT / "recipes/own_model.py").read_text(encoding="utf-8")
    block = "        h_BSD = h_BSD + self.dropout(self.mlp(self.norm_2(h_BSD)))\n"
    assert block in source
    call = "torch.distributed.all_reduce(h_BSD.new_ones(4 + h_BSD.device.index))"
    model = tmp_path / "own_model.py"
    model.write_text(source.replace(block, f"        if h_BSD.is_cuda:\n            {call}\n{block}"), encoding="utf-8")
    done = prove("recipes/own_model.toml", "--model.source", model, *SMALL, *text, "--device", "strict")
    assert done.returncode == 1
    line = next(n for n, line in enumerate(model.read_text().splitlines(), 1) if call in line)
    calls = [rf"rank {rank} all_reduce of sum of {4 + rank} float32 \({model}:{line} <.*\)" for rank in (0, 1)]
    either = rf"{calls[0]}, {calls[1]}|{calls[1]}, {calls[0]}"
    fault = rf"superstep: fault: rank [01]: members of communicator \S+ call differently: ({either})\n"
    assert re.fullmatch(fault, done.stderr), done.stderr
