"""Reinforcement learning beside TRL's GRPOTrainer: the same model, tasks, rewards and sizes; samples per second.

    python -m bench.tune_vs_peers --trl-python TRL/bin/python [--start RUN]

Each side is run as its users run it, by turns, round after round; the first steps of a run warm it up. A sample is an
answer that was drawn, graded and trained on. Ratios are of a round's medians, and of these the median is told.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from bench.learns import TASKS, superstep, warmed_up
from bench.machine import write_result
from superstep.train.weights.weights_folder import weights_of

ROOT = Path(__file__).resolve().parent.parent
WARM_UP = 4
"""Steps of a run that are no figure."""

LR = 3e-4
FLAGS = ("--plan.dp", "2", "--plan.microbatch", "8", "--numerics.compute", "bf16")
"""Of ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What a step is.

    Attributes:
        group: answers to a task.
        groups: tasks of a step.
        max_tokens: of an answer.
        sequence_tokens: of a row of ours.
        threads: in all.
        steps: of a run.
    """

    group: int = 8
    groups: int = 16
    max_tokens: int = 30
    sequence_tokens: int = 64
    threads: int = 2
    steps: int = 20


def ours(start: Path, size: Size, seed: int, flags: tuple[str, ...]) -> tuple[list[float], list[float], dict[str, str]]:
    """Seconds and rewards of each step of a run of ``superstep tune rl``."""
    with tempfile.TemporaryDirectory() as name:
        superstep(
            *("tune", "rl", *flags),
            start=start,
            rl__environment=TASKS,
            rl__group=size.group,
            rl__groups=size.groups,
            rl__overlong="none",
            rollout__max_tokens=size.max_tokens,
            rollout__requests=size.group * size.groups,
            data__sequence_tokens=size.sequence_tokens,
            train__steps=size.steps,
            train__lr=LR,
            train__seed=seed,
            grade__sandbox="none",
            grade__workers=size.threads,
            state__dir=f"{name}/run",
            state__save_every=size.steps,
        )
        lines = [json.loads(line) for line in (Path(name) / "run/metrics.jsonl").read_text("utf-8").splitlines()]
    steps = [line for line in lines if line["event"] == "rolled"]
    return [line["seconds"] for line in steps], [line["reward"] for line in steps], {}


def trl(
    python: str, start: Path, size: Size, seed: int, *, is_bf16: bool
) -> tuple[list[float], list[float], dict[str, str]]:
    """The same of TRL's trainer."""
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "steps.json"
        asked = {
            "folder": str(start),
            "environment": str(TASKS),
            "group": size.group,
            "groups": size.groups,
            "max_tokens": size.max_tokens,
            "threads": size.threads,
            "steps": size.steps,
            "lr": LR,
            "bf16": is_bf16,
            "seed": seed,
            "out": str(out),
        }
        log = Path(tempfile.gettempdir()) / "tune_vs_peers_trl.log"
        with log.open("w", encoding="utf-8") as stream:
            done = subprocess.run(
                [python, "-m", "bench.tune_sides.trl_grpo", json.dumps(asked)],
                cwd=ROOT,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            )
        if done.returncode:
            raise SystemExit(f"TRL ended with status {done.returncode}; its words are in {log}.")
        found = json.loads(out.read_text(encoding="utf-8"))
    return found["seconds"], found["rewards"], found["versions"]


def main(argv: list[str] | None = None) -> None:
    """Measure, and write bench/results/tune_vs_peers.json."""
    parser = argparse.ArgumentParser(prog="python -m bench.tune_vs_peers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trl-python", required=True, help="Python of an environment with trl")
    parser.add_argument("--start", type=Path, help="a run to begin with; none makes one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--flags", nargs="*", default=FLAGS)
    parser.add_argument("--json", type=Path, default=ROOT / "bench" / "results" / "tune_vs_peers.json")
    asked = parser.parse_args(argv)
    size = Size(steps=asked.steps)
    with tempfile.TemporaryDirectory() as name:
        start = weights_of(asked.start or warmed_up(Path(name)))
        sides = {"superstep": partial(ours, flags=tuple(asked.flags))}
        for kind in ("fp32", "bf16"):
            sides[f"trl {kind}"] = partial(trl, asked.trl_python, is_bf16=kind == "bf16")
        found: dict[str, list[float]] = {side: [] for side in sides}
        rewards: dict[str, list[float]] = {side: [] for side in sides}
        versions: dict[str, str] = {}
        for number in range(asked.rounds):
            for side in sorted(sides, reverse=bool(number % 2)):
                seconds, rewarded, used = sides[side](start=start, size=size, seed=number)
                versions |= used
                found[side].append(statistics.median(seconds[WARM_UP:]))
                rewards[side].append(statistics.fmean(rewarded))
                samples_per_s = size.group * size.groups / found[side][-1]
                print(f"{side:10s} {found[side][-1]:.3f} s a step, {samples_per_s:.0f} samples/s", flush=True)
    own = found["superstep"]
    ratios = {side: [his / our for his, our in zip(row, own, strict=True)] for side, row in found.items()}
    faster = {side: statistics.median(row) for side, row in ratios.items() if side != "superstep"}
    for side, ratio in faster.items():
        print(f"superstep is {ratio:.2f}x {side}")
    write_result(
        asked.json,
        samples_a_step=size.group * size.groups,
        seconds_a_step=found,
        rewards=rewards,
        ours_is_faster_by=faster,
        ratios=ratios,
        settings=asdict(size) | {"flags": asked.flags, "lr": LR},
        versions=versions | {"superstep python": sys.version.split()[0]},
    )


if __name__ == "__main__":
    main()
