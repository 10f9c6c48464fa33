"""Graphs of units under every layout: several inputs, outputs that several units take, fields of the batch."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from longer import many_ranks
from superstep.comm.device import Device
from superstep.comm.mesh import build_mesh
from superstep.comm.objects import gather
from superstep.data.batch import Batch
from superstep.engine.engine import Engine
from superstep.engine.values.microbatch import example_of, microbatches_of, rows
from superstep.errors import ConfigError
from superstep.launch.ranks import World
from superstep.model.custom.inspect import outline_of, pass_through
from superstep.model.custom.units_from_modules import as_units
from superstep.model.unit import UnitGraph
from superstep.plan.config import NumericsConfig, PlanConfig, RunConfig, TrainConfig
from superstep.plan.resolution.resolve import resolve
from superstep.train.proof.prove_tolerance import prove, write_reference

CLASSES = 5


class Join(nn.Module):
    """A layer of the sum of its inputs, of which the first counts more."""

    def __init__(self, width, outputs):
        super().__init__()
        self.layer = nn.Linear(width, outputs)

    def forward(self, first: Tensor, *others: Tensor) -> Tensor:
        return self.layer(torch.tanh(2.0 * first + sum(others)))


def towers():
    """Two fields, each with a tower; the first tower's end is taken by four units, up to the last."""
    torch.manual_seed(3)
    return as_units(
        [
            nn.Sequential(nn.Flatten(), nn.Linear(48, 12), nn.Tanh()),
            nn.Linear(12, 12),
            nn.Sequential(nn.Embedding(7, 12), nn.Flatten(), nn.Linear(36, 12)),
            Join(12, 12),
            Join(12, 12),
            nn.GELU(),
            Join(12, 12),
            Join(12, CLASSES),
        ],
        inputs={0: ["pixels"], 2: ["words"], 3: [2, 1], 4: [3, 1], 6: [5, 1, 3], 7: [6, 1, 0]},
    )


def field_late():
    """A field that the last unit takes beside the stream."""
    torch.manual_seed(4)
    words = nn.Sequential(nn.Flatten(), nn.Linear(48, 12))
    return as_units([words, nn.Tanh(), Join(12, 12), Beside(12, CLASSES)], inputs={2: [1, 0], 3: [2, "words"]})


class Beside(nn.Module):
    def __init__(self, width, outputs):
        super().__init__()
        self.table, self.layer = nn.Embedding(7, width), nn.Linear(width, outputs)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        return self.layer(x + self.table(words).mean(1))


MODELS = {"towers": towers, "field late": field_late}


def batches():
    generator = torch.Generator().manual_seed(5)

    def batch():
        fields = {
            "pixels": torch.randn(8, 3, 4, 4, generator=generator),
            "words": torch.randint(7, (8, 3), generator=generator),
        }
        return Batch(fields, torch.randint(CLASSES, (8,), generator=generator), 8, reads="pixels")

    return batch(), batch()


def run_of(name, **plan):
    return resolve(
        RunConfig(
            train=TrainConfig(batch_sequences=8, warmup_steps=1, steps=10, lr=1e-3),
            plan=PlanConfig(**plan),
            numerics=NumericsConfig(compute="fp32"),
        ),
        outline=outline_of(MODELS[name](), name),
    )


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    folders = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for name, specs in MODELS.items():
        folders[name] = tmp_path_factory.mktemp(name.replace(" ", "-"))
        write_reference(specs(), run_of(name).config.train, batches(), folders[name])
    torch.set_num_threads(threads)
    return folders


def _prove_all(rank, world, cases):
    torch.set_num_threads(1)
    return [
        prove(World(rank, world, Device("cpu")), run, batches(), Path(folder), reruns=number == 0, specs=MODELS[name]())
        for number, (name, run, folder) in enumerate(cases)
    ]


LAYOUTS = {
    1: [{}, {"microbatch": 2, "recompute": "full"}, {"microbatch": 2, "recompute": "selective"}],
    2: [
        {"dp": 2, "zero": 1, "recompute": "full"},
        {"dp": 2, "zero": 3, "microbatch": 2},
        {"pp": 2, "microbatch": 2},
        {"pp": 2, "microbatch": 2, "schedule": "gpipe", "recompute": "full"},
        {"pp": 2, "microbatch": 2, "schedule": "zb-h1"},
    ],
    4: [
        {"dp": 2, "pp": 2, "zero": 2, "microbatch": 2},
        {"dp": 2, "pp": 2, "zero": 3, "microbatch": 1, "schedule": "zb-h1"},
    ],
}


