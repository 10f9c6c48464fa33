"""Copies of a rank's state from its GPU: its threads use no other, and memory that cannot be pinned is copied to."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import small
from strict_ranks import device_module
from superstep.comm.mesh import build_mesh
from superstep.engine.engine import Engine
from superstep.launch.ranks import launch_from
from superstep.model.axes import units
from superstep.plan.config import StateConfig
from superstep.plan.resolution.resolve import resolve
from superstep.state.manifest import Position
from superstep.state.snapshots.memory_snapshot import make_memories, pieces_of
from superstep.train.proof.prove_tolerance import TIMEOUT

pytestmark = pytest.mark.strict


def register(memory):
    """What the driver says of it; anything but 0 stays with a thread of its own."""
    whole = torch.frombuffer(memory.view, dtype=torch.uint8)
    return torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), whole.numel(), 0)


def copies_of(world, is_taken):
    """Why the memory is not pinned, whether it is registered before and after the end, the GPUs that were used, and
    whether a copy is right.
    """
    run = resolve(replace(small.config(layers=2, dp=1), state=StateConfig(snapshot_every=1)), 1)
    engine = Engine(run, units(run.shape), build_mesh(run.plan, 0, world.device, timeout=TIMEOUT))
    _, (memory,) = make_memories(1)
    for _ in range(1 + is_taken):
        copies = engine.keep_snapshots(memory)
        copies.lay_out(engine.pieces(), {}, {}, Path("nowhere"))
    copies.begin(Position(step=1), print, is_for_disk=False)
    for unit in engine.buffers:
        copies.copy(unit).wait()
    state = {(p.kind, p.name): p.values.cpu() for p in engine.pieces()}
    held = {(p.kind, p.name): p.values for p in pieces_of(memory, memory.whole()[1])}
    is_same = held.keys() == state.keys() and all(torch.equal(held[key], state[key]) for key in held)
    is_registered = register(memory) != 0
    copies.close()
    return copies.unpinned, is_registered, register(memory) != 0, device_module().contexts(), is_same


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_ranks_threads_take_memory_on_its_own_gpu_alone(is_taken):
    """Nor does the driver's refusal stay with the thread that launches kernels, where the next one would raise it."""
    why, is_registered, stays, contexts, is_same = launch_from(3, "cuda", 1, copies_of, is_taken)
    assert why == ("part or all of the requested memory range is already mapped (712)" if is_taken else "")
    assert is_registered
    assert stays == is_taken, "who has pinned it gives it up at the end, and nobody else"
    assert contexts == {3}
    assert is_same
