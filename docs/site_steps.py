"""The steps that the site's pages show as moving pictures: programs of real plans, on a machine of round numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from superstep.cli.view.step_page import StepView
from superstep.cost.program.time.predict import MachineRates, predict
from superstep.cost.program.time.unit_operations import decoder_operations
from superstep.observe.page.step_animation import ChooserEntry, moving_page
from superstep.plan.config import (
    DataConfig,
    ModelConfig,
    NumericsConfig,
    PlanConfig,
    RunConfig,
    StateConfig,
    TrainConfig,
)
from superstep.plan.resolution.resolve import resolve

MACHINE = MachineRates(gemm_flops_per_s=4e14, memory_bytes_per_s=3e12, link_bytes_per_s=5e10, link_latency_s=1e-5)
ABOUT = "predicted for 400 TFLOP/s in products, 3 TB/s of memory, 50 GB/s between ranks"


@dataclass(frozen=True, slots=True)
class StepShown:
    """A step that a page shows.

    Attributes:
        title: what it is.
        run: its plan.
        others: plans to flip to.
    """

    title: str
    run: RunConfig
    others: tuple[PlanConfig, ...] = ()


def _llama(*, sequences: int, layers: int = 8, tokens: int = 4096, experts: int | None = None) -> RunConfig:
    return RunConfig(
        model=ModelConfig(name="demo" if experts else "llama3-8b", layers=layers, vocab=8192, experts=experts),
        data=DataConfig(sequence_tokens=512 if experts else tokens),
        train=TrainConfig(batch_sequences=sequences),
        numerics=NumericsConfig(compute="bf16"),
    )


def _shown(title: str, run: RunConfig, plan: PlanConfig, *others: PlanConfig) -> StepShown:
    return StepShown(title, replace(run, plan=plan), others)


PIPE = PlanConfig(pp=4, microbatch=1, schedule="1f1b")
DATA = PlanConfig(dp=4, microbatch=1)

STEPS = {
    "data parallel": _shown(
        "Data parallel: each block's gradients are summed while the blocks before it are computed",
        _llama(sequences=8),
        replace(DATA, zero=0),
    ),
    "zero": _shown(
        "ZeRO: what is gathered, reduced and freed",
        _llama(sequences=8),
        replace(DATA, zero=3),
        *(replace(DATA, zero=stage) for stage in (0, 1, 2)),
    ),
    "tensor parallel": _shown(
        "Tensor parallel: four ranks share each product", _llama(sequences=2), PlanConfig(tp=4, microbatch=1)
    ),
    "pipeline": _shown(
        "A pipeline of four stages, and its bubble",
        _llama(sequences=8),
        PIPE,
        replace(PIPE, schedule="gpipe"),
        replace(PIPE, schedule="interleaved", chunks=2),
        replace(PIPE, schedule="breadth-first", chunks=2),
        replace(PIPE, schedule="zb-h1"),
        replace(PIPE, schedule="zb-v", chunks=2),
    ),
    "microbatch groups": _shown(
        "Breadth-first: a group of microbatches goes through each stage before the next fetches its parameters",
        _llama(sequences=16),
        PlanConfig(pp=2, dp=2, zero=3, microbatch=1, schedule="breadth-first", chunks=2),
    ),
    "ring": _shown(
        "Ring attention: keys and values go round while queries stay",
        _llama(sequences=2, tokens=8192),
        PlanConfig(cp=4, microbatch=1),
    ),
    "experts": _shown(
        "Experts: tokens go to the ranks that have theirs, and come back",
        _llama(sequences=8, experts=8),
        PlanConfig(dp=4, ep=4, microbatch=1),
    ),
    "recompute": _shown(
        "Activations computed again: less memory, more time",
        _llama(sequences=8),
        replace(PIPE, pp=2, recompute="full"),
    ),
    "snapshots": _shown(
        "A snapshot of the state is copied beside the step",
        replace(_llama(sequences=8), state=StateConfig(snapshot_every=1)),
        replace(DATA, zero=1),
    ),
}


def write_step(step: StepShown) -> str:
    """The page of a step."""
    plans = (step.run.plan, *step.others)
    choices = [_choice(replace(step.run, plan=plan)) for plan in plans]
    return moving_page(step.title, ABOUT, choices, 0)


def _choice(asked: RunConfig) -> ChooserEntry:
    run = resolve(asked)
    seen = StepView(run=run, machine=MACHINE, operations=decoder_operations(run), prediction=predict(run, MACHINE))
    return ChooserEntry(schedule=run.plan.schedule, zero=run.plan.zero, drawn=seen.draw())
