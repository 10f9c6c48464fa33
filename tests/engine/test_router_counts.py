"""What a run reports of its routers: every token of every rank once, and of training alone."""

from dataclasses import replace
from datetime import timedelta

import pytest

import runs
import small
from longer import many_ranks
from superstep.cli.main import main
from superstep.comm.device import Device
from superstep.comm.mesh import build_mesh
from superstep.engine.engine import Engine
from superstep.engine.values.microbatch import microbatches, rows
from superstep.model.axes import units
from superstep.plan.resolution.resolve import resolve
from superstep.run.reports.plan_line import plan_text

LAYOUTS = {
    1: [{"microbatch": 2, "recompute": "full"}],
    2: [{"dp": 2, "ep": 2}, {"pp": 2, "schedule": "zb-h1"}, {"tp": 2, "ep": 2, "sequence_parallel": False}],
    4: [{"cp": 2, "dp": 2, "ep": 4, "zero": 3}, {"pp": 2, "tp": 2, "recompute": "full"}],
}
EXPERTS = ["--model.experts", "4", "--model.router", "switch", "--observe.log-every", "2", "--state.save-every", "3"]


def run_of(router="switch", **plan):
    config = small.config(layers=2, **plan)
    return resolve(replace(config, model=replace(config.model, experts=4, router=router, ffn=24)))


def _routed(rank, world, run):
    """Two steps with a validation between them, then one step: what was reported of each stretch."""
    mesh = build_mesh(run.plan, rank, Device("cpu"), timeout=timedelta(seconds=60))
    engine = Engine(run, units(run.shape), mesh)
    found = []
    for number, batch in enumerate(small.batches(steps=3)):
        mine = rows(run.plan, mesh)
        parts = microbatches(batch.tokens_BS[mine], batch.targets_BS[mine], run.plan, mesh)
        engine.train_step(parts, valid_tokens=batch.valid_tokens, lr=1e-3)
        engine.evaluate(parts)
        if number > 0:
            found.append(engine.routers.take())
    mesh.destroy()
    return found


@pytest.mark.multiproc
@pytest.mark.parametrize("world", many_ranks(LAYOUTS))
def test_every_layout_reports_what_one_rank_does(pool, world):
    expected = pool.run(1, _routed, run_of())[0]
    assert [r.steps for r in expected] == [2, 1]
    assert [sum(row) for row in expected[0].chosen] == [2 * small.SEQUENCES * small.TOKENS] * 2
    assert all(len(set(row)) > 1 for row in expected[0].chosen)
    assert sum(map(sum, expected[0].dropped)) > 0
    for plan in LAYOUTS[world]:
        for found in pool.run(world, _routed, run_of(**plan)):
            for ours, one in zip(found, expected, strict=True):
                assert (ours.steps, ours.chosen, ours.dropped) == (one.steps, one.chosen, one.dropped), plan
                assert ours.balance == pytest.approx(one.balance, rel=1e-4), plan
                assert ours.z == pytest.approx(one.z, rel=1e-4), plan


@pytest.fixture
def place(tmp_path, monkeypatch):
    runs.make_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _reports(folder):
    return [(line["step"], line["steps"], sum(map(sum, line["chosen"]))) for line in runs.events(folder, "router")]


def test_a_run_reports_every_few_steps_and_with_each_checkpoint(place):
    assert main(["train", "run.toml", *EXPERTS]) == 0
    tokens = 2 * 4 * 32  # of two layers, in each step
    assert _reports(place / "run") == [(2, 2, 2 * tokens), (3, 1, tokens), (4, 1, tokens), (6, 2, 2 * tokens)]
    straight = runs.events(place / "run", "router")
    stopped = ["train", "run.toml", *EXPERTS, "--state.dir", "again"]
    assert main([*stopped, "--train.steps", "3", "--train.decay", "wsd", "--train.decay-steps", "1"]) == 0
    assert main([*stopped, "--state.existing", "resume"]) == 0
    assert _reports(place / "again") == _reports(place / "run")
    assert runs.events(place / "again", "router")[0] == straight[0]


def test_a_dense_run_reports_no_routers(place):
    assert main(["train", "run.toml"]) == 0
    assert runs.events(place / "run", "router") == []


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        ({"dp": 2, "ep": 2, "microbatch": 2}, "dp=2 ep=2 zero=0 m=2x2 fp32"),
        ({"dp": 1, "cp": 2, "microbatch": 4}, "cp=2 ring zero=0 m=2x4 fp32"),
        ({"dp": 4, "replicas": 2, "zero": 3, "microbatch": 2}, "dp=4 replicas=2 zero=3 m=1x2 fp32"),
        ({"pp": 2, "dp": 1, "microbatch": 2}, "pp=2 1f1b m=4x2 fp32"),
        ({"dp": 1, "microbatch": 8}, "1 rank m=1x8 fp32"),
    ],
)
def test_the_banner_names_every_axis(plan, text):
    assert plan_text(run_of(**plan)) == text
