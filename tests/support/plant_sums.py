"""Faults to plant in sums, parameters, the optimizer, the norm and clipping."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import torch
import torch.distributed as dist

from superstep.comm import collectives
from superstep.engine import executor
from superstep.engine.engine import Engine
from superstep.engine.executor import Executor
from superstep.engine.flat import sync
from superstep.engine.flat.buffers import UnitBuffers
from superstep.engine.layers import grad_accumulation
from superstep.engine.optimizer import Optimizer


def stale_layer(name):
    """A layer whose ranks pass round the weights of the start."""
    inner = UnitBuffers.refresh

    def refresh(self):
        if not any(name in slot.spec.name for slot in self.layout.slots):
            return inner(self)
        if self not in kept:
            kept[self] = self.master.clone()
        self._part(self.full).copy_(kept[self])
        return None

    kept = {}
    return mock.patch.object(UnitBuffers, "refresh", refresh)


def rounded(name):
    inner = getattr(sync, name)

    def reduce(buffer, group, **rest):
        buffer.copy_(buffer.bfloat16())
        return inner(buffer, group, **rest)

    return mock.patch.object(sync, name, reduce)


def parts_exchanged():
    inner = sync.all_gather

    def all_gather(buffer, group, **rest):
        inner(buffer, group, **rest).wait()
        buffer.copy_(torch.cat(buffer.chunk(group.size())[::-1]))
        return collectives.DONE

    return mock.patch.object(sync, "all_gather", all_gather)


def gradient_of_the_step_before():
    return mock.patch.object(UnitBuffers, "zero_gradient")


def last_sum_only():
    def settle(self):
        if self.zero >= 2:
            self.gradient_shard.copy_(self._part(self.gradient))
            self.drop_gradient()

    return mock.patch.object(UnitBuffers, "settle", settle)


def half_the_scale():
    inner = Executor.run

    def run(self, context):
        return inner(self, replace(context, scale=context.scale / 2))

    return mock.patch.object(Executor, "run", run)


def linears_too_large():
    """Weight gradients of linears 5% too large, in bf16 alone."""
    inner = grad_accumulation.add_product

    def add_product(total, left, right):
        inner(total, left, right, 1.0 if left.dtype == torch.float32 else 1.05)

    return mock.patch.object(grad_accumulation, "add_product", add_product)


def one_unit_not_reduced(kind):
    inner = getattr(executor, kind)

    def reduce(trained, *others):
        is_left_out = any(".layers.1." in slot.spec.name for b in trained for slot in b.layout.slots)
        return collectives.DONE if is_left_out else inner(trained, *others)

    return mock.patch.object(executor, kind, reduce)


def masters_in_bf16():
    inner = Optimizer.step

    def step(self, lr, norm, *others):
        inner(self, lr, norm, *others)
        for unit in self._units:
            unit.buffers.master.copy_(unit.buffers.master.bfloat16())

    return mock.patch.object(Optimizer, "step", step)


def no_decay():
    inner = Optimizer.__init__

    def init(self, units, rule, hyper, *args, **rest):
        inner(self, units, rule, replace(hyper, weight_decay=0.0), *args, **rest)

    return mock.patch.object(Optimizer, "__init__", init)


def one_shard_not_updated():
    inner = Optimizer.step

    def step(self, lr, norm, *others):
        inner(self, lr if dist.get_rank() == 0 else 0.0, norm, *others)

    return mock.patch.object(Optimizer, "step", step)


# The norm and clipping.


def clip_by(own):
    inner = Optimizer.step

    def step(self, lr, norm, *others):
        inner(self, lr, own(self, norm), *others)

    return mock.patch.object(Optimizer, "step", step)


def norm_of_own_shard(self, norm):
    parts = [unit.buffers.reduced[low:high] for unit in self._units for low, high in unit.ranges]
    return float(torch.cat(parts).norm())


def every_copy_counted():
    def ranges(self, unit, b):
        return [(slot.start + low - b.start, slot.start + high - b.start) for slot, low, high in b.list_slots()]

    return mock.patch.object(Engine, "owned_ranges", ranges)
