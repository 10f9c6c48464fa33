"""Faults to plant in what passes between ranks and where what is cut meets: tp, pipelines, rings, experts, rows."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import torch
import torch.distributed as dist

import small
from superstep.comm import collectives
from superstep.engine import build_modules, executor, optimizer
from superstep.engine.attention import choose_attention
from superstep.engine.engine import Engine
from superstep.engine.executor import Executor
from superstep.engine.flat import buffers, sync
from superstep.engine.parallel import expert, ring, tensor, ulysses
from superstep.engine.values import microbatch as batches_module
from superstep.plan.sharding.sequence import blocks
from superstep.program.instructions import BackwardWeight
from superstep.train.proof import prove_tolerance


def no_reduction(buffer, group, **_):
    return collectives.DONE


def own_divisor():
    inner = Engine.train_step

    def train_step(self, parts, *, valid_tokens, **rest):
        mine = sum(int((m.targets != small.IGNORE).sum()) for m in parts) * self.mesh.shape.dp
        return inner(self, parts, valid_tokens=mine, **rest)

    return mock.patch.object(Engine, "train_step", train_step)


def shifted_rows():
    inner = prove_tolerance.rows

    def rows(plan, mesh):
        found = inner(plan, mesh)
        return slice(0, found.stop - found.start) if mesh.at.dp else found

    return mock.patch.object(prove_tolerance, "rows", rows)


def stale_parameters():
    return mock.patch.object(sync, "all_gather", no_reduction)


def untied():
    # Only the tie sums over a group of two pipeline ranks here.
    return mock.patch.object(sync, "all_reduce", no_reduction)


def no_partial_sum():
    return mock.patch.object(executor, "reduce_partial")


def own_norm():
    def sums(values, group):
        total = collectives.sum_over(values.clone(), group)
        return torch.stack((values[0], *total[1:]))

    return mock.patch.object(optimizer, "sum_over", sums)


def no_gradient_sum_on_entering():
    return mock.patch.object(tensor.Enter, "backward", staticmethod(lambda ctx, grad: (grad, None)))


def wrong_vocabulary_offset():
    inner = tensor.vocabulary_lookup

    def lookup(layer, forward, group, leave):
        class Shifted:
            def rank(self):
                return 0

        return inner(layer, forward, Shifted(), lambda x, _: leave(x, group))

    return mock.patch.object(tensor, "vocabulary_lookup", lookup)


def lost_microbatch():
    inner = executor.Executor._backward

    def backward(self, unit, m):
        inner(self, unit, m)
        if unit == 1 and m == 0:
            self._machine.buffers[1][0].gradient.zero_()

    return mock.patch.object(executor.Executor, "_backward", backward)


def same_keys_all_round():
    def round_(kv, group):
        for block in blocks(group.rank(), group.size()):
            yield block, kv

    return mock.patch.object(ring, "pass_keys_round", round_)


def positions_of_the_first_rank():
    inner = choose_attention.positions
    return mock.patch.object(choose_attention, "positions", lambda tokens, *, cp, rank: inner(tokens, cp=cp, rank=0))


def heads_not_brought_back():
    def backward(ctx, grad):
        return grad, None

    return mock.patch.object(ulysses.Exchange, "backward", staticmethod(backward))


def own_seed():
    inner = buffers.initial

    def initial(spec, shape, seed):
        return inner(spec, shape, seed + dist.get_rank())

    return mock.patch.object(buffers, "initial", initial)


def replicas_apart():
    return mock.patch.object(executor, "reduce_replicas", return_value=collectives.DONE)


def lost_put_off_sum():
    inner = executor.Executor._issue

    def issue(self, instruction):
        if instruction == BackwardWeight(1, 0):
            self._flight.put_off.pop((1, 0))
        else:
            inner(self, instruction)

    return mock.patch.object(executor.Executor, "_issue", issue)


def leaves_unsummed():
    return mock.patch.object(tensor.Leave, "forward", staticmethod(lambda ctx, x, group: x.clone()))


def own_part_unsummed(cls, method):
    def own(x, group):
        return x.chunk(group.size(), dim=1)[group.rank()].clone()

    if method == "backward":
        return mock.patch.object(cls, method, staticmethod(lambda ctx, grad: (own(grad, ctx.group), None)))

    def forward(ctx, x, group):
        ctx.group = group
        return own(x, group)

    return mock.patch.object(cls, method, staticmethod(forward))


def wrong_column_offset():
    inner = build_modules.own_part

    def shifted(*given):
        columns = inner(*given)
        return replace(columns, first=columns.first + 1)

    return mock.patch.object(build_modules, "own_part", shifted)


def same_share_of_the_loss():
    inner = build_modules.part
    return mock.patch.object(build_modules, "part", lambda targets, tp: inner(targets.flip(1), tp))


def other_targets():
    inner = Executor.run

    def run(self, context):
        if self._machine.mesh.at.pp == self._machine.mesh.shape.pp - 1:
            context = replace(context, microbatches=context.microbatches[::-1])
        return inner(self, context)

    return mock.patch.object(Executor, "run", run)


def sent(wire, change):
    inner = Executor._send

    def send(self, sent, unit, m, peer):
        values = self._flight.values
        if sent == wire == "act":
            output, uses = values._outputs[unit, m]
            values._outputs[unit, m] = change(output), uses
        elif sent == wire:
            values._gradients[unit, m] = change(values._gradients[unit, m])
        inner(self, sent, unit, m, peer)

    return mock.patch.object(Executor, "_send", send)


def put_off_sums_twice():
    inner = Executor._backward_weight

    def backward_weight(self, unit, m):
        self._flight.put_off[unit, m] = self._flight.put_off[unit, m] * 2
        inner(self, unit, m)

    return mock.patch.object(Executor, "_backward_weight", backward_weight)


def recomputed_from_another():
    inner = Executor._recompute

    def recompute(self, unit, m):
        (x,), edge = self._flight.kept[unit, m]
        if unit == 2:
            self._flight.kept[unit, m] = ([x.detach().roll(1, 1).requires_grad_()], edge)
        inner(self, unit, m)

    return mock.patch.object(Executor, "_recompute", recompute)


def ring_gradients_stay():
    inner = ring.Hop.start.__func__

    def start(cls, leaving, group, tag):
        return cls([], leaving) if tag == ring.GRADIENTS_TAG else inner(cls, leaving, group, tag)

    return mock.patch.object(ring.Hop, "start", classmethod(start))


def blocks_not_merged():
    return mock.patch.object(ring, "merge")


def heads_to_the_next_rank():
    def forward(ctx, x, group):
        ctx.group = group
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(out, x.contiguous(), group=group)
        return out.roll(1, 0)

    return mock.patch.object(ulysses.Exchange, "forward", staticmethod(forward))


def targets_of_the_whole():
    inner = batches_module.microbatches_of

    def microbatches_of(batch, plan, mesh):
        found = inner(batch, plan, mesh)
        size = batch.targets_BS.shape[1] // mesh.shape.cp
        straight = batch.targets_BS[:, mesh.at.cp * size : (mesh.at.cp + 1) * size].split(plan.microbatch)
        return [replace(m, targets=part.contiguous()) for m, part in zip(found, straight, strict=True)]

    return mock.patch.object(prove_tolerance, "microbatches_of", microbatches_of)


def rows_come_back_in_another_order():
    inner = expert.unsort
    return mock.patch.object(expert, "unsort", lambda x, order: inner(x, order).roll(1, 0))


def gradients_do_not_travel():
    def backward(ctx, grad):
        _, _, rows, _ = ctx.way
        return grad.new_zeros(rows, grad.shape[1]), None, None, None, None

    return mock.patch.object(expert.Travel, "backward", staticmethod(backward))


def routed_by_own_tokens():
    return mock.patch.object(
        expert.ExpertParallel, "whole", lambda self, x: x.repeat(1, self._sequence.group.size(), 1)
    )
