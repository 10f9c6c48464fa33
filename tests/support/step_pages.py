"""Pages of steps that are the same on every machine: plans of a llama on a machine of round numbers."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import get_args

from superstep.cost.program.memory.activations import unit_bytes
from superstep.cost.program.time.predict import MachineRates, durations, predict
from superstep.cost.program.time.simulate import simulate
from superstep.cost.program.time.unit_operations import decoder_operations
from superstep.errors import UserError
from superstep.observe.page.step_animation import ChooserEntry, moving_page
from superstep.observe.page.step_data import StepDrawing
from superstep.plan.config import DataConfig, ModelConfig, NumericsConfig, PlanConfig, RunConfig, Schedule, TrainConfig
from superstep.plan.resolution.resolve import resolve

MACHINE = MachineRates(gemm_flops_per_s=4e14, memory_bytes_per_s=3e12, link_bytes_per_s=5e10, link_latency_s=1e-5)
LOOPED = ("interleaved", "breadth-first", "zb-v")


def config(*, sequences: int, layers: int = 8, experts: int | None = None, **layout) -> RunConfig:
    """A small llama, or a mixture of experts."""
    return RunConfig(
        model=ModelConfig(name="demo" if experts else "llama3-8b", layers=layers, vocab=8192, experts=experts),
        data=DataConfig(sequence_tokens=512 if experts else 4096),
        train=TrainConfig(batch_sequences=sequences),
        plan=PlanConfig(**{"microbatch": 1, "schedule": "1f1b"} | layout),
        numerics=NumericsConfig(compute="bf16"),
    )


def drawn(asked: RunConfig, *, is_measured: bool = False) -> StepDrawing:
    """A step as predicted; and as it ran on ranks that are slower than that, the second most of all."""
    run = resolve(asked)
    found = predict(run, MACHINE)
    ran = None
    if is_measured:
        took, luck = durations(run, found.timeline.program, MACHINE), random.Random(1)
        ran = simulate(
            found.timeline.program, lambda i, rank: took(i, rank) * (1 + 0.2 * luck.random() + 0.3 * (rank == 1))
        )
    return StepDrawing(
        plan=run.plan,
        timeline=found.timeline,
        memory=found.memory,
        sizes=unit_bytes(run),
        operations=decoder_operations(run),
        measured=ran,
        measured_step=20,
    )


def choices_of(asked: RunConfig, *, is_measured: bool = False) -> tuple[list[ChooserEntry], int]:
    """The plan, and those of other schedules and ZeRO stages."""
    found, chosen = [], 0
    for schedule in get_args(Schedule) if asked.plan.pp > 1 else (asked.plan.schedule,):
        for zero in range(4):
            is_chosen = (schedule, zero) == (asked.plan.schedule, asked.plan.zero)
            chosen = len(found) if is_chosen else chosen
            plan = replace(asked.plan, schedule=schedule, zero=zero, chunks=2 if schedule in LOOPED else 1)
            try:
                one = drawn(replace(asked, plan=plan), is_measured=is_measured and is_chosen)
                found.append(ChooserEntry(schedule=schedule, zero=zero, drawn=one))
            except UserError as error:
                found.append(ChooserEntry(schedule=schedule, zero=zero, drawn=None, why=str(error)))
    return found, chosen


def page_of(asked: RunConfig, *, is_measured: bool = False, is_alone: bool = False) -> str:
    """The page, with other plans to flip to unless it ``is_alone``."""
    if is_alone:
        one = ChooserEntry(
            schedule=asked.plan.schedule, zero=asked.plan.zero, drawn=drawn(asked, is_measured=is_measured)
        )
        choices, chosen = [one], 0
    else:
        choices, chosen = choices_of(asked, is_measured=is_measured)
    about = "predicted for 400 TFLOP/s in products, 3 TB/s of memory, 50 GB/s between ranks"
    return moving_page(f"Llama of {asked.model.layers} blocks: a step", about, choices, chosen)


EIGHT_RANKS = config(sequences=16, pp=4, dp=2, zero=1, schedule="1f1b")
A_RUN = config(sequences=8, layers=6, pp=2, dp=2, zero=3, schedule="1f1b")
