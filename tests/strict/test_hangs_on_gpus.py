"""Who hangs is judged on emulated GPUs by how far these have come: named is the rank that does, and none that is slow.

No clock decides: the limits are lowered while a rank is held up and the other one waits for it, and a slow rank goes on
once the launcher has judged for longer than they are that all stand.
"""

import threading
import time
from contextlib import nullcontext
from datetime import timedelta
from unittest import mock

import pytest
import torch

import small
from strict_ranks import device_module
from superstep.comm.mesh import build_mesh
from superstep.engine.engine import Engine
from superstep.engine.executor import Executor
from superstep.engine.values.microbatch import microbatches_of, rows
from superstep.errors import RankLost
from superstep.launch.ranks import launch_on
from superstep.model.axes import units
from superstep.monitor import hang_rules
from superstep.monitor.activity import Activity
from superstep.monitor.hang_detector import HangDetector
from superstep.plan.resolution.resolve import resolve
from superstep.program.instructions import Backward

pytestmark = pytest.mark.strict

ZERO_3, TENSORS = {"dp": 2, "zero": 3}, {"tp": 2}
ON_RANK, STEPS = 1, 3
TIMEOUT = timedelta(minutes=10)
STANDS_S = 3.0
"""How long all ranks have stood when a slow one goes on: longer than any limit that is lowered."""


def poll(path):
    while not path.exists():
        time.sleep(0.02)


def wait_for(path):
    """Until it is there, in a thread: the main one sleeps, as while autograd's has kernels compiled."""
    thread = threading.Thread(target=poll, args=(path,), daemon=True)
    thread.start()
    thread.join()


def backward_of(folder, hangs):
    """The first backward pass is held up."""
    issue = Executor._issue

    def slow(executor, instruction):
        if isinstance(instruction, Backward) and not (folder / "held up").exists():
            (folder / "held up").touch()
            hangs()
        issue(executor, instruction)

    return mock.patch.object(Executor, "_issue", slow)


def sleeps_in_a_backward_pass(step, folder):
    """Of the last step, which has run before."""
    return backward_of(folder, lambda: wait_for(folder / "never")) if step == STEPS else nullcontext()


def has_a_kernel_without_end(step, folder):
    """The GPU is held up; its host goes on until it waits for the step's numbers."""

    def launch():
        stream = torch.cuda.current_stream()
        never = folder / "never"
        device_module().launch(stream.stream_id or stream.device_index, [], [], lambda *_: poll(never), "spins")

    return backward_of(folder, launch) if step == STEPS else nullcontext()


def has_a_slow_first_backward_pass(step, folder):
    return backward_of(folder, lambda: wait_for(folder / "go on")) if step == 1 else nullcontext()


def is_slow_outside_of_the_program(step, folder):
    if step == STEPS:
        wait_for(folder / "go on")
    return nullcontext()


def train(world, layout, fault, folder):
    """Losses of some steps."""
    run = resolve(small.config(microbatch=2, layers=small.layers_for(layout), **layout))
    mesh = build_mesh(run.plan, world.rank, world.device, timeout=TIMEOUT)
    engine = Engine(run, units(run.shape), mesh, heart=world.heart)
    losses = []
    for step, batch in enumerate(small.batches(steps=STEPS), 1):
        mine = microbatches_of(batch.rows(rows(run.plan, mesh)), run.plan, mesh)
        with fault(step, folder) if world.rank == ON_RANK else nullcontext():
            losses.append(engine.train_step(mine, valid_tokens=batch.valid_tokens, lr=1e-3).loss)
    mesh.destroy()
    return losses


class Judge:
    """Follows the launcher's watcher: lowers its limits for as long as one rank is held up and the other one waits."""

    def __init__(self, patch, folder, lowered):
        self.patch, self.folder, self.lowered = patch, folder, lowered
        self.usual = {name: getattr(hang_rules, name) for name in lowered}
        look = HangDetector.look

        def judge(watcher, beats):
            found = look(watcher, beats)
            standing = [look.standing for look in watcher._looks.values()]
            if len(standing) == 2 and all(each.beat.gpu is not None for each in standing):
                self.judge(standing)
            return found

        patch.setattr(HangDetector, "look", judge)

    def judge(self, standing):
        is_held_up = self.is_held_up({each.beat.on_gpu().doing for each in standing})
        for name, limit_s in (self.lowered if is_held_up else self.usual).items():
            self.patch.setattr(hang_rules, name, limit_s)
        if is_held_up and all(each.unmoved_s >= STANDS_S for each in standing):
            (self.folder / "go on").touch()

    def is_held_up(self, places):
        """By what the two ranks' GPUs do."""
        return Activity.OTHER in places or ((self.folder / "held up").exists() and Activity.WAITS in places)


def launch(monkeypatch, folder, layout, fault, **lowered):
    Judge(monkeypatch, folder, lowered)
    return launch_on("cuda", 2, train, layout, fault, folder)


@pytest.mark.parametrize("fault", [sleeps_in_a_backward_pass, has_a_kernel_without_end])
def test_the_rank_that_hangs_is_named(monkeypatch, tmp_path, fault):
    with pytest.raises(
        RankLost, match=r"instruction backward u\d+ m0.* hangs: no host and no GPU has made progress"
    ) as lost:
        launch(monkeypatch, tmp_path, ZERO_3, fault, GPU_S=1.0, GPU_TIMES=0.0)
    assert lost.value.rank == ON_RANK
    assert lost.value.step == STEPS


def test_a_slow_first_backward_pass_ends_no_run(monkeypatch, tmp_path):
    """A limit for what a GPU has done before, or for a CPU, would."""
    lowered = {"GPU_S": 1.0, "GPU_TIMES": 0.0, "STILL_S": 1.0, "FIRST_S": 1.0, "FIRST_TIMES": 0.0}
    assert len(launch(monkeypatch, tmp_path, ZERO_3, has_a_slow_first_backward_pass, **lowered)) == STEPS
    assert (tmp_path / "go on").exists(), "it was slow"


def test_a_rank_that_is_slow_outside_of_the_program_gets_nobody_named(monkeypatch, tmp_path):
    """The healthy one's GPU stands in a product, which is summed over both."""
    lowered = {"GPU_S": 1.0, "GPU_TIMES": 0.0, "GPU_FIRST_S": 1.0}
    assert len(launch(monkeypatch, tmp_path, TENSORS, is_slow_outside_of_the_program, **lowered)) == STEPS
    assert (tmp_path / "go on").exists(), "it was slow"
