"""Faults planted in training steps on emulated GPUs: each ends the run, or is noted, with the line that made it.

Waits for collectives are left out in ``test_left_out_waits``. Of a step's other waits only that of the copies of its
state is for memory: those of ``CudaRecorder`` are for times, as are the host's in measurements. The engine calls no
``record_stream``: what another stream uses is kept until that has been waited for.
"""

import re
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch

import plant_on_gpu as plant
import small
from strict_ranks import begin_nccl, device_module, run_to_the_end
from superstep.comm.device import Device
from superstep.comm.mesh import build_mesh
from superstep.engine.engine import Engine
from superstep.engine.instruction_timer import CudaRecorder, HostRecorder
from superstep.engine.values.microbatch import microbatches_of, rows
from superstep.model.axes import units
from superstep.plan.config import StateConfig
from superstep.plan.resolution.resolve import resolve
from superstep.state.manifest import Position
from superstep.state.snapshots.memory_snapshot import make_memories

pytestmark = pytest.mark.strict

ZERO_3, ZERO_0, PIPELINE, RING = {"dp": 2, "zero": 3}, {"dp": 2, "zero": 0}, {"pp": 2}, {"cp": 2, "context": "ring"}
RING_OF_4 = {"cp": 4, "context": "ring"}

LATE_S, HUNG_S = 60, 8
"""How long a call may take: on a busy machine, and where it never ends."""

DIFFERENTLY = r"call differently: rank \d .*{0}.* rank \d .*{0}"
FREED = r"is freed \(superstep/engine/flat/buffers.py:\d+.*\) while call \d+ of .*{}.*engine/flat/sync.py:\d+.* writes"
PINNED = r'pinned memory that a copy still uses\n(?s:.*)File ".*{}", line \d+ in {}'
HANGS = r"watchdog: call \d+ of .*: {0} .*superstep/{1}:\d+.* has not ended in its time"

FAULTS = {
    plant.frees_parameters_before_they_are_used: (
        ZERO_3, r"illegal memory access: a tensor ends at byte \d+ of a storage that has 0 .*superstep/.*:\d+", LATE_S),
    plant.frees_parameters_while_they_are_fetched: (
        ZERO_3, FREED.format("all_gather"), LATE_S),
    plant.frees_gradients_while_they_are_summed: (
        ZERO_3, FREED.format("reduce_scatter"), LATE_S),
    plant.reads_a_pinned_copy_at_once: (
        ZERO_3, PINNED.format("engine/optimizer.py", "sums"), LATE_S),
    plant.fills_a_pinned_buffer_again_at_once: (
        ZERO_3, PINNED.format("plant_on_gpu.py", "field_of"), LATE_S),
    plant.changes_what_was_kept: (
        ZERO_3, r"modified by an inplace operation", LATE_S),
    plant.changes_what_was_kept_on_a_stream_of_its_own: (
        ZERO_3, r"race: aten::mul.* \(.*plant_on_gpu.py:\d+.*\) writes .* that .* \(superstep/.*\) \w+ on", LATE_S),
    plant.updates_on_a_stream_of_its_own: (
        ZERO_3, r"race: aten::mul.* \(.*/token_metrics.py:\d+.*\) reads .* that .* \(superstep/.*\) w", LATE_S),
    plant.frees_what_another_stream_made: (
        ZERO_3, r"is freed \(.*plant_on_gpu.py:\d+.*\) while .* \(.*plant_on_gpu.py:\d+.*\) reads on stream", LATE_S),
    plant.fetches_in_another_order: (
        ZERO_3, DIFFERENTLY.format(r"engine/flat/sync.py:\d+"), LATE_S),
    plant.leaves_out_a_sum: (
        ZERO_3, HANGS.format(r"\w+_single", "comm/collectives.py"), HUNG_S),
    plant.sums_too_few: (
        ZERO_0, DIFFERENTLY.format(r"engine/flat/sync.py:\d+"), LATE_S),
    plant.sums_in_another_type: (
        ZERO_0, DIFFERENTLY.format(r"engine/flat/sync.py:\d+"), LATE_S),
    plant.sends_over_the_other_channel: (
        PIPELINE, HANGS.format("(send|recv)", "engine/executor.py"), HUNG_S),
    plant.sends_keys_the_other_way: (
        RING_OF_4, HANGS.format("send and recv", "engine/parallel/ring.py"), HUNG_S),
    plant.sends_before_it_receives: (
        RING, HANGS.format("send", "engine/parallel/ring.py"), HUNG_S),
    plant.computes_in_a_thread_of_the_first_gpu: (
        ZERO_3, r"rank 1 has used GPUs \[0, 1\]", LATE_S),
    plant.computes_in_a_fork: (
        ZERO_3, r"the fork: Cannot re-initialize CUDA in forked subprocess", LATE_S),
    plant.copies_a_state_before_it_is_there: (
        ZERO_3, r"race: copy_ to the host .*snapshots.py:\d+.* reads .* that .*\(superstep/.*\) writes", LATE_S),
}  # fmt: skip
"""Of each fault a layout, what is said of it, and how long a call may take."""

