"""What units keep of each microbatch, by choice: the bits of a run that keeps all, and memory within the budget."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch

import small
from bench.alive import Born, Watch
from superstep.comm.device import Device
from superstep.comm.mesh import build_mesh
from superstep.cost.program.memory.activations import unit_bytes
from superstep.cost.program.memory.memory import rank_bytes
from superstep.engine.engine import Engine
from superstep.engine.values.microbatch import microbatches_of, rows
from superstep.model.axes import units
from superstep.plan.config import StateConfig
from superstep.program.instructions import Forward, Offload, Recompute
from superstep.program.peak_memory import list_held_bytes
from superstep.train.weights.model import resolve_config

BLOCKS = 4
TURNS = ("all selective input disk", "input all disk selective", "disk input selective all", "selective disk all input")
KEPT = ("all disk all disk", *TURNS, "disk disk all all")
"""Every choice of each block, and of each microbatch."""
LAYOUTS = [
    {},
    {"schedule": "gpipe"},
    {"schedule": "zb-h1"},
    {"schedule": "interleaved", "chunks": 2, "microbatch_group": 2},
    {"schedule": "breadth-first", "chunks": 2},
    {"exact": True},
    {"exact": True, "schedule": "zb-h1"},
    {"compute": "bf16"},
    {"dropout": 0.2},
    {"kernels": "torch"},
]


@pytest.fixture
def folder():
    """On a disk: a temporary folder may lie in memory."""
    place = Path(__file__).parent / f"within_budget_{os.getpid()}"
    place.mkdir(exist_ok=True)
    yield place
    place.rmdir()


class Rank:
    """One rank of a small model, with four microbatches in a step."""

    def __init__(self, folder, **layout):
        config = small.config(layers=BLOCKS, **{"microbatch": 2} | layout)
        self.run = resolve_config(replace(config, state=StateConfig(dir=str(folder))))
        self.mesh = build_mesh(self.run.plan, 0, Device("cpu"), timeout=timedelta(seconds=60))
        self.engine = Engine(self.run, units(self.run.shape), self.mesh)
        self.batches = small.batches(steps=2)

    def microbatches(self, number):
        batch = self.batches[number]
        return microbatches_of(batch.rows(rows(self.run.plan, self.mesh)), self.run.plan, self.mesh)

    def train(self, number, **more):
        tokens = self.batches[number].valid_tokens
        return self.engine.train_step(self.microbatches(number), valid_tokens=tokens, lr=1e-3, **more)

    def train_both(self):
        results = [(result.loss, result.grad_norm) for result in (self.train(0), self.train(1))]
        return results, [state.clone() for _, b in self.engine.each_buffer() for state in b.state]

    def list_alive(self):
        """Bytes that are alive after each instruction."""
        mine = self.microbatches(0)
        with Born() as born:
            watch = Watch(born.noted, self.engine, mine)
            self.engine.train_step(mine, valid_tokens=self.batches[0].valid_tokens, lr=1e-3, record=watch)
        return [sum(sizes.values()) if isinstance(sizes, dict) else sizes for sizes in watch.alive]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_choice_of_every_microbatch_has_the_bits_of_all_kept(folder, layout):
    chosen = {"recompute": "auto", "memory": "1GiB", "activations": ("disk",), "kept": KEPT}
    plain, mixed = Rank(folder, **layout), Rank(folder, **layout, **chosen)
    instructions = mixed.engine.step_program.ranks[0]
    assert {i.keep for i in instructions if isinstance(i, Forward)} == {"all", "selective", "input"}
    assert any(isinstance(i, Offload) for i in instructions)
    assert sum(isinstance(i, Recompute) for i in instructions) == BLOCKS
    (first, state), (second, other) = plain.train_both(), mixed.train_both()
    assert second == first
    assert all(torch.equal(a, b) for a, b in zip(state, other, strict=True))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
@pytest.mark.parametrize("places", [{}, {"activations": ("disk",)}], ids=str)
def test_what_is_alive_never_exceeds_what_the_budget_leaves(folder, schedule, places):
    """Beside what stays from step to step, and the workspace of the instruction that runs."""
    most, least = (predicted_bytes(Rank(folder, schedule=schedule, recompute=way)) for way in ("none", "full"))
    for share in (0.8, 0.4):
        budget = int(least + share * (most - least))
        rank = Rank(folder, schedule=schedule, recompute="auto", memory=f"{budget}B", **places)
        rank.train(0)
        program = rank.engine.step_program
        predicted = [held["kept"] + held["boundary"] for held in list_held_bytes(program, 0, unit_bytes(rank.run))]
        assert max(rank.list_alive()) <= 1.02 * max(predicted)
        assert predicted_bytes(rank) <= budget


def predicted_bytes(rank):
    """The predicted bytes of the rank."""
    return rank_bytes(rank.run, rank.engine.step_program)[0].bytes


def test_a_step_of_other_microbatches_keeps_as_little_as_it_can(folder):
    """A rollout's batch has as many as it has: no choice was made for them."""
    rank = Rank(folder, recompute="auto", memory="1GiB", kept=("all",) * (BLOCKS + 2))
    other = replace(rank.run.plan, microbatches=3)
    assert [other.find_choice(unit, 0) for unit in range(BLOCKS + 2)] == ["all", *["input"] * BLOCKS, "all"]
