"""Batch norm over groups of samples: torch's where the group is the batch, and the same on every layout."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from gathered_weights import gather_weights
from longer import many_ranks
from superstep.comm.device import Device
from superstep.comm.mesh import build_mesh
from superstep.data.batch import Batch
from superstep.engine.engine import Engine
from superstep.engine.values.microbatch import example_of, microbatches_of, rows
from superstep.errors import ConfigError
from superstep.launch.ranks import World
from superstep.model.by_place.batch_norm import BatchNorm
from superstep.model.custom.inspect import outline_of
from superstep.model.custom.sample_groups import list_groups, require_whole_groups
from superstep.model.custom.units_from_modules import as_units
from superstep.model.custom.user_model import load_units
from superstep.model.unit import UnitGraph
from superstep.numerics.noise import SamplePlace
from superstep.plan.config import ModelConfig, NumericsConfig, PlanConfig, RunConfig, TrainConfig
from superstep.plan.resolution.check_ranges import check_ranges
from superstep.plan.resolution.resolve import resolve
from superstep.train.proof.prove_tolerance import prove, write_reference

CLASSES = 5
BATCH = 16
GROUP = 4


def convolutions(group):
    torch.manual_seed(3)
    return as_units(
        [
            nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False), BatchNorm(4, group), nn.ReLU()),
            nn.Sequential(nn.Conv2d(4, 6, 3, 2, 1, bias=False), BatchNorm(6, group, momentum=0.3), nn.ReLU()),
            nn.Sequential(nn.Flatten(), nn.Linear(96, 9, bias=False), BatchNorm(9, group), nn.Tanh()),
            nn.Linear(9, CLASSES),
        ]
    )


def batches(count=2):
    generator = torch.Generator().manual_seed(5)
    return tuple(
        Batch(
            {"pixels": torch.randn(BATCH, 3, 8, 8, generator=generator) + step},
            torch.randint(CLASSES, (BATCH,), generator=generator),
            BATCH,
            reads="pixels",
        )
        for step in range(count)
    )


def run_of(group=GROUP, compute="fp32", *, exact=False, **plan):
    return resolve(
        RunConfig(
            train=TrainConfig(batch_sequences=BATCH, warmup_steps=1, steps=10, lr=1e-3),
            plan=PlanConfig(**plan),
            numerics=NumericsConfig(compute=compute, exact=exact),
        ),
        outline=outline_of(convolutions(group), "the convolutions"),
    )


def test_a_group_that_is_the_batch_is_torchs_batch_norm():
    """Outputs, gradients and running statistics, over three steps."""
    torch.manual_seed(0)
    ours, theirs = BatchNorm(4, 6, momentum=0.2), nn.BatchNorm2d(4, momentum=0.2)
    for step in range(3):
        x = torch.randn(6, 4, 5, 5) * (step + 1) + step
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        ours.zero_grad()
        theirs.zero_grad()
        out, expected = ours(a, SamplePlace(samples=6, is_training=True)), theirs(b)
        torch.testing.assert_close(out, expected)
        weights = torch.randn_like(out)
        (out * weights).sum().backward()
        (expected * weights).sum().backward()
        torch.testing.assert_close(a.grad, b.grad)
        torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)
        with torch.no_grad():
            ours.running_mean += ours.running_mean.grad
            ours.running_var += ours.running_var.grad
        torch.testing.assert_close(ours.running_mean.data, theirs.running_mean)
        torch.testing.assert_close(ours.running_var.data, theirs.running_var)
    theirs.eval()
    torch.testing.assert_close(ours(x), theirs(x))


def test_groups_are_merged_in_their_order():
    """Three groups in one step are three steps of torch's, one after the other."""
    ours, theirs = BatchNorm(3, 2), nn.BatchNorm1d(3)
    x = torch.randn(6, 3) * torch.arange(1, 7)[:, None]
    ours(x, SamplePlace(samples=6, is_training=True)).sum().backward()
    for part in x.split(2):
        theirs(part)
    torch.testing.assert_close(ours.running_mean.grad, theirs.running_mean)
    torch.testing.assert_close(ours.running_var.grad + 1, theirs.running_var)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    write_reference(convolutions(GROUP), run_of().config.train, batches(), folder)
    torch.set_num_threads(threads)
    return folder


