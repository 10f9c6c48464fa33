"""The optimizer of the reference: torch's own, or written from the paper's algorithm where torch has none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from superstep.plan.config import TrainConfig


def make_optimizer(train: TrainConfig, params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer that ``train.optimizer`` names; matrices alone decay. Its moments have the names of
    ``plan.optimizers``.
    """
    groups: list[dict[str, Any]] = [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": train.weight_decay},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    beta1, beta2 = train.beta1, train.beta2
    match train.optimizer:
        case "adamw":
            return torch.optim.AdamW(groups, betas=(beta1, beta2), eps=train.eps)
        case "lion":  # Chen 2023, algorithm 2
            return _OneMoment(groups, lambda g, m: (torch.sign(torch.lerp(g, m, beta1)), torch.lerp(g, m, beta2)))
        case "sgd":
            return torch.optim.SGD(groups)


class _OneMoment(torch.optim.Optimizer):
    """An optimizer with one moment and decoupled weight decay.

    Args:
        groups: parameters and their decay.
        rule: from a gradient and its moment to the step of the parameter, before the learning rate, and the next
            moment.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], rule: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    ) -> None:
        super().__init__(groups, {"lr": 0.0})
        self._rule = rule

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update; there is no closure."""
        assert closure is None
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                step, state["exp_avg"] = self._rule(param.grad, state.get("exp_avg", torch.zeros_like(param)))
                param.sub_(group["lr"] * (step + group["weight_decay"] * param))
