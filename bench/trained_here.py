"""Training of a recipe by this rank alone, for benches that train many small models one after another."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch

from bench.sample_batches import read_batches, read_held_out
from superstep.comm.mesh import build_mesh
from superstep.data.batch import Batch
from superstep.engine.engine import Engine
from superstep.engine.values.microbatch import microbatches_of
from superstep.launch.ranks import World
from superstep.model.unit import UnitGraph
from superstep.plan.config import PlanConfig, RunConfig, TrainConfig
from superstep.plan.resolution.resolve import Resolved
from superstep.train.lr_schedule import rate
from superstep.train.weights.model import resolve_config, units_of

WARM, TIMED = 8, 12
"""Steps before, and within, the measurement of a step's seconds."""


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A trained model on the rank's device.

    Attributes:
        model: the whole model.
        validations: the loss of each validation, the last one after the last step.
        steps: that were taken.
    """

    model: UnitGraph
    validations: list[float]
    steps: int


def train_here(
    world: World,
    config: RunConfig,
    *,
    seconds: float | None = None,
    validations: int = 1,
    judge: Callable[[UnitGraph], float] | None = None,
) -> TrainedModel:
    """Train a recipe on this rank.

    Args:
        world: of one rank.
        config: the recipe's; its layout is left out.
        seconds: how long to train; the number of steps follows from the first ones. None takes the recipe's steps.
        validations: how many, evenly over the run.
        judge: the loss of a model; None for the recipe's own validation.
    """
    run = resolve_config(replace(config, plan=PlanConfig(dp=1, device=world.device.kind)))
    mesh = build_mesh(run.plan, world.rank, world.device, timeout=timedelta(minutes=5))
    engine, rows = Engine(run, units_of(run), mesh), slice(0, config.train.batch_sequences)
    held_out = read_held_out(run, rows) if judge is None else []
    train, losses, started_s = config.train, [], 0.0
    for step, batch in enumerate(read_batches(run, rows)):
        if step >= train.steps:
            break
        if seconds is not None and step in (WARM, WARM + TIMED):
            if step == WARM:
                started_s = time.perf_counter()
            else:
                train = fit_steps(train, seconds, (time.perf_counter() - started_s) / TIMED)
        parts = microbatches_of(batch, run.plan, mesh)
        engine.train_step(parts, valid_tokens=batch.valid_tokens, lr=rate(train, step))
        if (step + 1) * validations // train.steps > step * validations // train.steps:
            losses.append(validate(engine, held_out) if judge is None else judge(copy_model(engine, run)))
    model = copy_model(engine, run)
    mesh.destroy()
    return TrainedModel(model, losses, train.steps)


def copy_model(engine: Engine, run: Resolved) -> UnitGraph:
    """The whole model as it is now, of an engine of one rank."""
    model = UnitGraph(units_of(run), run.config.train.seed).to(engine.mesh.device.torch)
    copy_weights(engine, model)
    return model


@torch.no_grad()
def copy_weights(engine: Engine, model: UnitGraph) -> None:
    """Give a model the weights of an engine of one rank."""
    for piece in engine.pieces(("weight",)):
        model.parts[piece.name][1].copy_(piece.values.view(piece.shape))


def fit_steps(train: TrainConfig, seconds: float, step_s: float) -> TrainConfig:
    """The settings with as many steps as the time allows."""
    steps = max(WARM + TIMED + 1, int(seconds / step_s))
    return replace(train, steps=steps, warmup_steps=min(train.warmup_steps, steps // 8))


def validate(engine: Engine, held_out: Sequence[Batch]) -> float:
    """The mean loss over the batches of the validation."""
    scores = [engine.score(microbatches_of(batch, engine.run.plan, engine.mesh)) for batch in held_out]
    return sum(score.loss for score in scores) / sum(batch.valid_tokens for batch in held_out)
