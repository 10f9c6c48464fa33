"""The optimizer of the reference: torch's own, or written from the paper's algorithm where torch has none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from superstep.plan.config import TrainConfig


def make_optimizer(train: TrainConfig, params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer that ``train.optimizer`` names; matrices alone decay. Its moments have the names of
    ``plan.optimizers``.
    """
    groups: list[dict[str, Any]] = [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": train.weight_decay},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    betas = train.beta1, train.beta2
    match train.optimizer:
        case "adamw":
            return torch.optim.AdamW(groups, betas=betas, eps=train.eps)
        case "lion":
            return _Lion(groups, betas)


class _Lion(torch.optim.Optimizer):
    """Chen 2023, algorithm 2."""

    def __init__(self, params: Iterable[dict[str, Any]], betas: tuple[float, float]) -> None:
        super().__init__(params, {"lr": 0.0, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update; there is no closure."""
        assert closure is None
        for group in self.param_groups:
            lr, decay, (beta1, beta2) = group["lr"], group["weight_decay"], group["betas"]
            for param in group["params"]:
                m = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
                update = torch.sign(torch.lerp(param.grad, m, beta1))
                param.sub_(lr * (update + decay * param))
                m.copy_(torch.lerp(param.grad, m, beta2))
