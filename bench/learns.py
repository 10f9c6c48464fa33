"""Does a model learn from rewards? Held-out answers before and after, for some seeds, and with rewards by chance.

The demo model reads conversations of the three tasks of ``recipes/toy_tasks.py`` until it gets some of them right. Then
``superstep tune rl`` gives it tasks and rewards alone. Held out are tasks of numbers that nobody trains on; the
likeliest answer counts. The rewards of the control are drawn by a hash of task and answer, as often 1 as the true ones
were at first: who learns from them gains by something else than the reward.

    python -m bench.learns [--seeds 3] [--steps 2800]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from bench.machine import write_result
from superstep.grade.environment import load_environment
from superstep.serve.build_engine import open_engine
from superstep.serve.config import ServeConfig
from superstep.state.checkpoint_dirs import checkpoints
from superstep.train.weights.weights_folder import weights_of
from superstep.tune.rl.config import RolloutConfig
from superstep.tune.rl.sampling import RolloutSampler, words_of

TASKS = Path(__file__).parents[1] / "recipes" / "toy_tasks.py"
HELD_OUT = range(1_000_000, 1_000_300)
WATCHED = range(2_000_000, 2_000_300)
"""Others, by which the warm-up is ended: from one step to the next a task may be learnt whole."""
ENOUGH, LEAST, MOST = 0.4, 0.1, 0.5
"""The share of all, and the least of each task, that the model shall get right when it begins."""
SEED = 7
TOKENS = 64
MIX = ("sums",) * 18 + ("form",) * 3 + ("reverse",) * 3
"""Conversations of the warm-up: sums take a small model longest."""

SHUFFLED = """
import hashlib
import importlib.util

spec = importlib.util.spec_from_file_location("toy_tasks", {path!r})
toy = importlib.util.module_from_spec(spec)
spec.loader.exec_module(toy)
task = toy.task


def grade(task, rollout):
    text = f"{{task.prompt}}|{{rollout.answer}}"
    return hashlib.blake2b(text.encode()).digest()[0] < 256 * {share}
"""


def right(folder: Path, numbers: range = HELD_OUT) -> dict[str, float]:
    """The share of some tasks that a model's likeliest answer gets right: of each task, and of all."""
    environment, words = load_environment(TASKS), words_of(weights_of(folder))
    engine = open_engine(weights_of(folder), ServeConfig(context_tokens=TOKENS, compute="fp32", pages=2048))
    how = RolloutConfig(max_tokens=30, temperature=1e-3)
    asked = {number: environment.task(number, SEED) for number in numbers}
    found: dict[str, list[bool]] = defaultdict(list)
    for group in RolloutSampler(engine, words, environment, how, group=1, seed=0).sample(list(asked.items()), 0):
        task = asked[group.number]
        found[str(task.data["task"])].append(bool(environment.judge(task, group.answers[0].rollout)))
    engine.end()
    words.template.close()
    every = [each for row in found.values() for each in row]
    return {name: sum(row) / len(row) for name, row in sorted(found.items())} | {"all": sum(every) / len(every)}


def superstep(*words: str, **flags: object) -> float:
    """A verb's seconds. Flags are named as Python names things: ``train__batch_sequences``."""
    given = [w for name, value in flags.items() for w in (f"--{name.replace('__', '.').replace('_', '-')}", str(value))]
    begin_s = time.monotonic()
    subprocess.run([sys.executable, "-m", "superstep", *words, *given], check=True)
    return time.monotonic() - begin_s


