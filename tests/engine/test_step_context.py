"""What one step was given and what it gave is gone at the next one."""

from datetime import timedelta
from unittest import mock

import torch

import small
from superstep.comm.device import Device
from superstep.comm.mesh import build_mesh
from superstep.engine.engine import Engine
from superstep.engine.values.microbatch import Microbatch
from superstep.numerics.fixed_point import OutOfRange
from superstep.numerics.policy import PolicyLoss
from superstep.plan.resolution.resolve import resolve
from superstep.train.weights.model import units_of


def test_a_refused_step_has_no_measures_of_the_step_before():
    run = resolve(small.config(layers=2, sequences=2, packed=False, microbatch=2))
    engine = Engine(run, units_of(run), build_mesh(run.plan, 0, Device("cpu"), timeout=timedelta(minutes=1)))
    tokens = torch.randint(0, small.VOCAB, (2, 17), generator=torch.Generator().manual_seed(0))
    streams = {"advantages": torch.ones(2, 16), "old": torch.zeros(2, 16)}
    part = Microbatch(
        fields={"tokens": tokens[:, :-1].contiguous()}, targets=tokens[:, 1:].contiguous(), streams=streams, first=0
    )

    def step():
        return engine.train_step(
            [part], valid_tokens=32, lr=1e-3, objective=PolicyLoss(surrogate="clip"), judge=lambda *_: ""
        )

    taken = step()
    assert taken.measures
    with mock.patch.object(engine.optimizer, "sums", side_effect=OutOfRange("no room")):
        refused = step()
    assert (refused.refused, refused.measures, engine.measures) == ("no room", {}, {})
    assert engine.optimizer.steps == 1
