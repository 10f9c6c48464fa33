"""A mixture of one expert is a dense model: the same weights give the same losses and gradients, step after step."""

from dataclasses import replace
from datetime import timedelta

import pytest
import torch

import small
from superstep.comm.device import Device
from superstep.comm.mesh import build_mesh
from superstep.engine.engine import Engine
from superstep.engine.values.microbatch import microbatches
from superstep.model.axes import units
from superstep.plan.resolution.resolve import resolve

CONFIG = small.config(layers=3, microbatch=2)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def engine_of(**model):
    run = resolve(replace(CONFIG, model=replace(CONFIG.model, **model)))
    mesh = build_mesh(run.plan, 0, Device("cpu"), timeout=timedelta(seconds=60))
    return Engine(run, units(run.shape), mesh)


@pytest.mark.parametrize("mixture", [{"router": "switch", "capacity_factor": 1.0}, {"router": "dropless"}], ids=str)
def test_one_expert_trains_as_the_dense_model_does(mixture):
    dense, mixed = engine_of(), engine_of(experts=1, experts_per_token=1, **mixture)
    weights = {p.name: p.values for p in dense.pieces(("weight",))}
    for p in mixed.pieces(("weight",)):
        if not p.name.endswith("mlp.gate.weight"):  # of one expert any router is sure
            p.values.copy_(weights[p.name.replace(".experts.0", "")])
    mixed.note_loaded(0)
    for batch in small.batches(steps=4):
        both = [
            engine.train_step(
                microbatches(batch.tokens_BS, batch.targets_BS, engine.run.plan, engine.mesh),
                valid_tokens=batch.valid_tokens,
                lr=1e-2,
            )
            for engine in (dense, mixed)
        ]
        assert both[0].loss == pytest.approx(both[1].loss, rel=1e-6)
        assert both[0].grad_norm == pytest.approx(both[1].grad_norm, rel=1e-6)