OF_SNAPSHOTS = (plant.copies_a_state_before_it_is_there, plant.no_fault)
"""Where a step has copies of its state: what their thread waits for, the host knows to be over."""


def train(rank, world, folder, layout, fault, limit_s):
    """A step as it is, of which nothing is said; then one with the fault, and what is noted of it."""
    begin_nccl(rank, world, folder, limit_s)
    config = small.config(microbatch=2, layers=small.layers_for(layout), **layout)
    run = resolve(replace(config, state=StateConfig(snapshot_every=1)))
    (batch,) = small.batches(steps=1)
    device = Device("cuda", rank)
    mesh = build_mesh(run.plan, rank, device, timeout=timedelta(seconds=limit_s))
    engine = Engine(run, units(run.shape), mesh)
    copies = keep_copies(engine) if fault in OF_SNAPSHOTS else None
    mine = microbatches_of(batch.rows(rows(run.plan, mesh)), run.plan, mesh)

    def step(number):
        if copies is not None:
            copies.begin(Position(step=number, samples=number), print, is_for_disk=False)
        record = CudaRecorder(device) if fault is plant.no_fault else HostRecorder()
        engine.train_step(mine, valid_tokens=batch.valid_tokens, lr=1e-3, record=record)
        record.ran()
        return device_module().take_races()

    assert step(1) == []
    assert device_module().contexts() == {rank}
    with fault(rank):
        races = step(2)
    torch.cuda.synchronize()
    used = sorted(device_module().contexts())
    sys.stderr.write("\n".join([*races, f"rank {rank} has used GPUs {used}", "done"]))


def keep_copies(engine):
    """Snapshots of the engine's state, as a run has them."""
    _, (memory,) = make_memories(1)
    copies = engine.keep_snapshots(memory)
    copies.lay_out(engine.pieces(), {}, {}, Path("nowhere"))
    return copies


def world_of(layout):
    return resolve(small.config(microbatch=2, layers=small.layers_for(layout), **layout)).plan.mesh.world


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_named_with_its_line(tmp_path, fault):
    layout, said, limit_s = FAULTS[fault]
    ends = run_to_the_end(world_of(layout), train, tmp_path, layout, fault, limit_s)
    assert any(re.search(said, text) for _, text in ends), "\n".join(
        f"{status}: {text[-3000:]}" for status, text in ends
    )


@pytest.mark.parametrize("layout", [ZERO_3, ZERO_0, PIPELINE, RING, RING_OF_4], ids=str)
def test_nothing_is_named_where_there_is_no_fault(tmp_path, layout):
    for rank, (status, text) in enumerate(
        run_to_the_end(world_of(layout), train, tmp_path, layout, plant.no_fault, LATE_S)
    ):
        assert (status, text) == (0, f"rank {rank} has used GPUs [{rank}]\ndone")
