"""Tables with sparse gradients: only the rows that a step touches are reduced and updated, on every layout."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from gathered_weights import gather_weights
from longer import many_ranks
from sparse_tables import BATCH, ITEMS, USERS, batches, config_of, recommender, run_of
from superstep.comm.device import Device
from superstep.comm.mesh import build_mesh
from superstep.engine.engine import Engine
from superstep.engine.flat import touched_rows
from superstep.engine.values.microbatch import example_of, microbatches_of, rows
from superstep.errors import ConfigError
from superstep.launch.ranks import World
from superstep.model.custom.inspect import outline_of
from superstep.model.custom.units_from_modules import as_units
from superstep.plan.resolution.resolve import resolve
from superstep.program.check import check
from superstep.program.compile import compile_step
from superstep.program.instructions import Reduce
from superstep.program.issue_order import InvalidProgram
from superstep.program.text import describe, read_program, write_program
from superstep.train.proof.prove_tolerance import prove, write_reference


class Halves(nn.Module):
    """Two tables of one width, whose rows are shortened."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(USERS, 10, sparse=True), nn.Embedding(ITEMS, 10, sparse=True)

    def forward(self, bought: Tensor) -> Tensor:
        return self.users(bought[:, 0]) * 9 + self.items(bought[:, 1:]).mean(1)


LAYOUTS = {
    1: [{}, {"microbatch": 2, "recompute": "full"}],
    2: [
        {"dp": 2, "zero": 0, "microbatch": 2},
        {"dp": 2, "zero": 1},
        {"dp": 2, "zero": 2, "microbatch": 2},
        {"dp": 2, "zero": 3, "microbatch": 2},
        {"pp": 2, "microbatch": 2, "schedule": "zb-h1"},
    ],
    4: [
        {"dp": 4, "zero": 2, "replicas": 2},
        {"dp": 4, "zero": 1, "microbatch": 2},
        {"dp": 2, "pp": 2, "zero": 3, "microbatch": 2},
    ],
}


def _prove_all(rank, world, runs, folder):
    torch.set_num_threads(1)
    here = World(rank, world, Device("cpu"))
    return [prove(here, run, batches(), Path(folder), reruns=False, specs=recommender()) for run in runs]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sparse")
    write_reference(recommender(), config_of().train, batches(), folder)
    return str(folder)


@pytest.mark.multiproc
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_reduced_rows_are_divided_by_the_loss_scale(pool, reference, zero):
    run = run_of(dp=2, zero=zero, microbatch=2)
    run = replace(run, config=replace(run.config, numerics=replace(run.config.numerics, compute="fp16")))
    for (verdict,) in pool.run(2, _prove_all, [run], reference, timeout_s=60):
        assert verdict.first is None, verdict.first.describe()


@pytest.mark.multiproc
@pytest.mark.parametrize("world", many_ranks(LAYOUTS))
def test_every_layout_computes_what_one_process_does(pool, reference, world):
    runs = [run_of(**plan) for plan in LAYOUTS[world]]
    for run, verdict in zip(runs, pool.run(world, _prove_all, runs, reference, timeout_s=240)[0], strict=True):
        assert verdict.is_proven, (run.config.plan, verdict.first and verdict.first.describe())
        assert verdict.compared > 0


def halves():
    torch.manual_seed(3)
    return as_units([Halves(), nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 4)])


def _prove_shortened(rank, world, run, folder):
    torch.set_num_threads(1)
    return prove(World(rank, world, Device("cpu")), run, batches(), Path(folder), reruns=False, specs=halves())


@pytest.mark.multiproc
@pytest.mark.parametrize("zero", [0, 2])
def test_rows_are_shortened_after_they_are_summed_over_ranks(pool, tmp_path, zero):
    config = config_of(train={"clip_row_norm": 0.02}, dp=2, zero=zero, microbatch=2)
    write_reference(halves(), config.train, batches(), tmp_path)
    run = resolve(config, outline=outline_of(halves(), "the tables"))
    verdict = pool.run(2, _prove_shortened, run, str(tmp_path))[0]
    assert verdict.is_proven, verdict.first and verdict.first.describe()
    other = replace(run, config=replace(config, train=replace(config.train, clip_row_norm=0.001)))
    first = pool.run(2, _prove_shortened, other, str(tmp_path))[0].first
    assert first.name in ("0.users.weight", "0.items.weight")


def _train(rank, world, run):
    """The weights after two steps, whole, and the numbers of the tables that each rank has summed over ranks."""
    torch.set_num_threads(1)
    mesh = build_mesh(run.plan, rank, Device("cpu"), timeout=timedelta(seconds=60))
    summed, right = [], touched_rows.all_reduce

    def all_reduce(x, group):
        summed.append(x.numel())
        return right(x, group)

    try:
        engine = Engine(run, recommender(), mesh, example=example_of(batches()[0]))
        with mock.patch.object(touched_rows, "all_reduce", all_reduce):
            for batch in batches():
                mine = microbatches_of(batch.rows(rows(run.plan, mesh)), run.plan, mesh)
                engine.train_step(mine, valid_tokens=batch.valid_tokens, lr=0.5)
        whole = gather_weights(engine)
    finally:
        mesh.destroy()
    return whole, summed


