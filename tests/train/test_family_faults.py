"""Faults that a rank of gpt-oss or of DeepSeek-V3 can have, planted: the proof of a layout finds each."""

from pathlib import Path
from unittest import mock

import pytest
import test_foreign_layouts as foreign
import torch

import small
from superstep.comm.device import Device
from superstep.engine.parallel import ring
from superstep.launch.ranks import World
from superstep.model import moe
from superstep.model.moe import Gate
from superstep.numerics.attention.attention_sinks import join_sinks
from superstep.plan.resolution.resolve import resolve
from superstep.train.proof.prove_tolerance import prove, write_reference

pytestmark = pytest.mark.multiproc


def _join_twice(out, lse, sinks):
    return join_sinks(*join_sinks(out, lse, sinks), sinks)


def _of_rank(rank):
    plain = Gate.forward

    def forward(self, x):
        return plain(self, x) + 0.01 * rank * torch.arange(len(self.weight))

    return forward


def _prove(rank, world, run, folder, fault):
    faults = {
        "none": mock.patch.object(ring, "join_sinks", join_sinks),
        "a sink in the softmax of each rank": mock.patch.object(ring, "join_sinks", _join_twice),
        "a router bias per rank": mock.patch.object(Gate, "forward", _of_rank(rank)),
        "a load of each rank alone": mock.patch.object(moe, "LOAD_UNIT", -moe.LOAD_UNIT if rank else moe.LOAD_UNIT),
    }
    with faults[fault]:
        return prove(World(rank, world, Device("cpu")), run, small.batches(), Path(folder), reruns=False)


@pytest.mark.parametrize(
    ("kind", "fault", "plan"),
    [
        ("gpt_oss", "none", {"cp": 2}),
        ("gpt_oss", "a sink in the softmax of each rank", {"cp": 2}),
        ("gpt_oss", "a router bias per rank", {"dp": 2, "ep": 2}),
        ("deepseek_v3", "a load of each rank alone", {"dp": 2, "ep": 2}),
    ],
)
def test_a_planted_fault_is_found(kind, fault, plan, pool, tmp_path):
    run = resolve(foreign._config(kind, tmp_path, **plan))
    torch.set_num_threads(1)
    write_reference(run.shape, run.config.train, small.batches(), tmp_path)
    verdict = pool.run(2, _prove, run, str(tmp_path), fault, timeout_s=120)[0]
    assert verdict.is_proven == (fault == "none"), verdict.first and verdict.first.describe()
    if fault != "none":
        assert verdict.first.describe().startswith("step 0: ")
