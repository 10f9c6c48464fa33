"""Planted faults: each breaks one thing that a layout must do, and ``prove`` must name a tensor."""

from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from test_parity import references  # noqa: F401 - a fixture

import small
from superstep.plan.resolve import resolve
from superstep.plan.split.sequence import blocks
from superstep.program.instructions import BackwardWeight
from superstep.runtime import (
    attention,
    buffers,
    collectives,
    executor,
    optimizer,
)
from superstep.runtime.device import Device
from superstep.runtime.engine import Engine
from superstep.runtime.launch import World
from superstep.runtime.parallel import ring, tensor, ulysses
from superstep.train.proof import close as prove_module
from superstep.train.proof.close import prove

pytestmark = pytest.mark.multiproc


def _no_reduction(buffer, group, **_):
    return collectives.DONE


def _own_divisor():
    inner = Engine.train_step

    def train_step(self, parts, *, valid_tokens, **rest):
        mine = sum(int((m.targets != small.IGNORE).sum()) for m in parts) * self.mesh.shape.dp
        return inner(self, parts, valid_tokens=mine, **rest)

    return mock.patch.object(Engine, "train_step", train_step)


def _shifted_rows():
    inner = prove_module.rows

    def rows(plan, mesh):
        found = inner(plan, mesh)
        return slice(0, found.stop - found.start) if mesh.at.dp else found

    return mock.patch.object(prove_module, "rows", rows)


def _stale_parameters():
    return mock.patch.object(executor, "all_gather", _no_reduction)


def _untied():
    inner = executor.all_reduce

    def all_reduce(buffer, group):
        # Only the tie sums over a group of two pipeline ranks here.
        return collectives.DONE

    assert inner is not all_reduce
    return mock.patch.object(executor, "all_reduce", all_reduce)


def _no_partial_sum():
    return mock.patch.object(executor.Executor, "_reduce_partial")


def _own_norm():
    def sums(values):
        total = collectives.sum_over_all(values.clone())
        return torch.stack((values[0], total[1]))

    return mock.patch.object(optimizer, "sum_over_all", sums)


def _no_gradient_sum_on_entering():
    return mock.patch.object(tensor._Enter, "backward", staticmethod(lambda ctx, grad: (grad, None)))


def _wrong_vocabulary_offset():
    inner = tensor._vocabulary_lookup

    def lookup(layer, group, leave):
        class Shifted:
            def rank(self):
                return 0

        return inner(layer, Shifted(), lambda x, _: leave(x, group))

    return mock.patch.object(tensor, "_vocabulary_lookup", lookup)


def _lost_microbatch():
    inner = executor.Executor._backward

    def backward(self, unit, m):
        inner(self, unit, m)
        if unit == 1 and m == 0:
            self._machine.buffers[1][0].gradient.zero_()

    return mock.patch.object(executor.Executor, "_backward", backward)


def _same_keys_all_round():
    def round_(kv, group):
        for block in blocks(group.rank(), group.size()):
            yield block, kv[:, :, block.keys(kv.shape[2])].transpose(2, 3)

    return mock.patch.object(ring, "_round", round_)


def _positions_of_the_first_rank():
    inner = attention.positions
    return mock.patch.object(attention, "positions", lambda tokens, *, cp, rank: inner(tokens, cp=cp, rank=0))


def _heads_not_brought_back():
    def backward(ctx, grad):
        return grad, None

    return mock.patch.object(ulysses._Exchange, "backward", staticmethod(backward))


def _own_seed():
    inner = buffers.initial

    def initial(spec, shape, seed):
        return inner(spec, shape, seed + dist.get_rank())

    return mock.patch.object(buffers, "initial", initial)


def _replicas_apart():
    return mock.patch.object(executor.Executor, "_reduce_replicas")


def _lost_put_off_sum():
    inner = executor.Executor._issue

    def issue(self, instruction):
        if instruction == BackwardWeight(1, 0):
            self._flight.put_off.pop((1, 0))
        else:
            inner(self, instruction)

    return mock.patch.object(executor.Executor, "_issue", issue)


FAULTS = {
    "gradients not summed over dp": (
        lambda: mock.patch.object(executor, "all_reduce", _no_reduction),
        {"dp": 2, "zero": 0},
        "gradient",
    ),
    "gradients not summed into shards": (
        lambda: mock.patch.object(executor, "reduce_scatter", _no_reduction),
        {"dp": 2, "zero": 2},
        "gradient",
    ),
    "each rank divides by its own tokens": (_own_divisor, {"dp": 2}, "loss"),
    "two ranks read the same rows": (_shifted_rows, {"dp": 2}, "loss"),
    "parameters not gathered after the update": (_stale_parameters, {"dp": 2, "zero": 1}, "loss"),
    "a tied head's gradient not summed": (_untied, {"pp": 2, "microbatch": 1}, "gradient"),
    "partial gradients not summed over tp": (_no_partial_sum, {"tp": 2}, "gradient"),
    "each rank clips by its own norm": (_own_norm, {"dp": 2, "zero": 1}, "norm"),
    "no sum of gradients on entering tp": (
        _no_gradient_sum_on_entering,
        {"tp": 2, "sequence_parallel": False},
        "gradient",
    ),
    "vocabulary looked up at the wrong offset": (_wrong_vocabulary_offset, {"tp": 2}, "loss"),
    "one microbatch's gradient lost": (_lost_microbatch, {"pp": 2, "microbatch": 1}, "gradient"),
    "each rank starts from its own seed": (_own_seed, {"dp": 2}, "loss"),
    "keys do not go round the ring": (_same_keys_all_round, {"cp": 2}, "loss"),
    "each rank turns by the first rank's positions": (_positions_of_the_first_rank, {"cp": 2}, "loss"),
    "gradients of heads not brought back": (_heads_not_brought_back, {"cp": 2, "context": "ulysses"}, "gradient"),
    "replicas keep their own gradients": (_replicas_apart, {"dp": 4, "zero": 2, "replicas": 2}, "gradient"),
    "a put-off gradient lost": (_lost_put_off_sum, {"pp": 2, "schedule": "zb-h1", "microbatch": 1}, "gradient"),
}


def _prove_with(rank, world, fault, run, folder):
    plant, _, _ = FAULTS[fault]
    batches = small.batches(packed=False)
    with plant():
        return prove(World(rank, world, Device("cpu")), run, batches, Path(folder), reruns=False)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught_and_named(pool, references, fault):  # noqa: F811
    _, plan, kind = FAULTS[fault]
    run = resolve(small.config(packed=False, **plan))
    verdict = pool.run(run.plan.mesh.world, _prove_with, fault, run, references(run), timeout_s=60)[0]
    assert not verdict.is_proven
    assert verdict.first is not None
    assert verdict.first.kind == kind, verdict.first.describe()
