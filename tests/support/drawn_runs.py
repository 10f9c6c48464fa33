"""Runs drawn from the published laws of the loss, with noise or without."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import numpy as np

from superstep.scaling.laws import Hoffmann, Kaplan
from superstep.scaling.runs import LossPoint, TrainingRun

ROOT = Path(__file__).parents[2]


def facts():
    """The published constants, by their names in the file."""
    with (ROOT / "tests" / "data" / "published" / "facts.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["category"] == "scaling-law"]
    return {row["fact_id"]: float(row["value"].split()[0]) for row in rows}


FACTS = facts()
CHINCHILLA = Hoffmann(
    E=FACTS["chinchilla-6"],
    A=FACTS["chinchilla-7"],
    B=FACTS["chinchilla-8"],
    alpha=FACTS["chinchilla-9"],
    beta=FACTS["chinchilla-10"],
)
OPENAI = Kaplan(alpha_n=FACTS["kaplan-4"], alpha_d=FACTS["kaplan-5"], n_c=FACTS["kaplan-6"], d_c=FACTS["kaplan-7"])


def run_at(law, params, tokens, *, noise=0.0, rng=None):
    """A run to its end, with a loss from a law, and noise on its logarithm."""
    loss = law.loss(params, tokens) * math.exp(noise * rng.standard_normal() if rng else 0)
    return TrainingRun(
        name=f"{params:g} {tokens:g}",
        params=params,
        points=(LossPoint(tokens=tokens, loss=loss, flops=6 * params * tokens),),
    )


def isoflop(law, *, noise=0.0, seed=0, budgets=7, sizes=9):
    """Budgets from 6e18 to 3e21 FLOPs, each spent on sizes up to ten times away from what is best for it."""
    rng = np.random.default_rng(seed)
    return [
        run_at(law, params, flops / 6 / params, noise=noise, rng=rng)
        for flops in np.geomspace(6e18, 3e21, budgets).tolist()
        for params in (law.optimum(flops).params * np.geomspace(0.1, 10, sizes)).tolist()
    ]


def curves(law, *, sizes=12, points=20):
    """Training curves of sizes from 40M to 10B, from 1 to 200 tokens a parameter."""
    return [
        TrainingRun(
            name=f"{params:g}",
            params=params,
            points=tuple(
                LossPoint(tokens=tokens, loss=law.loss(params, tokens), flops=6 * params * tokens)
                for tokens in (params * np.geomspace(1, 200, points)).tolist()
            ),
        )
        for params in np.geomspace(4e7, 1e10, sizes).tolist()
    ]
