"""Mixtures of experts, measured: what the balance loss does to the load, and Switch beside a dense model.

    python -m bench.moe                          all runs, one after the other, JSON under bench/results/
    python -m bench.moe --pair-only --lr 1e-3 --json lower-lr.json

Every run is one process with one thread and trains on the text of Python's library. A Switch model has 8 experts, each
as wide as the dense model's feed-forward, and sends a token to one of them: as many FLOPs for a token, but for the
router. Both see the same tokens in the same order and start from weights of the same seed. Dense and Switch go in
turn, A B B A A B, so that the machine's drift falls on both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from bench.machine import machine_facts
from bench.trained_text import open_trainer
from superstep.cost.program.flops import model_flops_per_token, parameters
from superstep.data.preparation.prepare import prepare
from superstep.observe.router_balance import busiest, entropy, share_dropped
from superstep.plan.config import ModelConfig, PlanConfig, RunConfig, TrainConfig
from superstep.plan.resolution.resolve import resolve
from superstep.state.manifest import Position
from superstep.train.corpus_trainer import CorpusTrainer
from superstep.train.loop import evaluate, routers, steps

DENSE = ModelConfig(name="demo")
SWITCH = replace(DENSE, experts=8, router="switch")
UNBALANCED = replace(SWITCH, balance_weight=0.0)

STRETCH = 10
"""Steps over which the routers' counts are added up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What every run trains on."""

    steps: int
    lr: float
    eval_every: int
    batch_sequences: int = 8
    microbatch: int = 4
    eval_batches: int = 8


def measure(name: str, model: ModelConfig, seed: int, load: Load, corpus: Path) -> dict:
    """Train once; losses, loads and seconds, ready for JSON."""
    config = RunConfig(
        model=model,
        train=TrainConfig(
            steps=load.steps,
            batch_sequences=load.batch_sequences,
            lr=load.lr,
            seed=seed,
            eval_batches=load.eval_batches,
        ),
        plan=PlanConfig(dp=1, microbatch=load.microbatch),
    )
    run = resolve(config)
    validation, reports, wall, cpu = [], [], [], []
    with open_trainer(run, corpus) as trainer:
        position = Position()
        validation.append({"step": 0, "loss": evaluate(trainer, position).loss})
        began_cpu = time.process_time()
        for done in steps(trainer, position):
            cpu.append(time.process_time() - began_cpu)
            wall.append(done.event.step_s)
            step = done.position.step
            if trainer.has_routers and step % STRETCH == 0:
                reports.append(_report(trainer, done.position))
            if step % load.eval_every == 0:
                validation.append({"step": step, "loss": evaluate(trainer, done.position).loss})
            began_cpu = time.process_time()
    return {
        "name": name,
        "seed": seed,
        "parameters": parameters(run.shape),
        "flops_per_token": model_flops_per_token(run.shape, config.data.sequence_tokens),
        "median_step_s": statistics.median(wall),
        "median_cpu_s": statistics.median(cpu),
        "cpu_s_quartiles": statistics.quantiles(cpu, n=4),
        "validation": validation,
        "routers": reports,
    }


def _report(trainer: CorpusTrainer, position: Position) -> dict:
    """The load of each layer over the last steps."""
    seen = routers(trainer, position)
    return {
        "step": seen.step,
        "steps": seen.steps,
        "busiest_over_mean": [busiest(row) for row in seen.chosen],
        "entropy_bits": [entropy(row) for row in seen.chosen],
        "dropped_share": [share_dropped(*rows) for rows in zip(seen.chosen, seen.dropped, strict=True)],
        "chosen": seen.chosen,
        "balance": seen.balance,
    }


def order(seeds: list[int], *, has_unbalanced: bool) -> list[tuple[str, ModelConfig, int]]:
    """The runs in turn; the one without a balance loss has the first seed."""
    runs: list[tuple[str, ModelConfig, int]] = []
    for number, seed in enumerate(seeds):
        pair = [("dense", DENSE, seed), ("switch", SWITCH, seed)]
        runs += pair if number % 2 == 0 else pair[::-1]
        if number == 0 and has_unbalanced:
            runs.append(("switch, no balance loss", UNBALANCED, seed))
    return runs


def main(argv: list[str]) -> int:
    """Measure, print a line for each run, write JSON after each."""
    options = argparse.ArgumentParser(prog="python -m bench.moe", description=__doc__.splitlines()[0])
    options.add_argument("--steps", type=int, default=300)
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "moe.json")
    options.add_argument("--lr", type=float, default=3e-3)
    options.add_argument("--eval-every", type=int, default=25)
    options.add_argument("--pair-only", action="store_true", help="leave out the run without a balance loss")
    asked = options.parse_args(argv)
    torch.set_num_threads(1)
    load = Load(steps=asked.steps, lr=asked.lr, eval_every=asked.eval_every)
    facts = {
        **machine_facts(),
        "threads": 1,
        "workload": asdict(load) | {"sequence_tokens": RunConfig().data.sequence_tokens, "steps_a_report": STRETCH},
    }
    runs: list[dict] = []
    asked.json.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        prepare(RunConfig().data, resolve(RunConfig(model=DENSE)).shape.vocab, Path(folder))
        for name, model, seed in order(asked.seeds, has_unbalanced=not asked.pair_only):
            runs.append(measure(name, model, seed, load, Path(folder)))
            asked.json.write_text(json.dumps({**facts, "runs": runs}, indent=1), encoding="utf-8")
            print(_line(runs[-1]), flush=True)
    print(f"figures in {asked.json}")
    return 0


def _line(run: dict) -> str:
    text = f"{run['name']:24} seed {run['seed']}  validation {run['validation'][-1]['loss']:.4f}"
    text += f"  {run['median_cpu_s'] * 1e3:.0f} ms of processor time a step"
    if run["routers"]:
        first, last = (max(run["routers"][at]["busiest_over_mean"]) for at in (0, -1))
        text += f"  busiest expert {first:.2f}x, then {last:.2f}x the mean"
    return text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
