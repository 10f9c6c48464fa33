"""One rank's copies: of the state that a step begins with, taken while it runs, and put back in another engine."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import small
from superstep.comm.device import Device
from superstep.comm.mesh import build_mesh
from superstep.engine.engine import Engine
from superstep.engine.flat import snapshots
from superstep.engine.flat.snapshots import FlushResult, Snapshots
from superstep.engine.instruction_timer import HostRecorder
from superstep.engine.values.microbatch import microbatches, rows
from superstep.errors import Fault
from superstep.kernels.checksum import checksum
from superstep.launch.ranks import launch_on
from superstep.model.axes import units
from superstep.plan.config import StateConfig
from superstep.plan.resolution.resolve import resolve
from superstep.program.instructions import Snapshot, Step
from superstep.state.manifest import Position
from superstep.state.snapshots.memory_snapshot import ON_DISK, make_memories, pieces_of


def _state(engine):
    return {(p.kind, p.name): p.values.clone() for p in engine.pieces()}


def _never(flushed):
    raise AssertionError(f"nothing was wanted on disk, and of {flushed} was told")


def _steps(world, compute, optimizer):
    """Three steps of which two are copied: the states before each, the memory, and what was recorded of the last."""
    config = replace(small.config(layers=2, dp=1, compute=compute), state=StateConfig(snapshot_every=1))
    run = resolve(replace(config, train=replace(config.train, optimizer=optimizer)), 1)
    mesh = build_mesh(run.plan, 0, world.device, timeout=timedelta(seconds=60))
    engine = Engine(run, units(run.shape), mesh)
    _, (memory,) = make_memories(1)
    copies = engine.keep_snapshots(memory)
    copies.lay_out(engine.pieces(), {}, {}, Path("nowhere"))
    states, record = [], HostRecorder()
    for number, batch in enumerate(small.batches(steps=3)):
        states.append(_state(engine))
        record = HostRecorder()
        if number != 1:
            copies.begin(Position(step=number, samples=8 * number), _never, is_for_disk=False)
        mine = rows(run.plan, mesh)
        parts = microbatches(batch.tokens_BS[mine], batch.targets_BS[mine], run.plan, mesh)
        engine.train_step(parts, valid_tokens=batch.valid_tokens, lr=1e-2, record=record)
    other = Engine(run, units(run.shape), mesh)
    position = other.keep_snapshots(memory).restore(2)
    other.note_loaded(position.step)
    parameters = [b.full.clone() for each in other.buffers.values() for b in each]
    held = {slot: {(p.kind, p.name): p.values.clone() for p in pieces_of(memory, slot)} for slot in range(2)}
    ran = list(zip(engine.step_program.ranks[0], record.ran(), strict=True))
    return states, held, memory.whole(), position, _state(other), parameters, ran


@pytest.mark.parametrize(("compute", "optimizer"), [("fp32", "adamw"), ("bf16", "adamw"), ("fp32", "lion")])
def test_a_copy_is_the_state_that_its_step_began_with(compute, optimizer):
    states, held, whole, position, restored, parameters, ran = launch_on("cpu", 1, _steps, compute, optimizer)
    assert set(whole) == {0, 2}, "where none is due, none is made"
    for step, slot in whole.items():
        assert set(held[slot]) == set(states[step])
        assert all(torch.equal(held[slot][key], states[step][key]) for key in states[step]), f"step {step}"
    assert not torch.equal(held[whole[0]]["weight", "model.norm.weight"], states[2]["weight", "model.norm.weight"])
    assert position == Position(step=2, samples=16)
    assert all(torch.equal(restored[key], states[2][key]) for key in states[2])
    assert all(found.any() for found in parameters), "what computes follows the master weights"
    copies = [seconds for i, seconds in ran if isinstance(i, Snapshot)]
    (update,) = [seconds for i, seconds in ran if isinstance(i, Step)]
    assert copies
    assert all(copy.start_s < copy.end_s <= update.start_s for copy in copies), "recorded as it ran, before the update"


def _alone(memory):
    """What copies a state of twelve numbers."""
    held = SimpleNamespace(state=tuple(torch.ones(4) for _ in range(3)))
    return Snapshots(memory, {0: (held,)}, Device("cpu"))


def test_without_other_hosts_no_copy_keeps_its_slot():
    """Else the state that a run begins with stays, and training waits for the disk with each checkpoint."""
    _, (memory,) = make_memories(1)
    copies = _alone(memory)
    copies.lay_out(iter(()), {}, {}, Path("nowhere"))
    for step in range(3):
        copies.begin(Position(step=step), _never, is_for_disk=False)
        copies.copy(0).wait()
    assert set(memory.whole()) == {1, 2}
    assert memory.states(held=True) == {}


def test_a_copy_is_damaged_where_it_is_not_what_it_was_made_of(monkeypatch):
    """The checksum is of the buffers: an error of the copy itself is seen, too."""
    _, (memory,) = make_memories(1)
    copies = _alone(memory)
    copies.lay_out(iter(()), {}, {}, Path("nowhere"))

    def copy(into, values, first=0):
        into.copy_(values).view(torch.int32)[2] ^= 1 << 9
        return checksum(values, first)

    copies.begin(Position(step=1), _never, is_for_disk=False)
    copies.copy(0).wait()
    assert not copies.is_damaged(1)
    monkeypatch.setattr(snapshots, "copy_summed", copy)
    copies.begin(Position(step=2), _never, is_for_disk=False)
    copies.copy(0).wait()
    assert copies.is_damaged(2)
    with pytest.raises(Fault, match="the copy of step 2 in memory has other bits than were copied"):
        copies.fill(2)
    assert copies.fill(1).step == 1


def test_of_a_checkpoint_is_told_though_the_rank_is_killed_before_it_could():
    _, (memory,) = make_memories(1)
    first = _alone(memory)
    first.lay_out(iter(()), {}, {}, Path("nowhere"), slots=2)
    for step in (5, 6):
        first.begin(Position(step=step), _never, is_for_disk=step == 5)
        first.copy(0).wait()
    slot = memory.whole()[5]
    for field, value in {"written_bytes": 48, "microseconds": 2_000_000, "disk": ON_DISK}.items():
        memory.put(slot, field, value)

    def killed(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # the next copy needs the slot, and who would tell of it is killed
        first.begin(Position(step=7), killed, is_for_disk=False)
    second = _alone(memory)
    assert second.restore(6).step == 6
    told = []
    second.begin(Position(step=7), told.append, is_for_disk=False)
    second.report_written(told.append)
    assert told == [FlushResult(step=5, bytes=48, seconds=2.0, is_on_disk=True, problems="")], "once"
