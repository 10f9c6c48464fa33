"""The pass of docs/howto/add-a-pass.md on emulated GPUs: right as the page has it, and a race where it loses a wait."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

import small
from strict_ranks import SETTINGS, gpu_of
from superstep.comm.mesh import build_mesh
from superstep.engine.engine import Engine
from superstep.engine.flat import rank_state
from superstep.engine.microbatch import microbatches_of, rows
from superstep.model.axes import units
from superstep.plan.resolution.resolve import resolve
from superstep.program.check import check
from superstep.program.compile import compile_step
from superstep.program.instructions import Settle
from superstep.train.proof.prove_tolerance import TIMEOUT

pytestmark = pytest.mark.strict

PAGE = Path(__file__).parents[2] / "docs/howto/add-a-pass.md"
CONFIG = small.config(layers=2, microbatch=2, dp=2, zero=3)


def resident(program):
    """The page's own function, of embedding and head."""
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[0]
    names = {}
    exec(code, names)
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
