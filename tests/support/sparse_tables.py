"""A recommender with tables of sparse gradients, its batches and its runs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from superstep.data.batch import Batch
from superstep.model.custom.inspect import outline_of
from superstep.model.custom.units_from_modules import as_units
from superstep.plan.config import NumericsConfig, PlanConfig, RunConfig, TrainConfig
from superstep.plan.resolution.resolve import resolve

USERS, ITEMS, BATCH = 300, 70, 8


class Lookup(nn.Module):
    """A user and three things that they bought: tables of two widths, and a dense layer in the same unit."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(USERS, 12, sparse=True)
        self.items = nn.Embedding(ITEMS, 8, sparse=True)
        self.mix = nn.Linear(20, 10)

    def forward(self, bought: Tensor) -> Tensor:
        x = torch.cat((self.users(bought[:, 0]), self.items(bought[:, 1:]).mean(1)), 1)
        return torch.tanh(self.mix(x))


def recommender():
    torch.manual_seed(3)
    return as_units([Lookup(), nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 4)])


def batches():
    generator = torch.Generator().manual_seed(5)

    def batch():
        bought = torch.randint(ITEMS, (BATCH, 4), generator=generator)
        return Batch({"bought": bought}, torch.randint(4, (BATCH,), generator=generator), BATCH, reads="bought")

    return batch(), batch()


def config_of(*, exact=False, train=None, **plan):
    settings = {"batch_sequences": BATCH, "warmup_steps": 1, "steps": 10, "lr": 0.5, "optimizer": "sgd"}
    return RunConfig(
        train=TrainConfig(**{**settings, "weight_decay": 0.0, **(train or {})}),
        plan=PlanConfig(**plan),
        numerics=NumericsConfig(compute="fp32", exact=exact),
    )


def run_of(**settings):
    return resolve(config_of(**settings), outline=outline_of(recommender(), "the recommender"))
