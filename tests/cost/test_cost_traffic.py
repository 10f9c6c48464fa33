"""Traffic: what a step's collectives carry by axis, against what ranks hand to them, to the byte."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from datetime import timedelta

import pytest
import torch.distributed as dist

import small
from longer import longer
from superstep.comm import collectives
from superstep.comm.device import Device
from superstep.comm.mesh import build_mesh
from superstep.cost.program.time.traffic import traffic
from superstep.cost.program.time.unit_operations import decoder_operations
from superstep.engine import executor
from superstep.engine.engine import Engine
from superstep.engine.flat import sync
from superstep.engine.parallel import ring as ring_attention
from superstep.engine.tracing.trace_units import operations_of
from superstep.engine.values.microbatch import microbatches_of, rows
from superstep.plan.config import LoraConfig
from superstep.plan.resolution.resolve import resolve
from superstep.program.compile import compile_step
from superstep.train.weights.model import units_of

pytestmark = pytest.mark.multiproc


def run_of(*, moe=False, lora=None, **layout):
    config = small.config(**{"layers": 3, "microbatch": 2} | layout)
    config = replace(config, lora=lora and LoraConfig(rank=3, targets=lora))
    if moe:
        config = replace(config, model=replace(config.model, experts=4, experts_per_token=2))
    return resolve(config)


class Counted:
    """Bytes handed to collectives by the axis of their group."""

    def __init__(self, mesh):
        self.bytes = Counter()
        self.axes = {}
        named = [(mesh.cp, "cp"), (mesh.tp, "tp"), (mesh.ep, "ep"), (mesh.sequence, "sequence"), (mesh.world, None)]
        named += [(group, "pp") for group in mesh.channels.values()]
        named += [(group, "tie") for group in mesh.ties.values()]
        for sharers in mesh.sharers.values():
            named += [(sharers.fetch, "shards"), (sharers.reduce, "shards"), (sharers.replicas, "replicas")]
        self.axes = {group.group_name: axis for group, axis in named if group is not None}

    def of(self, tensor, group):
        if axis := self.axes[group.group_name]:  # else the sum of norms over all ranks
            self.bytes[axis] += tensor.numel() * tensor.element_size()

    def patch(self, monkeypatch):
        """Count where tensors are handed over; groups are the second argument or named."""

        def counting(owner, name, *, tensor=0, group="group"):
            inner = getattr(owner, name)

            def call(*args, **kwargs):
                where = kwargs.get("group") if isinstance(group, str) else args[group]
                self.of(args[tensor], where)
                return inner(*args, **kwargs)

            monkeypatch.setattr(owner, name, call)

        counting(dist, "all_reduce")
        counting(dist, "all_to_all_single", tensor=1)
        counting(collectives, "scatter_single", tensor=1)
        counting(sync, "all_gather", group=1)
        counting(executor, "send", group=1)
        counting(ring_attention.Hop, "start", group=1)
        stack = collectives.stack_ranks

        def gathered(x, group):
            out = stack(x, group)
            self.of(out, group)
            return out

        monkeypatch.setattr(collectives, "stack_ranks", gathered)


def count(rank, world, layout):
    """One rank's bytes by axis in one step."""
    run = run_of(**layout)
    mesh = build_mesh(run.plan, rank, Device("cpu"), timeout=timedelta(seconds=60))
    engine = Engine(run, units_of(run), mesh)
    (batch,) = small.batches(steps=1)
    mine = microbatches_of(batch.rows(rows(run.plan, mesh)), run.plan, mesh)
    counted = Counted(mesh)
    with pytest.MonkeyPatch.context() as patch:
        counted.patch(patch)
        engine.train_step(mine, valid_tokens=batch.valid_tokens, lr=1e-3)
    mesh.destroy()
    return counted.bytes


LAYOUTS = [
    {"lora": ("all-linear",), "dp": 2, "zero": 1},
    {"lora": ("q_proj", "down_proj"), "dp": 2, "tp": 2, "zero": 3},
    {"lora": ("all-linear",), "tp": 2, "sequence_parallel": False, "rules": (("ffn", "none"),)},
    {"lora": ("v_proj",), "pp": 2, "dp": 2, "zero": 2, "replicas": 1, "compute": "bf16"},
    {"dp": 2},
    {"dp": 2, "zero": 1},
    {"dp": 2, "zero": 2, "compute": "bf16"},
    {"dp": 2, "zero": 3},
    {"pp": 2},
    {"pp": 2, "schedule": "zb-h1", "compute": "bf16"},
    {"tp": 2},
    {"tp": 2, "sequence_parallel": False},
    {"tp": 2, "recompute": "full"},
    {"cp": 2},
    {"cp": 2, "context": "ulysses"},
    {"dp": 2, "ep": 2, "moe": True, "tied": False},
    {"tp": 2, "ep": 2, "moe": True, "sequence_parallel": False},
    {"dp": 4, "zero": 2, "replicas": 2},
    {"dp": 2, "tp": 2, "zero": 3},
    {"pp": 2, "tp": 2, "sequence_parallel": False},
    {"dp": 2, "cp": 2, "zero": 2, "context": "ulysses"},
]


def _ranks(layout):
    return math.prod(layout.get(axis, 1) for axis in ("pp", "dp", "cp", "tp"))


# What a rehearsal sees is carried over these axes alone; of the layouts without them one is rehearsed too.
REHEARSED = [layout for layout in LAYOUTS if {"tp", "cp", "ep", "pp"} & layout.keys()] + [{"dp": 2, "zero": 3}]


def everywhere(run, units_of_run):
    """The predicted bytes by axis, all ranks together."""
    total = Counter()
    places = run.plan.mesh.world // run.plan.mesh.pp
    for rank in traffic(run, compile_step(run.plan), units_of_run):
        total.update({axis: places * size for axis, size in rank.items()})
    return total


@pytest.mark.parametrize("layout", longer(LAYOUTS, lambda layout: _ranks(layout) > 2), ids=str)
def test_the_bytes_over_each_axis_are_those_that_ranks_hand_over(pool, layout):
    run = run_of(**layout)
    counted = sum(pool.run(run.plan.mesh.world, count, layout), Counter())
    assert counted
    assert everywhere(run, decoder_operations(run)) == counted
    if layout in REHEARSED:
        assert everywhere(run, operations_of(run, units_of(run))) == counted
