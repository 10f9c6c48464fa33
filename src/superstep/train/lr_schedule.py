"""The learning rate of a step.

lr        ╭─╮                   ╭───────────╮
         ╱   ╲                 ╱             ╲
        ╱     ╰╮              ╱               ╲
min    ╱       ╰──           ╱                 ╲
       warm-up   cosine      warm-up   stay     fall
"""

from __future__ import annotations

import math

from superstep.plan.config import Decay, TrainConfig


def learning_rate(
    step: int,
    *,
    steps: int,
    lr: float,
    warmup_steps: int,
    decay: Decay,
    decay_steps: int | None,
    min_lr_ratio: float,
) -> float:
    """The rate of the update after ``step`` finished steps, for step = 0 .. steps - 1.

    It rises linearly from lr / warmup_steps, reaches ``lr`` in the last warm-up step, and falls to min_lr_ratio · lr in
    the last step: as a cosine (Loshchilov 2017, without restarts), or linearly over the last ``decay_steps``
    (warmup-stable- decay, Hu 2024; None means a fifth of the steps). A fall that would begin within the warm-up begins
    after it. After the last step the rate stays.
    """
    if step < warmup_steps:
        return lr * ((step + 1) / warmup_steps)
    after_warmup = max(1, steps - warmup_steps)
    match decay:
        case "cosine":
            fall_steps = after_warmup
        case "wsd":
            fall_steps = min(after_warmup, max(1, steps // 5) if decay_steps is None else decay_steps)
    fallen = min(1.0, max(0, step + 1 - (steps - fall_steps)) / fall_steps)
    height = (1 + math.cos(math.pi * fallen)) / 2 if decay == "cosine" else 1 - fallen
    return lr * (min_lr_ratio + (1 - min_lr_ratio) * height)


def rate(train: TrainConfig, step: int) -> float:
    """The learning rate of a run's ``[train]`` section."""
    return learning_rate(
        step,
        steps=train.steps,
        lr=train.lr,
        warmup_steps=train.warmup_steps,
        decay=train.decay,
        decay_steps=train.decay_steps,
        min_lr_ratio=train.min_lr_ratio,
    )