@pytest.mark.multiproc
@pytest.mark.parametrize("world", many_ranks(LAYOUTS))
def test_every_layout_computes_what_one_process_does(pool, references, world):
    layouts = [(name, plan) for plan in LAYOUTS[world] for name in MODELS]
    cases = [(name, run_of(name, **plan), str(references[name])) for name, plan in layouts]
    for (name, run, _), verdict in zip(cases, pool.run(world, _prove_all, cases, timeout_s=240)[0], strict=True):
        assert verdict.is_proven, (name, run.config.plan, verdict.first and verdict.first.describe())
        assert verdict.compared > 0


def _weights(rank, world, run, name):
    """The weights after two steps, as one rank has them all."""
    torch.set_num_threads(1)
    mesh = build_mesh(run.plan, rank, Device("cpu"), timeout=timedelta(seconds=60))
    try:
        engine = Engine(run, MODELS[name](), mesh, example=example_of(batches()[0]))
        for batch in batches():
            mine = batch.rows(rows(run.plan, mesh))
            engine.train_step(microbatches_of(mine, run.plan, mesh), valid_tokens=batch.valid_tokens, lr=1e-2)
        weights = {piece.name: piece.values.tolist() for piece in engine.pieces(("weight",))}
        every = gather(weights, dict[str, list[float]])
    finally:
        mesh.destroy()
    return {name: values for part in every for name, values in part.items()}


@pytest.mark.multiproc
def test_gradients_of_shared_outputs_have_the_same_bits_on_every_pipeline(pool):
    """Four units take one output: their gradients are added in one order, on one rank and on three."""
    alone = pool.run(1, _weights, run_of("towers", microbatch=2), "towers", timeout_s=60)[0]
    for plan in ({"pp": 3, "stages": (2, 3, 3)}, {"pp": 3, "stages": (3, 2, 3), "schedule": "zb-h1"}):
        cut = pool.run(3, _weights, run_of("towers", microbatch=2, **plan), "towers", timeout_s=60)[0]
        assert cut == alone


def test_a_graph_on_one_device_is_what_one_would_write():
    specs = towers()
    model = UnitGraph(specs, seed=0)
    batch = batches()[0]
    stem, flat, words, a, b, gelu, c, last = model.units
    x = stem(batch.fields["pixels"])
    kept = flat(x)
    first = a(words(batch.fields["words"]), kept)
    then = gelu(b(first, kept))
    expected = last(c(then, kept, first), kept, x)
    assert torch.equal(model(batch.fields), expected)


def _with_inputs(**inputs):
    return [replace(spec, inputs=inputs.get(f"u{spec.name}", spec.inputs)) for spec in towers()]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"u3": ("4", "1")}, "unit '3' takes the output of '4', which does not come before it; list '4' first."),
        ({"u3": ("3",)}, "unit '3' takes the output of '3', which does not come before it"),
        ({"u3": ("2", "2")}, "unit '3' takes '2' twice; name it once"),
        ({"u3": ("1",)}, "no unit takes the output of '2', so that it would learn nothing"),
    ],
)
def test_edges_that_are_no_graph_are_refused(inputs, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        outline_of(_with_inputs(**inputs), "the towers")


def test_a_field_that_nobody_gives_is_refused_with_those_that_there_are():
    example = {name: values[:1] for name, values in batches()[0].fields.items()}
    with pytest.raises(ConfigError, match=r"unit '0' takes 'pixel', which is neither a unit nor a field of the batch"):
        pass_through(_with_inputs(u0=("pixel",)), example, torch.float32, "the towers")


def test_inputs_are_names_in_a_tuple():
    with pytest.raises(ConfigError, match=re.escape("unit '3' has inputs = '1'; give a tuple of names.")):
        outline_of(_with_inputs(u3="1"), "the towers")


def test_a_unit_with_the_name_of_a_field_is_refused():
    specs = [replace(spec, name={"5": "words"}.get(spec.name, spec.name)) for spec in towers()]
    specs[6] = replace(specs[6], inputs=("words", "1", "3"))
    example = {name: values[:1] for name, values in batches()[0].fields.items()}
    with pytest.raises(ConfigError, match="'words' is a unit and a field of the batch"):
        pass_through(specs, example, torch.float32, "the towers")


class Deaf(Join):
    """Takes a second input and does not use it."""

    def forward(self, first: Tensor, *others: Tensor) -> Tensor:
        return super().forward(first)


def test_an_input_without_influence_is_refused_by_its_name():
    specs = as_units([nn.Linear(4, 4), nn.Linear(4, 4), Deaf(4, 4)], inputs={2: [1, 0]})
    with pytest.raises(ConfigError, match=r"unit '2' gives an output that carries no gradient of its input '0'"):
        pass_through(specs, torch.empty(1, 4), torch.float32, "the units")


def test_ranks_with_several_stages_are_refused_where_a_value_would_come_back():
    with pytest.raises(ConfigError, match=r"would come to pipeline rank 0 twice.*set plan\.schedule to '1f1b'"):
        run_of("towers", pp=2, chunks=2, microbatch=2, schedule="interleaved")
