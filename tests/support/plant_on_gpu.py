"""Faults to plant in a training step on a GPU, each as somebody might write it: what a CPU would not notice.

A fault is a context in which the engine of a rank is wrong. ``ON_RANK`` is the rank that is hurt, where it is one.
"""

import contextlib
import os
import threading
from unittest import mock

import torch

from superstep.comm import collectives
from superstep.comm.collectives import DONE
from superstep.engine import optimizer
from superstep.engine.executor import Executor
from superstep.engine.flat import sync
from superstep.engine.flat.snapshots import Snapshots
from superstep.engine.parallel import ring
from superstep.program.instructions import Fetch, Forward, Free, Reduce

ON_RANK = 1


def no_fault(rank):
    return contextlib.nullcontext()


def issues(change):
    """The executor with another way of issuing: ``change(issue, executor, instruction)``."""
    inner = Executor._issue

    def issue(self, instruction):
        change(lambda *asked: inner(self, *asked), self, instruction)

    return mock.patch.object(Executor, "_issue", issue)


def frees_parameters_before_they_are_used(rank):
    def change(issue, executor, instruction):
        if isinstance(instruction, Forward):
            issue(Free(instruction.unit))
        issue(instruction)

    return issues(change)


def frees_parameters_while_they_are_fetched(rank):
    def change(issue, executor, instruction):
        issue(instruction)
        if isinstance(instruction, Fetch):
            issue(Free(instruction.unit))
            executor._machine.buffers[instruction.unit][0].restore_full()

    return issues(change)


def frees_gradients_while_they_are_summed(rank):
    def change(issue, executor, instruction):
        issue(instruction)
        if isinstance(instruction, Reduce):
            for buffers in executor._machine.trained[instruction.unit]:
                buffers.drop_gradient()
                buffers.ready_gradient()

    return issues(change)


def reads_a_pinned_copy_at_once(rank):
    def sum_over(values, group):
        return collectives.sum_over(values, group).to("cpu", non_blocking=True)

    return mock.patch.object(optimizer, "sum_over", sum_over)


def fills_a_pinned_buffer_again_at_once(rank):
    """Tokens by way of one buffer, which the next microbatch fills while the copy of the last one is under way."""
    staging = []

    def field_of(self, name, m):
        tokens = self._flight.context.microbatches[m].input
        staging[:] = staging or [torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)]
        staging[0].fill_(m)
        return staging[0].to(tokens.device, non_blocking=True)

    return mock.patch.object(Executor, "_field", field_of)


def changes_what_was_kept(rank):
    """In place, on the compute stream: torch's own count of versions sees it."""
    return _after_forward(lambda x: x.detach().mul_(2))


def changes_what_was_kept_on_a_stream_of_its_own(rank):
    """Behind torch's back."""
    stream = torch.cuda.Stream()

    def change(x):
        with torch.cuda.stream(stream):
            x.data.mul_(2)

    return _after_forward(change)


def updates_on_a_stream_of_its_own(rank):
    """Which waits for nothing."""
    inner = Executor.run

    def run(self, *args, **named):
        step = self._step

        def update(*given):
            with torch.cuda.stream(torch.cuda.Stream()):
                return step(*given)

        self._step = update
        return inner(self, *args, **named)

    return mock.patch.object(Executor, "run", run)


def frees_what_another_stream_made(rank):
    """A copy of the tokens is let go of before the compute stream has read it."""
    inner, side = Executor._field, torch.cuda.Stream()

    def field_of(self, name, m):
        tokens, compute = inner(self, name, m), torch.cuda.current_stream()
        side.wait_stream(compute)
        with torch.cuda.stream(side):
            copied = tokens.clone()
        compute.wait_stream(side)
        copied.float().sum()
        del copied
        return tokens

    return mock.patch.object(Executor, "_field", field_of)


def _after_forward(change):
    inner = Executor._forward

    def forward(self, unit, m, **how):
        inner(self, unit, m, **how)
        if unit == 1:
            change(self._flight.kept[unit, m][0][0])

    return mock.patch.object(Executor, "_forward", forward)


def fetches_in_another_order(rank):
    swapped = []

    def change(issue, executor, instruction):
        if rank == ON_RANK and instruction == Fetch(0) and not swapped:
            issue(Fetch(1))
            issue(Fetch(0))
            swapped.append(instruction)
        elif instruction != Fetch(1) or len(swapped) != 1:
            issue(instruction)
        else:
            swapped.append(instruction)

    return issues(change)


def leaves_out_a_sum(rank):
    def change(issue, executor, instruction):
        if rank == ON_RANK and instruction == Reduce(2):
            executor._flight.reducing[2] = DONE
        else:
            issue(instruction)

    return issues(change)


def sums_too_few(rank):
    inner = sync.all_reduce
    short = rank == ON_RANK
    return mock.patch.object(sync, "all_reduce", lambda buffer, group: inner(buffer[: len(buffer) - short], group))


def sums_in_another_type(rank):
    inner = sync.all_reduce

    def all_reduce(buffer, group):
        return inner(buffer.double() if rank == ON_RANK else buffer, group)

    return mock.patch.object(sync, "all_reduce", all_reduce)


def sends_over_the_other_channel(rank):
    inner = Executor._channel

    def channel(self, source, target, wire, peer):
        if rank == ON_RANK and wire == "act":
            source, target, wire = target, source, "grad"
        return inner(self, source, target, wire, peer)

    return mock.patch.object(Executor, "_channel", channel)


def sends_keys_the_other_way(rank):
    """In a ring of four, one rank sends back where it should send on."""
    inner = ring.dist.P2POp

    def operation(op, tensor, *, group, tag, group_peer):
        if rank == ON_RANK and op is ring.dist.isend:
            group_peer = (rank - 1) % group.size()
        return inner(op, tensor, group=group, tag=tag, group_peer=group_peer)

    return mock.patch.object(ring.dist, "P2POp", operation)


def sends_before_it_receives(rank):
    """Keys of a ring outside of a group of calls."""

    def batch(operations):
        ends = {ring.dist.isend: "group_dst", ring.dist.irecv: "group_src"}
        return [one.op(one.tensor, group=one.group, **{ends[one.op]: one.group_peer}) for one in operations]

    return mock.patch.object(ring.dist, "batch_isend_irecv", batch)


def computes_in_a_thread_of_the_first_gpu(rank):
    """Where a thread sets no GPU, as that which writes a metric might."""

    def change(issue, executor, instruction):
        issue(instruction)
        if instruction == Forward(0, 0, "all"):
            thread = threading.Thread(target=lambda: torch.ones(1, device="cuda").sum())
            thread.start()
            thread.join()

    return issues(change)


def computes_in_a_fork(rank):
    def change(issue, executor, instruction):
        if instruction != Forward(0, 0, "all"):
            return issue(instruction)
        if child := os.fork():
            os.waitpid(child, 0)
            return issue(instruction)
        try:
            issue(instruction)
        except RuntimeError as error:
            os.write(2, f"the fork: {error}\n".encode())
        os._exit(0)

    return issues(change)


def copies_a_state_before_it_is_there(rank):
    inner = Snapshots._copy

    def copy(self, unit, slot, ready, **how):
        return inner(self, unit, slot, torch.cuda.Event(), **how)

    return mock.patch.object(Snapshots, "_copy", copy)
