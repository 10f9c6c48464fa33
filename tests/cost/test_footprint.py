"""Footprints: one at a time and many at once, against the exact bytes of real plans, against published peaks."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from bench.published_memory import hold, is_fitting
from bench.published_rows import is_timed, number, read_rows
from superstep.cost.closed import framework_memory as keeping
from superstep.cost.closed.estimate import estimate
from superstep.cost.closed.framework import SUPERSTEP, Software, price_of
from superstep.cost.closed.memory import Footprint, footprint
from superstep.cost.closed.model_numbers import array, decoder_of
from superstep.cost.closed.parallel_degrees import RECOMPUTE, SCHEDULES, Layout
from superstep.cost.program.memory.activations import unit_bytes
from superstep.cost.program.memory.memory import rank_bytes
from superstep.errors import ConfigError
from superstep.hardware.catalogue import chip
from superstep.hardware.network import usual_cluster
from superstep.plan.config import DataConfig, ModelConfig, NumericsConfig, PlanConfig, RunConfig, TrainConfig
from superstep.plan.optimizers import MOMENTS
from superstep.plan.resolution.resolve import resolve
from superstep.program.compile import compile_step
from superstep.program.peak_memory import without_workspace

MODEL = ModelConfig(
    name="llama3-8b", layers=16, width=2048, heads=16, kv_heads=4, head_dim=128, ffn=5632, vocab=32000, tied=False
)
MIXTURE = replace(MODEL, ffn=1408, experts=8, experts_per_token=2, shared_experts=1)
SEQUENCE = 2048
CLUSTER = usual_cluster(chip("H100-SXM"), 8)
STACK = price_of(CLUSTER, SUPERSTEP)[1]
MEGATRON = price_of(CLUSTER, Software())[1]


def resolved(compute="bf16", model=MODEL, optimizer="adamw", **plan):
    plan.setdefault("microbatch", 1)
    return resolve(
        RunConfig(
            model=model,
            data=DataConfig(sequence_tokens=SEQUENCE),
            train=TrainConfig(batch_sequences=8 * plan.get("dp", 1), optimizer=optimizer),
            plan=PlanConfig(**plan),
            numerics=NumericsConfig(compute=compute),
        )
    )


def layout_of(run):
    plan, mesh = run.plan, run.plan.mesh
    return Layout(
        **{axis: array(getattr(mesh, axis)) for axis in ("dp", "tp", "pp", "cp", "ep")},
        shards=array(mesh.dp * mesh.cp / mesh.replicas),
        zero=array(plan.zero),
        sequence_parallel=array(plan.sequence_parallel and mesh.tp > 1),
        chunks=array(plan.chunks),
        schedule=array(SCHEDULES.index(plan.schedule)),
        microbatch=array(plan.microbatch),
        microbatches=array(plan.microbatches),
        recompute=array(RECOMPUTE.index(plan.recompute)),
        recomputed_layers=array(1),
        offload=array(0),
    )


def of(run, kept=None, stack=STACK, **changes):
    model = decoder_of(run.shape, SEQUENCE)
    known = {field.name for field in fields(Layout)}
    of_layout = {name: array(value) for name, value in changes.items() if name in known}
    of_model = {name: array(value) for name, value in changes.items() if name not in known}
    return footprint(replace(model, **of_model), replace(layout_of(run), **of_layout), stack, kept)


GRID = [
    {
        "pp": pp,
        "tp": tp,
        "dp": 4 if zero else 1,
        "zero": zero,
        "recompute": recompute,
        "schedule": schedule,
        "chunks": chunks,
    }
    for pp, tp, zero, recompute in (
        (1, 1, 0, "none"),
        (1, 2, 1, "selective"),
        (1, 1, 3, "full"),
        (2, 1, 2, "none"),
        (2, 2, 3, "selective"),
        (4, 1, 0, "none"),
        (4, 2, 1, "full"),
        (4, 1, 2, "full"),
        (4, 1, 3, "none"),
    )
    for schedule, chunks in (("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2))
    if pp > 1 or schedule == "1f1b"
]
NEAR = {"1f1b": 0.08, "gpipe": 0.08, "interleaved": 0.14, "zb-h1": 0.08, "zb-v": 0.19}
"""How far from the exact bytes, by schedule: where a rank has several stages, how many layers each has is a guess."""


def held_bytes(run):
    """The exact bytes of the fullest rank without what an instruction makes and drops within itself."""
    ranks = rank_bytes(run, compile_step(run.plan), without_workspace(unit_bytes(run)))
    return max(rank.bytes - rank.batch - rank.peak.workspace_bytes for rank in ranks)


@pytest.mark.parametrize("plan", GRID, ids=lambda plan: "-".join(str(value) for value in plan.values()))
def test_superstep_s_own_plans_hold_about_their_exact_bytes(plan):
    run = resolved(**plan)
    ours = of(run)
    assert float(ours.bytes - ours.workspace) == pytest.approx(held_bytes(run), rel=NEAR[plan["schedule"]])
    exact = max(rank.bytes for rank in rank_bytes(run, compile_step(run.plan)))
    assert float(ours.bytes) == pytest.approx(exact, rel=NEAR[plan["schedule"]])


@pytest.mark.parametrize("model", [MODEL, MIXTURE], ids=["dense", "mixture"])
@pytest.mark.parametrize("compute", ["bf16", "fp32"])
@pytest.mark.parametrize(
    "plan",
    [
        {},
        {"dp": 4, "zero": 1},
        {"dp": 4, "zero": 2},
        {"dp": 4, "zero": 3},
        {"dp": 4, "zero": 3, "replicas": 2},
        {"tp": 2},
        {"cp": 2},
        {"microbatch": 4, "recompute": "selective"},
        {"dp": 4, "ep": 4, "zero": 3},
    ],
    ids=lambda plan: "-".join(f"{name}{value}" for name, value in plan.items()) or "one",
)
def test_without_a_pipeline_footprints_are_exact_within_two_percent(model, compute, plan):
    if "ep" in plan and model is MODEL:
        plan = {**plan, "ep": 1}
    run = resolved(compute, model, **plan)
    ours = of(run, keeping.superstep(element_bytes=2 if compute == "bf16" else 4))
    assert float(ours.bytes - ours.workspace) == pytest.approx(held_bytes(run), rel=0.02)


@pytest.mark.parametrize("optimizer", MOMENTS)
@pytest.mark.parametrize("compute", ["bf16", "fp32"])
def test_on_one_rank_what_stays_is_exact(compute, optimizer):
    run = resolved(compute, optimizer=optimizer)
    (exact,) = rank_bytes(run, compile_step(run.plan))
    kept = keeping.superstep(element_bytes=2 if compute == "bf16" else 4, moments=len(MOMENTS[optimizer]))
    found = of(run, kept)
    assert float(found.parameters) == pytest.approx(exact.params, rel=1e-3)
    assert float(found.optimizer) == pytest.approx(exact.optimizer, rel=1e-3)
    assert float(found.gradients) == pytest.approx(exact.gradients, rel=1e-3)
    assert float(found.activations) == pytest.approx(exact.peak.kept_bytes, rel=0.02)


@pytest.mark.parametrize("optimizer", MOMENTS)
def test_an_update_moves_what_the_exact_memory_model_holds(optimizer):
    """It reads and writes masters and moments, reads the fp32 gradient, and writes the 16-bit weight."""
    run = resolved(optimizer=optimizer)
    (exact,) = rank_bytes(run, compile_step(run.plan))
    rates, stack = price_of(CLUSTER, SUPERSTEP)
    seconds = estimate(decoder_of(run.shape, SEQUENCE), layout_of(run), rates, stack, optimizer=optimizer).optimizer_s
    moved_bytes = 2 * exact.optimizer + (4 + 2) * run.outline.numel
    assert float(seconds * rates.memory_bytes_per_s) == pytest.approx(moved_bytes, rel=1e-3)


def test_many_plans_at_once_are_each_plan_by_itself():
    runs = [resolved(**plan) for plan in GRID]
    single = [of(run) for run in runs]
    layouts = [layout_of(run) for run in runs]
    together = Layout(**{f.name: np.stack([getattr(each, f.name) for each in layouts]) for f in fields(Layout)})
    found = footprint(decoder_of(runs[0].shape, SEQUENCE), together, STACK)
    for field in fields(Footprint):
        np.testing.assert_allclose(getattr(found, field.name), [float(getattr(each, field.name)) for each in single])


def test_each_stage_of_zero_spreads_one_category_more():
    run = resolved(dp=4)
    stages = [of(run, keeping.megatron(), MEGATRON, zero=zero, shards=4) for zero in range(4)]
    for category, since in (("optimizer", 1), ("gradients", 2), ("parameters", 3)):
        held = [float(getattr(stage, category)) for stage in stages]
        assert held == pytest.approx([held[0] / (4 if zero >= since else 1) for zero in range(4)])


def test_recomputation_keeps_less():
    run = resolved()
    eager = price_of(CLUSTER, Software(attention="eager"))[1]
    none, selective, full = (
        float(of(run, keeping.megatron(), eager, recompute=policy).activations) for policy in range(3)
    )
    assert none > selective > full


def test_frozen_weights_and_offloaded_states_take_no_room():
    run = resolved()
    frozen, off = of(run, frozen=1), of(run, offload=1)
    assert frozen.gradients == frozen.optimizer == off.optimizer == 0
    assert of(run).optimizer > 0


def test_what_an_update_lists_takes_the_place_of_activations_and_one_piece_comes_besides():
    run = resolved(recompute="full")

    def workspace(offload=0, **held):
        kept = keeping.keeping_of(keeping.FrameworkMemory(**held))
        found = of(run, kept, MEGATRON, offload=offload)
        return float(found.workspace), float(found.activations)

    none, activations = workspace()
    # Of 12 bytes a number: a master and two moments.
    numbers = float(of(run, keeping.megatron(), MEGATRON).optimizer) / 12
    for each in (4.0, 40.0):
        assert workspace(listed_bytes=each)[0] == pytest.approx(max(none, each * numbers - activations))
        assert workspace(update_bytes=each)[0] == pytest.approx(max(none, each * numbers))
        assert workspace(1, update_bytes=each, listed_bytes=each)[0] == none
    assert 4 * numbers - activations > none


def test_a_crooked_router_fills_one_rank_s_experts():
    model = {"experts": 8, "experts_per_token": 2, "expert_ffn": 1024, "ffn": 0}
    run = resolved()
    even, crooked = (of(run, **model, imbalance=imbalance) for imbalance in (1.0, 2.0))
    assert crooked.activations > 1.2 * even.activations
    assert crooked.lasting == even.lasting


def test_what_fits_fits_into_more():
    run = resolved()
    found, plan = of(run), layout_of(run)
    sizes = np.array([0.5, 1.0, 1.1, 2.0]) * float(found.reserved)
    assert list(is_fitting(found, plan, sizes)) == [False, False, True, True]


@pytest.fixture(scope="module")
def rows():
    return [row for row in read_rows() if row["hidden"] and row["n_layers"]]


def test_published_peaks_are_near(rows):
    held = hold([row for row in rows if number(row, "peak_mem_gb")])
    error = np.abs(held.reported / np.array([number(row, "peak_mem_gb") for row in held.rows]) - 1)
    assert len(error) == 110
    assert np.median(error) <= 0.06
    assert np.quantile(error, 0.9) <= 0.15


def test_layouts_that_did_not_fit_are_told_from_those_that_did(rows):
    held = hold([row for row in rows if row["source"] == "aleph_alpha_layouts"])
    right = (held.fits == 0) == np.array([row["oom"] == "1" for row in held.rows])
    assert len(right) == 736
    assert right.mean() >= 0.95


def test_runs_that_ran_are_not_refused(rows):
    sources = ("llm_foundry_h100", "internevo", "zero_bubble_pp", "korthikanti2022", "narayanan2021_fig18")
    held = hold([row for row in rows if row["source"] in sources and is_timed(row)])
    assert len(held.rows) > 150
    assert held.fits.all()


def test_a_row_whose_chip_nobody_knows_is_left_out(rows):
    with pytest.raises(ConfigError):
        chip("Z80")
    known = [row for row in rows if number(row, "peak_mem_gb")][:2]
    assert len(hold([*known, known[0] | {"gpu": "Z80"}]).rows) == 2
