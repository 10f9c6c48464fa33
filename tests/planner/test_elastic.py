"""Plans for what is left of a run's chips: the same computation on fewer, or none at all."""

from dataclasses import replace

import pytest

from superstep.errors import ConfigError
from superstep.hardware.cpu_core import cores
from superstep.plan.config import ModelConfig, NumericsConfig, PlanConfig, RunConfig, StateConfig, TrainConfig
from superstep.plan.resolution.resolve import resolve
from superstep.planner import elastic
from superstep.planner.elastic import smaller_plan
from superstep.planner.simulate_best import verify

ROOM = 2.0**32


def _run(dp=4, *, exact=False, batch=16, **plan):
    return resolve(
        RunConfig(
            train=TrainConfig(batch_sequences=batch),
            plan=PlanConfig(dp=dp, zero=1, **plan),
            numerics=NumericsConfig(exact=exact),
            state=StateConfig(snapshot_every=1),
        )
    )


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("chips", [1, 2, 3])
def test_a_smaller_plan_has_as_many_ranks_as_are_left_and_computes_the_same(exact, chips):
    run = _run(exact=exact, microbatch=2)
    found = smaller_plan(run, cores(chips, 1), ROOM)
    assert found is not None
    assert found.run.plan.mesh.world == chips
    assert replace(found.run.config, plan=run.config.plan) == run.config
    assert found.run.plan.grain == run.plan.grain, "the pieces that exact mode sums"


def test_in_exact_mode_gradients_are_those_of_the_same_microbatches():
    free, exact = (smaller_plan(_run(exact=e, microbatch=1), cores(2, 1), ROOM) for e in (False, True))
    assert exact.run.plan.microbatch == 1
    assert free.run.plan.microbatch > 1, "else it is another one that is faster"


def test_there_is_none_where_the_batch_and_the_model_do_not_cut_or_there_is_no_room():
    assert smaller_plan(_run(8), cores(7, 1), ROOM) is None
    assert smaller_plan(_run(), cores(2, 1), 2.0**16) is None
    assert smaller_plan(_run(), cores(2, 1), ROOM, lambda run: 2**32) is None, "snapshots take it all"


def test_a_plan_that_fits_by_a_hair_is_taken_and_one_that_is_a_byte_too_large_is_not(monkeypatch):
    """With what its snapshots take besides."""
    priced = []

    def price(option):
        priced.append(verify(option))
        return priced[-1]

    def snapshots(run):
        return 1000 * run.plan.mesh.dp

    monkeypatch.setattr(elastic, "verify", price)
    free = smaller_plan(_run(), cores(2, 1), ROOM, snapshots).run
    most = priced[-1].memory_bytes + snapshots(free)
    assert smaller_plan(_run(), cores(2, 1), most, snapshots).run.plan == free.plan
    other = smaller_plan(_run(), cores(2, 1), most - 1, snapshots)
    assert other.run.plan != free.plan
    assert priced[-1].memory_bytes + snapshots(other.run) < most


def test_a_model_whose_steps_are_not_predicted_has_none(tmp_path):
    run = _run()
    own = replace(run, config=replace(run.config, model=ModelConfig(source="own.py")))
    with pytest.raises(ConfigError, match=r"train\.elastic = true with model\.source = 'own\.py'.*set train\.elastic"):
        smaller_plan(own, cores(2, 1), ROOM)
