"""What snapshots take of a host: three slots of weights and moments of what a rank trains, whoever holds it."""

from dataclasses import replace

import pytest

from superstep.cost.program.buffers import share_numel
from superstep.cost.program.flops import rank_parameters
from superstep.cost.program.memory.snapshot_memory import slots_bytes, snapshot_bytes
from superstep.plan.config import ModelConfig, PlanConfig, RunConfig, StateConfig, TrainConfig
from superstep.plan.resolution.resolve import resolve
from superstep.program.compile import compile_step


def _run(every=None, *, tied=False, optimizer="adamw", **layout):
    model = ModelConfig(name="demo", layers=8, tied=tied)
    train = TrainConfig(batch_sequences=64, optimizer=optimizer)
    return resolve(
        RunConfig(model=model, train=train, plan=PlanConfig(**layout), state=StateConfig(snapshot_every=every))
    )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"dp": 4, "zero": 3},
        {"pp": 4, "microbatch": 2},
        {"pp": 2, "chunks": 2, "schedule": "interleaved"},
        {"pp": 2, "chunks": 2, "schedule": "zb-v", "tp": 2},
    ],
)
def test_it_is_counted_as_the_program_of_the_step_has_it(layout, tied):
    run = _run(tied=tied, **layout)
    step, owned = compile_step(run.plan), rank_parameters(run)
    fullest = max(sum(share_numel(run, owned[u]) for u in step.list_held_units(rank)) for rank in range(step.pp))
    assert slots_bytes(run) == 3 * 12 * fullest


def test_without_snapshots_nothing_is_taken_and_sharding_shares_it():
    whole = _run(1, dp=4, zero=0)
    assert snapshot_bytes(_run(dp=4)) == 0
    assert snapshot_bytes(_run(1, dp=4, zero=0, optimizer="lion")) == 24 * whole.outline.numel
    assert snapshot_bytes(whole) == 36 * whole.outline.numel
    assert snapshot_bytes(_run(1, dp=4, zero=1)) == pytest.approx(snapshot_bytes(whole) / 4, rel=0.01)


def test_copies_on_another_host_take_a_slot_more_and_three_for_the_other_s():
    run = _run(1, dp=4, zero=1)
    copied = replace(run, config=replace(run.config, state=replace(run.config.state, peers=1)))
    assert snapshot_bytes(copied) == snapshot_bytes(run) * 7 / 3