@pytest.fixture(scope="module")
def bits(pool):
    return pool.run(1, _train, run_of(exact=True, microbatch=2))[0][0]


@pytest.mark.multiproc
@pytest.mark.parametrize("world", many_ranks(LAYOUTS))
def test_every_layout_has_the_same_bits(pool, bits, world):
    for plan in LAYOUTS[world]:
        weights, _ = pool.run(world, _train, run_of(exact=True, **{**plan, "microbatch": 2}))[0]
        assert {name for name in bits if weights[name] != bits[name]} == set(), plan


@pytest.mark.multiproc
def test_only_touched_rows_are_summed_and_changed(pool, bits):
    touched = [batch.input for batch in batches()]
    users = {int(user) for bought in touched for user in bought[:, 0]}
    width = 4  # divides 12 and 8
    pieces = [3 * len(bought[:, 0].unique()) + 2 * len(bought[:, 1:].unique()) for bought in touched]
    _, summed = pool.run(2, _train, run_of(exact=True, dp=2, microbatch=2))[0]
    assert summed == [width * each for each in pieces]
    assert sum(summed) < USERS * 12
    start = recommender()[0].params["users.weight"].values
    changed = (torch.tensor(bits["0.users.weight"]).view(USERS, 12) != start).any(1).nonzero().view(-1)
    assert set(changed.tolist()) == users


def _prove_without_a_row(rank, world, run, folder):
    """A rank that forgets one of the touched rows as it reduces."""
    right = touched_rows.TouchedRows.cut

    def cut(self, shard, start):
        packed = right(self, shard, start)
        return replace(packed, rows=packed.rows[1:], values=packed.values[1:])

    with mock.patch.object(touched_rows.TouchedRows, "cut", cut):
        return _prove_all(rank, world, [run], folder)[0].first


@pytest.mark.multiproc
def test_a_touched_row_that_is_left_out_of_the_reduction_is_named(pool, reference):
    first = pool.run(2, _prove_without_a_row, run_of(dp=2, microbatch=2), reference)[0]
    assert first.name == "0.users.weight"


def test_the_program_reduces_rows_and_its_text_round_trips():
    program = compile_step(run_of(dp=2, zero=1).plan)
    assert [describe(i) for i in program.ranks[0] if "reduce" in describe(i)] == [
        "reduce u3", "reduce u2", "reduce u1", "reduce-rows u0",
    ]  # fmt: skip
    text = write_program(program)
    assert "unit 0 0 reads 0 stage 0 sparse\n" in text
    assert read_program(text) == program


def test_a_reduction_of_whole_tables_is_refused():
    text = write_program(compile_step(run_of(dp=2).plan))
    with pytest.raises(InvalidProgram, match="reduced by reduce-rows, and nothing else is"):
        check(read_program(text.replace("reduce-rows u0", "reduce u0")))
    with pytest.raises(InvalidProgram, match="reduced by reduce-rows, and nothing else is"):
        check(read_program(text.replace("reduce u1", "reduce-rows u1")))
    assert any(isinstance(i, Reduce) for i in compile_step(run_of(dp=2).plan).ranks[0])


REFUSED = [
    ({"optimizer": "adamw"}, "train.optimizer = 'adamw' changes rows that a step does not touch, and '0.users.weight'"),
    ({"optimizer": "lion"}, "train.optimizer = 'lion' changes rows that a step does not touch"),
    ({"weight_decay": 0.1}, "train.weight_decay = 0.1 shrinks rows that a step does not touch"),
    ({"clip_row_norm": 1.0}, "train.clip_row_norm = 1.0 with tables of 2 widths in one unit is not supported"),
    ({"clip_row_norm": 0.0}, "train.clip_row_norm = 0.0 must be above 0"),
]


@pytest.mark.parametrize(("train", "message"), REFUSED)
def test_an_update_of_rows_without_a_gradient_is_refused(train, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        run_of(train=train)


def test_rows_are_shortened_in_sparse_tables_alone():
    dense = as_units([nn.Linear(4, 4)])
    with pytest.raises(ConfigError, match=r"train\.clip_row_norm = 1\.0 is for tables with sparse gradients"):
        resolve(config_of(train={"clip_row_norm": 1.0}), outline=outline_of(dense, "the layer"))


class Tied(nn.Module):
    """A table that is looked up, and multiplied whole."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(ITEMS, 8, sparse=True)

    def forward(self, bought: Tensor) -> Tensor:
        return self.items(bought[:, 0]) @ self.items.weight.t()


def test_a_table_that_is_used_otherwise_than_by_lookup_is_refused():
    torch.manual_seed(3)
    specs = as_units([Tied()])
    run = resolve(config_of(), outline=outline_of(specs, "the table"))
    mesh = build_mesh(run.plan, 0, Device("cpu"), timeout=timedelta(seconds=60))
    batch = batches()[0]
    engine = Engine(run, specs, mesh, example=example_of(batch))
    with pytest.raises(RuntimeError, match=r"0\.items\.weight is a table with a sparse gradient.*gradient is dense"):
        engine.train_step(microbatches_of(batch, run.plan, mesh), valid_tokens=BATCH, lr=0.1)
