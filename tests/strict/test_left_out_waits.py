"""Faults planted in a training step on emulated GPUs: each is named, with the line of the call that meets it."""

import re
from dataclasses import replace

import pytest

import small
from strict_ranks import SETTINGS, gpu_of
from superstep.comm.mesh import build_mesh
from superstep.comm.objects import gather
from superstep.engine.engine import Engine
from superstep.engine.values.microbatch import microbatches_of, rows
from superstep.model.axes import units
from superstep.plan.resolution.resolve import resolve
from superstep.strict.nccl.works import StreamWork
from superstep.train.proof.prove_tolerance import TIMEOUT

pytestmark = pytest.mark.strict

ONLY_NOTED = replace(SETTINGS, raises=False)

LAYOUTS = {
    "zero 3": {"dp": 2, "zero": 3},
    "zero 2": {"dp": 2, "zero": 2},
    "tp": {"tp": 2},
    "sp": {"tp": 2, "sequence_parallel": True},
    "ring": {"cp": 2, "context": "ring"},
    "ulysses": {"cp": 2, "context": "ulysses"},
    "1f1b": {"pp": 2},
    "zb-v": {"pp": 2, "chunks": 2, "schedule": "zb-v"},
}


BOTH_LINES = r".* \((.*)\) \w+ on stream .* bytes that .* \((.*)\) \w+ on stream"
"""Of a race, the call that meets the other one, and that other one."""


class Skips:
    """Leaves out one wait of a step, by its number, and remembers all of them.

    Attributes:
        waits: of each wait of the step, what it is for.
    """

    def __init__(self, patch):
        self.waits, self._skipped = [], 0
        real = StreamWork.wait

        def wait(work, timeout=None):
            self.waits.append(work.call.what)
            return True if len(self.waits) == self._skipped else real(work, timeout)

        patch.setattr(StreamWork, "wait", wait)

    def begin(self, skipped=0):
        self.waits, self._skipped = [], skipped


def skip_each(rank, world, config, most):
    """Of some waits of a step, each left out once: its number, and the races that are named; before that, all waits."""
    run = resolve(config)
    (batch,) = small.batches(steps=1)
    with pytest.MonkeyPatch.context() as patch, gpu_of(rank, world, ONLY_NOTED) as (device, report):
        mesh = build_mesh(run.plan, rank, device, timeout=TIMEOUT)
        engine = Engine(run, units(run.shape), mesh)
        mine = microbatches_of(batch.rows(rows(run.plan, mesh)), run.plan, mesh)
        skips = Skips(patch)

        def races(skipped=0):
            skips.begin(skipped)
            engine.train_step(mine, valid_tokens=batch.valid_tokens, lr=1e-3)
            return report().races

        assert races() == {}
        waits = list(skips.waits)
        count = max(gather(len(waits), int))  # ranks of a pipeline may have one more
        found = {number: races(number) for number in range(1, count + 1, -(-count // most))}
        mesh.destroy()
    return waits, found


def is_redundant(number, waits):
    """Whether nothing depends on a wait: it is for a send, whose tensor nobody writes to, or a later one is for a later
    call of the same communicator, which runs its calls in order, and nothing uses the result before.
    """
    call, communicator, name = re.match(r"call (\d+) of communicator (\S+): (.*) \(", waits[number - 1]).groups()
    later = [re.match(r"call (\d+) of communicator (\S+): ", wait).groups() for wait in waits[number:]]
    return name == "send" or any(it == communicator and int(of_it) > int(call) for of_it, it in later)


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_wait_that_is_left_out_is_named(pool, name):
    layout = LAYOUTS[name]
    config = small.config(**{"microbatch": 2, "layers": small.layers_for(layout), **layout})
    world = resolve(config).plan.mesh.world
    for waits, found in pool.run(world, skip_each, config, 12, timeout_s=110):
        missed = [
            waits[number - 1]
            for number, races in found.items()
            if number <= len(waits) and not races and not is_redundant(number, waits)
        ]
        assert missed == []
        caught = [races for races in found.values() if races]
        assert caught
        for races in caught:
            first = next(iter(races))
            lines = re.match(BOTH_LINES, first).groups()
            assert all(line.startswith(("superstep/", "autograd's ")) for line in lines), first
            assert any(line.startswith("superstep/") for line in lines)
