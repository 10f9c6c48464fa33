"""The pass of docs/howto/add-a-pass.md on emulated GPUs: right as the page has it, and a race where it loses a wait."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from test_prove_verb import SMALL

import small
from strict_ranks import SETTINGS, gpu_of
from superstep.comm.mesh import build_mesh
from superstep.engine.engine import Engine
from superstep.engine.flat import rank_state
from superstep.engine.values.microbatch import microbatches_of, rows
from superstep.model.axes import units
from superstep.plan.resolution.resolve import resolve
from superstep.program.check import check
from superstep.program.compile import compile_step
from superstep.program.instructions import Settle
from superstep.train.proof.prove_tolerance import TIMEOUT

pytestmark = pytest.mark.strict

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/howto/add-a-pass.md"
CONFIG = small.config(layers=2, microbatch=2, dp=2, zero=3)


def code_of_the_page():
    """Its function."""
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[0]


def resident(program):
    """The page's own function, of embedding and head."""
    names = {}
    exec(code_of_the_page(), names)
    return check(names["add_resident"](program, frozenset({0, 3})))


def without_settling(program):
    """The same, with the waits for sums of gradients left out; the checks of a program would name it."""
    ranks = tuple(tuple(i for i in rank if not isinstance(i, Settle)) for rank in resident(program).ranks)
    return replace(program, ranks=ranks)


PASSES = {"none": lambda program: program, "resident": resident, "without settling": without_settling}


def train(rank, world, name):
    run = resolve(CONFIG)
    (batch,) = small.batches(steps=1)
    settings = replace(SETTINGS, raises=False)
    with pytest.MonkeyPatch.context() as patch, gpu_of(rank, world, settings) as (device, report):
        patch.setattr(rank_state, "compile_step", lambda plan: PASSES[name](compile_step(plan)))
        mesh = build_mesh(run.plan, rank, device, timeout=TIMEOUT)
        engine = Engine(run, units(run.shape), mesh)
        mine = microbatches_of(batch.rows(rows(run.plan, mesh)), run.plan, mesh)
        losses = [engine.train_step(mine, valid_tokens=batch.valid_tokens, lr=1e-3).loss for _ in range(2)]
        observed = report()
        mesh.destroy()
    return losses, observed.races


def test_a_pass_of_ones_own_is_run_and_its_race_is_named(pool):
    found = {name: pool.run(2, train, name)[0] for name in PASSES}
    assert found["none"][1] == found["resident"][1] == {}
    assert found["resident"][0] == found["none"][0]
    races = found["without settling"][1]
    assert races
    assert any("reduce_scatter" in race for race in races)


HASTY = """
from superstep.program.instructions import Settle


def add_resident_in_haste(program: Program, units: frozenset[int]) -> Program:
    made = add_resident(program, units)
    ranks = tuple(tuple(i for i in rank if not (isinstance(i, Settle) and i.unit in units)) for rank in made.ranks)
    return replace(made, ranks=ranks)
"""
"""Behind the page's function: a pass that also leaves out the waits for gradients of its units."""


def test_a_race_of_a_pass_is_named_by_the_command_of_the_page(text, tmp_path):
    """In a copy of the package, to which the pass is added as the page says, but behind the last check. Each rank has
    two microbatches.
    """
    source = tmp_path / "src"
    shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("*.pyc"))  # libraries stay
    (source / "superstep/program/resident.py").write_text(code_of_the_page() + HASTY, encoding="utf-8")
    compiler = source / "superstep/program/compile.py"
    before = compiler.read_text(encoding="utf-8")
    last = "return check_first_uses(check(add_step(program)), routes(plan.placement, plan.encoders))\n"
    assert before.count(last) == 1
    added = "return add_resident_in_haste(check(add_step(program)), frozenset({0, len(program.units) - 1}))\n"
    line = "from superstep.program.schedule import"
    imported = f"from superstep.program.resident import add_resident_in_haste\n{line}"
    compiler.write_text(before.replace(last, added).replace(line, imported), encoding="utf-8")
    (command,) = re.findall(r"^superstep (prove .*--device strict)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    done = subprocess.run(
        [sys.executable, "-m", "superstep", *command.split(), *SMALL[:-1], "2", *text],
        env=os.environ | {"PYTHONPATH": str(source)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stdout.splitlines()[-1].startswith("RACES"), done.stdout
    assert re.search(r"\d+x .* bytes that reduce_scatter_single \(superstep/comm/collectives.py:\d+", done.stdout)