def _prove_all(rank, world, cases):
    torch.set_num_threads(1)
    specs = convolutions(GROUP)
    return [
        prove(World(rank, world, Device("cpu")), run, batches(), Path(folder), reruns=number == 0, specs=specs)
        for number, (run, folder) in enumerate(cases)
    ]


LAYOUTS = {
    1: [{}, {"microbatch": 4, "recompute": "full"}, {"microbatch": 8, "recompute": "selective"}],
    2: [
        {"dp": 2, "zero": 1},
        {"dp": 2, "zero": 3, "microbatch": 4, "recompute": "full"},
        {"pp": 2, "microbatch": 4},
        {"pp": 2, "microbatch": 4, "schedule": "zb-h1"},
    ],
    4: [{"dp": 2, "pp": 2, "zero": 2, "microbatch": 4}, {"dp": 4, "zero": 3}],
}


@pytest.mark.multiproc
@pytest.mark.parametrize("world", many_ranks(LAYOUTS))
def test_every_layout_computes_what_one_process_does(pool, reference, world):
    cases = [(run_of(**plan), str(reference)) for plan in LAYOUTS[world]]
    for (run, _), verdict in zip(cases, pool.run(world, _prove_all, cases, timeout_s=240)[0], strict=True):
        assert verdict.is_proven, (run.config.plan, verdict.first and verdict.first.describe())
        assert verdict.compared > 0


def _weights(rank, world, run):
    torch.set_num_threads(1)
    mesh = build_mesh(run.plan, rank, Device("cpu"), timeout=timedelta(seconds=60))
    try:
        engine = Engine(run, convolutions(GROUP), mesh, example=example_of(batches()[0]))
        for batch in batches(3):
            mine = batch.rows(rows(run.plan, mesh))
            engine.train_step(microbatches_of(mine, run.plan, mesh), valid_tokens=batch.valid_tokens, lr=1e-2)
        held_out = batches(1)[0].rows(rows(run.plan, mesh))
        loss, _ = engine.evaluate(microbatches_of(held_out, run.plan, mesh))
        whole = gather_weights(engine)
    finally:
        mesh.destroy()
    return whole, loss


@pytest.mark.multiproc
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("plan", [{"dp": 2}, {"dp": 2, "zero": 3, "recompute": "full"}, {"pp": 2}], ids=str)
def test_exact_mode_has_the_same_statistics_on_every_layout(pool, plan, compute):
    alone, loss = pool.run(1, _weights, run_of(exact=True, compute=compute, microbatch=4), timeout_s=60)[0]
    cut, other = pool.run(2, _weights, run_of(exact=True, compute=compute, microbatch=4, **plan), timeout_s=60)[0]
    assert cut == alone
    assert other == loss
    assert alone["0.1.running_mean"] != [0.0] * 4


@pytest.mark.parametrize("group", [3, 4])
def test_a_group_that_no_microbatch_holds_whole_is_refused(group):
    with pytest.raises(ConfigError, match=rf"unit '0' has batch norm over groups of {group} samples.*plan\.microbatch"):
        require_whole_groups(convolutions(group), run_of(microbatch=2), "the file")


@pytest.mark.parametrize("setting", ["plan.cp", "plan.sequence_parallel"])
def test_a_plan_that_cuts_samples_is_refused(setting):
    run = run_of(microbatch=4)
    plan = replace(run.plan, mesh=replace(run.plan.mesh, cp=2) if setting == "plan.cp" else run.plan.mesh)
    plan = replace(plan, sequence_parallel=setting == "plan.sequence_parallel")
    with pytest.raises(ConfigError, match=f"{setting} gives each rank a part of every sample; set {setting} to"):
        require_whole_groups(convolutions(GROUP), replace(run, plan=plan), "the file")


