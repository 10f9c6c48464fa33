"""When instructions ran: events on a GPU that is made up, and clocks of hosts that are set apart."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from datetime import timedelta

import pytest

import small
from superstep.comm.clock_sync import offset_to_rank_0
from superstep.comm.device import Device
from superstep.comm.mesh import build_mesh
from superstep.comm.objects import gather
from superstep.engine.engine import Engine
from superstep.engine.instruction_timer import CudaRecorder, HostRecorder, recorder_for
from superstep.engine.values.microbatch import microbatches, rows
from superstep.model.axes import units
from superstep.plan.resolution.resolve import resolve
from superstep.program.instructions import Fetch, Forward, Recv, Reduce, Send, lane

ZERO_S = 5.0
"""When the clock of the host began."""


@dataclass
class Stream:
    """A queue of work: how far it has come."""

    device: object = None
    at_s: float = 0.0

    def wait_event(self, event):
        self.at_s = max(self.at_s, event.at_s)


@dataclass
class Gpu:
    """torch.cuda as far as the recorder knows it, with one stream for compute. The host takes no time at all."""

    compute: Stream = field(default_factory=Stream)
    stack: list = field(default_factory=list)

    @property
    def now(self):
        return self.stack[-1] if self.stack else self.compute

    def Stream(self, device):  # noqa: N802 - torch's own name
        return Stream(device)

    @contextlib.contextmanager
    def stream(self, stream):
        self.stack.append(stream)
        yield
        self.stack.pop()

    def Event(self, *, enable_timing):  # noqa: N802 - torch's own name
        assert enable_timing
        return Event(self)

    def synchronize(self, device):
        assert str(device) == "cuda:0"


@dataclass
class Event:
    gpu: Gpu
    at_s: float = -1.0

    def record(self):
        self.at_s = self.gpu.now.at_s

    def synchronize(self):
        assert self.at_s >= 0

    def elapsed_time(self, end):
        return (end.at_s - self.at_s) * 1000


@dataclass
class Work:
    """A collective, which any stream may wait for."""

    gpu: Gpu
    end_s: float

    def wait(self):
        self.gpu.now.at_s = max(self.gpu.now.at_s, self.end_s)

    def is_done(self):
        return True


class Step:
    """A step on that GPU: computes take their seconds of the compute stream, lanes run beside it one after another."""

    def __init__(self):
        self.gpu = Gpu()
        self.lanes = {}
        self.recorder = CudaRecorder(Device("cuda"), lambda: ZERO_S + self.gpu.compute.at_s, self.gpu)

    def compute(self, instruction, takes_s, after=None):
        if after:
            after.wait()
        self.recorder.begin()
        self.gpu.compute.at_s += takes_s
        self.recorder.end(instruction, None)

    def start(self, instruction, takes_s):
        self.recorder.begin()
        queue = (type(instruction), lane(instruction), getattr(instruction, "peer", None))
        end_s = max(self.gpu.compute.at_s, self.lanes.get(queue, 0.0)) + takes_s
        self.lanes[queue] = end_s
        work = Work(self.gpu, end_s)
        self.recorder.end(instruction, work)
        return work


def test_events_tell_when_a_gpu_ran_what():
    step = Step()
    first = step.start(Fetch(0), 2.0)
    step.start(Fetch(1), 3.0)  # its lane is busy until 2
    step.compute(Forward(0, 0, "all"), 4.0, after=first)  # from 2 to 6, beside the second fetch
    step.start(Send("act", 0, 0, 1), 1.0)
    slow = step.start(Recv("grad", 1, 0, 1), 10.0)  # on its way from 6 to 16
    step.start(Reduce(0), 1.0)
    step.start(Send("act", 0, 1, 2), 1.0)  # to another rank: no queue behind the first
    step.compute(Forward(1, 0, "all"), 1.0, after=slow)
    seen = [(r.index, round(r.start_s - ZERO_S, 6), round(r.end_s - ZERO_S, 6)) for r in step.recorder.ran()]
    assert seen == [(0, 0, 2), (1, 2, 5), (2, 2, 6), (3, 6, 7), (4, 6, 16), (5, 6, 7), (6, 6, 7), (7, 16, 17)]
    assert step.recorder.issued == 8
    # The host's clock, which stood still while all this was issued, would have told of none of it.
    assert step.gpu.compute.at_s == 17


def test_only_a_gpus_step_that_is_kept_has_events():
    kinds = [type(recorder_for(Device(kind), is_kept=kept)) for kind in ("cpu", "cuda") for kept in (False, True)]
    assert kinds == [HostRecorder, HostRecorder, HostRecorder, CudaRecorder]


class Notes(HostRecorder):
    """Keeps what each instruction has under way."""

    def __init__(self):
        super().__init__()
        self.under_way = []

    def end(self, instruction, under_way):
        super().end(instruction, under_way)
        self.under_way.append((instruction, under_way))


def started(rank, world):
    """Which instructions have something under way, and the times of all."""
    found = []
    for layout in ({"pp": 2, "dp": 1}, {"dp": 2, "zero": 3}):
        run = resolve(small.config(microbatch=2, **layout))
        mesh = build_mesh(run.plan, rank, Device("cpu"), timeout=timedelta(seconds=60))
        engine = Engine(run, units(run.shape), mesh)
        (batch,) = small.batches(steps=1)
        mine = rows(run.plan, mesh)
        notes = Notes()
        engine.train_step(
            microbatches(batch.tokens_BS[mine], batch.targets_BS[mine], run.plan, mesh),
            valid_tokens=batch.valid_tokens,
            lr=1e-3,
            record=notes,
        )
        assert [r.index for r in notes.ran()] == list(range(notes.issued))
        assert notes.issued == len(engine.step_program.ranks[mesh.at.pp])
        found += [(type(i).__name__, lane(i), pending is not None) for i, pending in notes.under_way]
        mesh.destroy()
    return sorted(set(found))


SHIFTS_S = (0.0, 1000.0, 1000.0, -70.0)
HOSTS = ("a", "b", "b", "c")


def compared(rank, world):
    """This rank's offset where hosts differ and where they do not, and a meeting that is one moment on all ranks."""

    def clock():
        return time.perf_counter() + SHIFTS_S[rank]

    offset = offset_to_rank_0(Device("cpu"), clock=clock, host=HOSTS[rank])
    before_s = clock() + offset.seconds
    gather(rank, int)
    after_s = clock() + offset.seconds
    alike = offset_to_rank_0(Device("cpu"), clock=clock, host="a")
    return offset, alike.seconds, (before_s, after_s)


@pytest.mark.multiproc
class TestRanks:
    def test_what_runs_beside_the_compute_is_handed_over(self, pool):
        for found in pool.run(2, started):
            names = {name for name, _, has_some in found if has_some}
            assert names == {"Fetch", "Reduce", "Send", "Recv"}
            assert all((where == "compute") is not has_some for _, where, has_some in found)

    def test_clocks_of_other_hosts_are_put_on_rank_0s(self, pool):
        found = pool.run(4, compared)
        for (offset, alike, _), shift_s in zip(found, SHIFTS_S, strict=True):
            assert abs(offset.seconds + shift_s) <= offset.within_s + 1e-9
            assert alike == 0.0
        assert found[0][0].within_s == 0.0, "rank 0's host has its own clock"
        assert found[1][0] == found[2][0], "ranks of one host share the best of theirs"
        # On one axis nobody has left the meeting before everyone had come.
        slack_s = max(offset.within_s for offset, _, _ in found) * 2
        assert max(before for _, _, (before, _) in found) <= min(after for _, _, (_, after) in found) + slack_s
