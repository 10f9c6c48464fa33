"""Choices within a budget of memory beside their rivals: 30 problems of a rank, model x budget x speed of a disk.

The rivals of a problem are the choices that the planner has tried for it and that fit: the same for all units, and
evictions with and without the disk. Each trains the same steps in turn, round after round, so that other work on the
machine meets all of them; a rival's seconds are its least. A slow disk is this one, slowed down to a rate.

    python -m bench.budget [--rounds 3] [--json FILE]

    near     the choice takes at most 5% more than the best rival, of all problems
    fits     parameters, state and the bytes that were alive within the step are within the budget, of all problems
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from bench.alive import Born, Watch
from bench.machine import write_result
from superstep.comm.device import Device
from superstep.comm.mesh import Mesh, build_mesh
from superstep.cost.program.budget.choose_kept import KeptPlan, apply_kept, choose_kept, count_choices
from superstep.cost.program.memory.memory_fit import memory_of
from superstep.cost.program.time.predict import price_operations
from superstep.data.batch import Batch
from superstep.engine.activations.direct_file import DirectFile
from superstep.engine.engine import Engine
from superstep.engine.measure.probe_rates import probe_rates
from superstep.engine.values.microbatch import Microbatch, microbatches_of, rows
from superstep.model.axes import units
from superstep.plan.config import DataConfig, ModelConfig, PlanConfig, RunConfig, StateConfig, TrainConfig
from superstep.plan.resolution.resolve import Resolved
from superstep.train.weights.model import resolve_config

NEAR = 1.05
MODELS = {"wide": (3, 256, 128), "deep": (6, 128, 64), "long": (3, 128, 256)}
"""Blocks, width and tokens of a sequence."""
SHARES = (0.85, 0.65, 0.5, 0.35, 0.2)
"""Budgets, between the least and all kept."""
DISKS = {"as it is": None, "slow": 1e8}
"""Bytes a second."""
SEQUENCES, VOCAB = 8, 512


@dataclass(frozen=True)
class Rival:
    """A choice that trains."""

    plan: KeptPlan
    run: Resolved
    engine: Engine
    microbatches: list[Microbatch]

    def step(self, record: Any = None) -> float:
        start_s = time.perf_counter()
        tokens = SEQUENCES * self.run.config.data.sequence_tokens
        self.engine.train_step(self.microbatches, valid_tokens=tokens, lr=1e-4, record=record)
        return time.perf_counter() - start_s

    def count_alive(self) -> int:
        """The most bytes of activations after an instruction."""
        with Born() as born:
            watch = Watch(born.noted, self.engine, self.microbatches)
            self.step(watch)
        return max(sum(sizes.values()) if isinstance(sizes, dict) else sizes for sizes in watch.alive)


@contextmanager
def slowed(bytes_per_s: float | None) -> Iterator[None]:
    """A disk that copies no faster."""
    if bytes_per_s is None:
        yield
        return

    def slow(copy: Callable[..., None]) -> Callable[..., None]:
        def run(file: DirectFile, part: Any, content: Tensor) -> None:
            start_s = time.perf_counter()
            copy(file, part, content)
            time.sleep(max(0.0, content.nbytes / bytes_per_s - (time.perf_counter() - start_s)))

        return run

    with (
        mock.patch.object(DirectFile, "write", slow(DirectFile.write)),
        mock.patch.object(DirectFile, "read", slow(DirectFile.read)),
    ):
        yield


def config_of(model: str, folder: Path, **plan: Any) -> RunConfig:
    layers, width, tokens = MODELS[model]
    shape = ModelConfig(
        name="bench", layers=layers, width=width, heads=width // 64, kv_heads=width // 64, head_dim=64,
        ffn=3 * width, vocab=VOCAB, tied=True,
    )  # fmt: skip
    return RunConfig(
        model=shape,
        data=DataConfig(sequence_tokens=tokens),
        train=TrainConfig(batch_sequences=SEQUENCES),
        plan=PlanConfig(dp=1, microbatch=2, schedule="gpipe", recompute="auto", activations=("disk",), **plan),
        state=StateConfig(dir=str(folder)),
    )


def solve(model: str, share: float, disk: float | None, rounds: int, folder: Path) -> dict[str, Any]:
    """One problem."""
    with slowed(disk):
        run = resolve_config(config_of(model, folder, memory="1TiB", kept=("all",) * (MODELS[model][0] + 2)))
        run = replace(run, config=replace(run.config, plan=replace(run.config.plan, kept=None)))
        prices = price_operations(run, probe_rates("fp32", folder, 1))

        def within(budget: int) -> Resolved:
            return replace(run, config=replace(run.config, plan=replace(run.config.plan, memory=f"{budget}B")))

        least, most = choose_kept(within(1), prices).least.bytes, choose_kept(run, prices).least.bytes
        budget = int(least + share * (most - least))
        result = choose_kept(within(budget), prices)
        assert result.best is not None
        fitting = {plan.kept: plan for plan in (*result.others, result.best) if plan.bytes <= budget}
        mesh = build_mesh(run.plan, 0, Device("cpu"), timeout=timedelta(seconds=60))
        rivals = [make_rival(apply_kept(run, plan.kept), plan, mesh) for plan in fitting.values()]
        for rival in rivals:
            rival.step()
        seconds = [[rival.step() for rival in rivals] for _ in range(rounds)]
        chosen = next(n for n, rival in enumerate(rivals) if rival.plan is result.best)
        alive = rivals[chosen].count_alive()
    took = [min(times) for times in zip(*seconds, strict=True)]
    stays = count_staying(rivals[chosen].run)
    row = {
        "model": model, "share": share, "disk_bytes_per_s": disk, "budget_bytes": budget,
        "ratio": took[chosen] / min(took), "chosen": result.best.name,
        "choices": count_choices(result.best.kept), "alive_bytes": stays + alive, "fits": stays + alive <= budget,
        "rivals": {rival.plan.name: [s, rival.plan.step_s] for rival, s in zip(rivals, took, strict=True)},
    }  # fmt: skip
    mesh.destroy()
    return row


def count_staying(run: Resolved) -> int:
    """Bytes that stay from step to step."""
    rank = memory_of(run)[0]
    return rank.bytes - rank.peak.bytes


def make_rival(run: Resolved, plan: KeptPlan, mesh: Mesh) -> Rival:
    tokens = torch.randint(0, VOCAB, (SEQUENCES, run.config.data.sequence_tokens + 1))
    batch = Batch({"tokens": tokens[:, :-1].contiguous()}, tokens[:, 1:].clone(), tokens[:, 1:].numel())
    return Rival(
        plan,
        run,
        Engine(run, units(run.shape), mesh),
        microbatches_of(batch.rows(rows(run.plan, mesh)), run.plan, mesh),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=Path("bench/results/budget.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    problems: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix="budget-") as folder:
        for share, model, disk in product(SHARES, MODELS, DISKS):
            row = solve(model, share, DISKS[disk], args.rounds, Path(folder))
            problems.append(row)
            print({k: v for k, v in row.items() if k != "budget_bytes"}, flush=True)
            write_result(
                args.json,
                load=os.getloadavg()[0],
                rounds=args.rounds,
                near=sum(r["ratio"] <= NEAR for r in problems),
                fits=sum(r["fits"] for r in problems),
                problems=problems,
            )


if __name__ == "__main__":
    main()