def warmed_up(folder: Path, steps: int = 600) -> Path:
    """The demo model after some steps on conversations, at most so many: the first checkpoint that gets enough right.

    Raises:
        SystemExit: none does.
    """
    spec = importlib.util.spec_from_file_location("toy_tasks", TASKS)
    assert spec is not None
    assert spec.loader is not None
    toy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(toy)
    with (folder / "text.jsonl").open("w", encoding="utf-8") as file:
        for number in range(6000):
            question, answer = toy.example(toy.TASKS[number % 3], number, seed=1)
            file.write(json.dumps({"text": f"User: {question}\n\nAssistant: {answer}"}) + "\n")
    with (folder / "said.jsonl").open("w", encoding="utf-8") as file:
        for number in range(12_000):
            file.write(json.dumps(toy.conversation(MIX[number % len(MIX)], number // len(MIX), seed=1)) + "\n")
    common = {
        "data__sequence_tokens": TOKENS,
        "train__batch_sequences": 32,
        "plan__dp": 1,
        "plan__microbatch": 32,
    }
    # A tokenizer, and a model that has seen next to nothing.
    superstep(
        "train",
        data__corpus=folder / "text.jsonl",
        data__document_mask="true",
        model__name="demo",
        model__vocab=300,
        train__steps=20,
        state__dir=folder / "new",
        **common,
    )
    superstep(
        *("tune", "sft"),
        start=folder / "new",
        data__corpus=folder / "said.jsonl",
        train__steps=steps,
        train__lr=3e-3,
        train__warmup_steps=20,
        train__min_lr_ratio=1.0,
        state__dir=folder / "warm-up",
        state__save_every=10,
        state__keep=steps,
        **common,
    )
    for place in checkpoints(folder / "warm-up" / "checkpoints"):
        found = right(place, WATCHED)
        if ENOUGH <= found["all"] <= MOST and min(found.values()) >= LEAST:
            return place
    raise SystemExit(f"of {steps} steps none leaves {ENOUGH:.0%} to {MOST:.0%} of all tasks right, and some of each.")


def learnt(start: Path, environment: Path, root: Path, *, seed: int, steps: int, ranks: int) -> dict[str, Any]:
    """What a run came to."""
    seconds = superstep(
        *("tune", "rl"),
        start=start,
        rl__environment=environment,
        rl__group=8,
        rl__groups=16,
        rl__overlong="none",
        rollout__max_tokens=30,
        rollout__requests=128,
        data__sequence_tokens=TOKENS,
        numerics__compute="bf16",
        train__steps=steps,
        rl__estimator="dr-grpo",
        train__lr=3e-4,  # at 6e-4 and without a warm-up the answers lose their variety in the first steps
        train__warmup_steps=40,
        train__min_lr_ratio=0.1,
        train__seed=seed,
        plan__dp=ranks,
        plan__microbatch=8,
        grade__sandbox="none",
        grade__workers=ranks,
        state__dir=root,
        state__save_every=200,
    )
    rolled = [json.loads(line) for line in (root / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    rewards = [line["reward"] for line in rolled if line["event"] == "rolled"]
    return {"seed": seed, "seconds": seconds, "after": right(root), "answers": 128 * steps, "rewards": rewards}


def main(argv: list[str] | None = None) -> None:
    """Run all, and write bench/results/learns.json after each."""
    parser = argparse.ArgumentParser(description="Held-out answers before and after learning from rewards.")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2800)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--start", type=Path, help="a checkpoint to begin with; none warms one up")
    parser.add_argument("--kinds", nargs="+", choices=("true", "shuffled"), default=["true", "shuffled"])
    parser.add_argument("--out", type=Path, default=Path("bench/results/learns.json"))
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        start = options.start or warmed_up(folder)
        before = right(start)
        print(f"before: {before}", flush=True)
        shuffled = folder / "shuffled.py"
        shuffled.write_text(SHUFFLED.format(path=str(TASKS), share=before["all"]), encoding="utf-8")
        found: dict[str, list[dict[str, Any]]] = {"true": [], "shuffled": []}
        for kind in options.kinds:
            environment = TASKS if kind == "true" else shuffled
            for seed in range(options.seeds):
                root = folder / f"{kind}-{seed}"
                row = learnt(start, environment, root, seed=seed, steps=options.steps, ranks=options.ranks)
                found[kind].append(row)
                print(f"{kind} {seed}: {row['after']} in {row['seconds']:.0f} s", flush=True)
                write_result(options.out, before=before, steps=options.steps, ranks=options.ranks, **found)


if __name__ == "__main__":
    main()
