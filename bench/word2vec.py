"""The recipes of word2vec beside gensim: words a processor second, and the correlation with WordSim-353.

    python -m bench.word2vec --gensim PYTHON --text runs/gcide       JSON under bench/results/
    python -m bench.word2vec --gensim PYTHON --methods cbow          the others stay in the file

PYTHON is an interpreter that has gensim; both sides take turns, each on one thread. Then the same step on two ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

from bench.machine import write_result
from superstep.comm.mesh import build_mesh
from superstep.data.samples.sample_file import open_samples
from superstep.data.samples.sample_stream import SampleStream
from superstep.engine.engine import Engine
from superstep.engine.values.microbatch import example_of, microbatches_of, rows
from superstep.launch.ranks import World, launch_apart
from superstep.model.custom.user_model import load_units
from superstep.plan.config import RunConfig
from superstep.plan.config_io import read_config
from superstep.plan.user_file import run_file
from superstep.train.lr_schedule import rate
from superstep.train.weights.model import resolve_config

RECIPES = {"skip-gram": "word2vec", "cbow": "word2vec_cbow", "tree": "word2vec_tree"}
GENSIM = Path(__file__).parent / "word2vec_sides" / "gensim_words.py"
FASTER, NEAR, TWO_RANKS = 1.3, 0.02, 1.8
"""Words a processor second, as a multiple of gensim's; the correlation below gensim's; two ranks, of one."""
TIMED = 60
"""Steps of which the speed of two ranks is the median."""

Side = Mapping[str, float]
Clock = tuple[float, float]
"""Seconds, and those in which the processor worked."""


def judge() -> ModuleType:
    """The recipe that compares vectors with people."""
    return run_file(Path("recipes/judge_words.py"), "judge_words")


def config_of(method: str, dp: int, steps: int, seed: int) -> RunConfig:
    """The recipe on ``dp`` ranks, for so many steps."""
    config = read_config(Path("recipes") / f"{RECIPES[method]}.toml")
    train = replace(config.train, steps=steps, decay_steps=steps, seed=seed)
    plan = replace(config.plan, dp=dp, microbatch=train.batch_sequences // dp)
    return replace(config, train=train, plan=plan)


def train(world: World, method: str, steps: int, seed: int, text: str) -> tuple[list[Clock], float]:
    """Seconds and processor seconds of each step with its data, and the correlation."""
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[world.rank]})
    config = config_of(method, world.size, steps, seed)
    run = resolve_config(config)
    samples = open_samples(config.data.source or "")
    size = config.train.batch_sequences
    stream = SampleStream(samples, "train", batch_sequences=size, seed=seed)
    mesh = build_mesh(run.plan, world.rank, world.device, timeout=timedelta(minutes=5))
    mine = rows(run.plan, mesh)
    engine = Engine(run, load_units(config), mesh, example=example_of(stream.batch(0, mine)))
    clocks = []
    for step in range(steps):
        begin, processor = time.perf_counter(), time.process_time()
        batch = stream.batch(step * size, mine)
        microbatches = microbatches_of(batch, run.plan, mesh)
        engine.train_step(microbatches, valid_tokens=batch.valid_tokens, lr=rate(config.train, step))
        clocks.append((time.perf_counter() - begin, time.process_time() - processor))
    recipe = judge()
    (table,) = (piece.values for piece in engine.pieces(("weight",)) if piece.name == "0.inputs.weight")
    words = recipe.base.read_text()[0]
    vectors: np.ndarray = table.view(len(words), -1).numpy()
    correlation, _ = recipe.judge(vectors, words, Path(text) / "wordsim353.tsv")
    mesh.destroy()
    return clocks, correlation


def measure_ours(method: str, epochs: int, seed: int, text: Path) -> Side:
    """Train on one rank."""
    base = judge().base
    size = config_of(method, 1, 1, seed).train.batch_sequences
    steps = max(1, epochs * base.length("train") // size)
    clocks, correlation = launch_apart("cpu", 1, train, method, steps, seed, str(text))
    worked = sum(processor for _, processor in clocks)
    numbers = base.read_text()[2][: steps * size * base.PIECE]
    known = float((numbers >= 0).mean())
    whole = sum(line.count(" ") + 1 for line in (text / "text.txt").open(encoding="utf-8"))
    share = whole / int((base.read_text()[2] >= 0).sum())  # gensim counts words that are too rare, too
    return {"words_per_cpu_s": steps * size * base.PIECE * known * share / worked, "correlation": correlation}


def measure_gensim(python: str, method: str, epochs: int, seed: int, text: Path) -> Side:
    """The same by gensim."""
    command = [python, str(GENSIM), str(text), method, str(epochs), str(seed)]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    side: Side = json.loads(told.splitlines()[-1])
    return side


def measure_ranks(method: str, text: Path) -> dict[str, float]:
    """Medians of a step of the recipe on one rank and on two, each on its own core, and how many times faster two are:
    by the clock, and by processor seconds where other processes take turns.
    """
    found: dict[str, float] = {}
    for world in (1, 2):
        clocks, _ = launch_apart("cpu", world, train, method, TIMED, 0, str(text))
        found[f"{world}_s"], found[f"{world}_cpu_s"] = map(statistics.median, zip(*clocks[5:], strict=True))
    return {**found, "times": found["1_s"] / found["2_s"], "times_cpu": found["1_cpu_s"] / found["2_cpu_s"]}


def median(sides: Sequence[Side], key: str) -> float:
    return statistics.median(side[key] for side in sides)


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--gensim", required=True)
    parser.add_argument("--text", type=Path, default=Path("runs/gcide"))
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--methods", nargs="*", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--json", type=Path, default=Path("bench/results/word2vec.json"))
    args = parser.parse_args()
    found: dict[str, object] = {}
    is_met = True
    for method in args.methods:
        sides: dict[str, list[Side]] = {"ours": [], "gensim": []}
        for seed in range(args.seeds):
            sides["ours"].append(measure_ours(method, args.epochs, seed, args.text))
            sides["gensim"].append(measure_gensim(args.gensim, method, args.epochs, seed, args.text))
        times = median(sides["ours"], "words_per_cpu_s") / median(sides["gensim"], "words_per_cpu_s")
        below = median(sides["gensim"], "correlation") - median(sides["ours"], "correlation")
        ranks = measure_ranks(method, args.text)
        found[method] = {"epochs": args.epochs, **sides, "times": times, "below": below, "ranks": ranks}
        is_met = is_met and times >= FASTER and below <= NEAR and ranks["times"] >= TWO_RANKS
        ours, theirs = (median(sides[side], "correlation") for side in ("ours", "gensim"))
        print(
            f"{method}: {times:.2f} times gensim's words a processor second, correlation {ours:.4f} and {theirs:.4f}; "
            f"two ranks {ranks['times']:.2f} times one, {ranks['times_cpu']:.2f} by processor seconds",
            flush=True,
        )
    earlier = json.loads(args.json.read_text(encoding="utf-8"))["methods"] if args.json.exists() else {}
    write_result(args.json, methods={**earlier, **found})
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