def test_documents_are_no_samples_of_a_group():
    run = run_of(microbatch=4)
    masked = replace(run, config=replace(run.config, data=replace(run.config.data, document_mask=True)))
    with pytest.raises(ConfigError, match=r"set data\.document_mask to false"):
        require_whole_groups(convolutions(GROUP), masked, "the file")


def test_an_engine_refuses_a_cut_group_before_it_computes():
    run = run_of(microbatch=2)
    mesh = build_mesh(run.plan, 0, Device("cpu"), timeout=timedelta(seconds=60))
    with pytest.raises(ConfigError, match=r"plan\.microbatch = 2 does not hold them whole"):
        Engine(run, convolutions(GROUP), mesh, example=example_of(batches()[0]))


def test_a_group_that_is_cut_is_refused_where_it_is_computed():
    norm = BatchNorm(3, 2)
    for rows_, sample in ((3, 0), (2, 1)):
        with pytest.raises(ConfigError, match="give it a group that divides"):
            norm(torch.randn(rows_, 3), SamplePlace(sample=sample, samples=6, is_training=True))


FILE = """
from torch import nn
from superstep.model.by_place.batch_norm import BatchNorm
from superstep.model.custom.units_from_modules import as_units

def units(config):
    return as_units([nn.Linear(4, 4), {norm}, nn.Linear(4, 2)])
"""


def _configured(tmp_path, norm, group):
    path = tmp_path / "own.py"
    path.write_text(FILE.replace("{norm}", norm), encoding="utf-8")
    return RunConfig(model=ModelConfig(source=str(path), norm_group=group))


def test_the_configuration_sets_the_group_of_every_batch_norm(tmp_path):
    for group, wanted in ((None, 8), (2, 2)):
        specs = load_units(_configured(tmp_path, "BatchNorm(4, 8)", group))
        assert [each for _, each in list_groups(specs)] == [wanted]
    with pytest.raises(ConfigError, match=r"plan\.microbatch = 3 does not hold them whole.* or model\.norm_group to a"):
        require_whole_groups(specs, replace(run := run_of(), plan=replace(run.plan, microbatch=3)), "the file")


def test_a_group_without_a_batch_norm_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.norm_group = 2 with model\.source = .*: no unit has a batch norm"):
        load_units(_configured(tmp_path, "nn.ReLU()", 2))
    with pytest.raises(ConfigError, match=r"model\.norm_group = 2 with model\.name = 'demo': the decoder has no batch"):
        resolve(RunConfig(model=ModelConfig(norm_group=2)))
    with pytest.raises(ConfigError, match=r"model\.norm_group = 0 must be at least 1"):
        check_ranges(_configured(tmp_path, "BatchNorm(4, 8)", 0))


def test_torchs_batch_norm_is_refused_with_ours():
    with pytest.raises(ConfigError, match=re.escape("superstep.model.by_place.batch_norm.BatchNorm")):
        as_units([nn.BatchNorm1d(3)])


def test_a_statistic_that_is_listed_as_a_weight_is_refused():
    specs = convolutions(GROUP)
    params = {local: replace(param, is_statistic=False) for local, param in specs[0].params.items()}
    with pytest.raises(ConfigError, match=r"'1\.running_mean' has is_statistic = False; set it to True"):
        outline_of([replace(specs[0], params=params), *specs[1:]], "the file")


def test_a_model_of_one_device_uses_the_running_statistics():
    model = UnitGraph(convolutions(GROUP), seed=0)
    x = torch.randn(GROUP, 3, 8, 8)

    def out(part: Tensor) -> Tensor:
        return model(part)

    torch.testing.assert_close(out(x)[:1], out(x[:1]))
