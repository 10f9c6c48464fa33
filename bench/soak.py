"""A run that things happen to: whether the bits stay, and whether a loaded machine is ever taken for a fault.

    python -m bench.soak                                   20 minutes of faults, 20 without any
    python -m bench.soak --minutes 2 --calm 2

In the soak one of all faults, by chance, happens to a small model about every 15 seconds, and in the end all losses
must have the bits of the run that nobody hurt. The calm run trains the demo, validates and saves beside two busy loops,
and no rank may be lost.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from bench.machine import write_result
from superstep.cli.flags.options import DEMO
from superstep.cli.prepare_progress import prepare_with_progress
from superstep.cli.prove.fault_injection import (
    KINDS,
    SIGNALS,
    FaultOutcome,
    FaultyRun,
    Kind,
    begin,
    compare_steps,
    hurt,
)
from superstep.cli.prove.faults import hurt_config
from superstep.plan.config import ModelConfig, PlanConfig, RunConfig
from superstep.train.weights.model import resolve_config, vocab_of

RESULT = Path(__file__).parent / "results" / "soak.json"
EVERY_S = 15.0
SMALL = RunConfig(
    model=ModelConfig(name="demo", layers=2, width=32, heads=2, kv_heads=2, head_dim=16, ffn=64, vocab=300),
    data=replace(DEMO.data, corpus=("text.txt",), sequence_tokens=64),
    train=replace(DEMO.train, batch_sequences=8, warmup_steps=10),
    plan=PlanConfig(dp=2, zero=1),
)
TEXT = "".join(f"the quick brown fox number {i % 7} jumps over the lazy dog.\n" for i in range(2000))
LOOPS = 2


def tokens(config: RunConfig, folder: Path) -> tuple[RunConfig, Path]:
    """The run, with the text that it is about, and the folder of its tokens, made."""
    if config.data.corpus:
        text = folder / config.data.corpus[0]
        text.write_text(TEXT, encoding="utf-8")
        config = replace(config, data=replace(config.data, corpus=(str(text),)))
    place = folder / "data"
    prepare_with_progress(config.data, vocab_of(resolve_config(config)), place, sys.stdout)
    return config, place


def _told(hurts: Sequence[FaultOutcome]) -> dict[str, Any]:
    """Seconds of each kind of fault."""
    found: dict[str, Any] = {}
    for kind in KINDS:
        of = [each for each in hurts if each.kind == kind]
        noticed = [each.noticed_s for each in of if each.noticed_s is not None]
        if of:
            again = [each.again_s for each in of]
            found[kind] = {
                "times": len(of),
                "seen_s": {"median": median(noticed), "max": max(noticed)} if noticed else None,
                "trains_again_s": {"median": median(again), "max": max(again)},
                "redone_steps": max(each.redone for each in of),
                "wrong": [each.wrong for each in of if each.wrong],
            }
    return found


def _go_on(run: FaultyRun, steps: int) -> None:
    run.wait_for(lambda: run.step() > 0, "its first step")
    until = run.step() + steps
    run.wait_for(lambda: run.step() >= until, f"step {until}")


def recoveries(config: RunConfig, corpus: Path, folder: Path, *, rounds: int, seed: int) -> dict[str, Any]:
    """Each way of losing a rank, so many times."""
    draw, place = random.Random(seed), folder / "rounds"
    place.mkdir()
    hurts = []
    with begin(hurt_config(config, corpus, place / "hurt"), place) as run:
        for _ in range(rounds):
            for kind in SIGNALS:
                _go_on(run, 4)
                hurts.append(hurt(run, kind, draw))
        run.end()
        left = run.list_remains()
    return {**_told(hurts), "left": left}


def soak(
    config: RunConfig,
    corpus: Path,
    folder: Path,
    *,
    seconds: float,
    seed: int,
    every_s: float = EVERY_S,
    kinds: Sequence[Kind] = KINDS,
) -> dict[str, Any]:
    """Faults by chance, each kind in its turn, for so long; then the bits."""
    draw, place = random.Random(seed), folder / "soak"
    place.mkdir()
    hurts: list[FaultOutcome] = []
    until_s = time.monotonic() + seconds
    with begin(hurt_config(config, corpus, place / "hurt"), place) as run:
        _go_on(run, 4)
        while time.monotonic() < until_s:
            turn = draw.sample(kinds, len(kinds))
            for kind in turn:
                begin_s = time.monotonic()
                hurts.append(hurt(run, kind, draw))
                time.sleep(max(0.0, every_s * draw.uniform(0.5, 1.5) - (time.monotonic() - begin_s)))
                if time.monotonic() > until_s:
                    break
        _go_on(run, 4)
        run.end()
        steps, left = run.step(), run.list_remains()
    with begin(hurt_config(config, corpus, place / "whole", is_hurt=False), place) as whole:
        whole.wait_for(lambda: whole.step() >= steps, f"step {steps}", patience_s=seconds + 600.0)
        whole.end()
    count, differs = compare_steps(run, whole)
    return {"seconds": seconds, **_told(hurts), "compared_steps": count, "differs": differs, "left": left}


@contextlib.contextmanager
def _busy() -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-Sc", "while True: pass"]) for _ in range(LOOPS)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def calm(config: RunConfig, corpus: Path, folder: Path, *, seconds: float) -> dict[str, Any]:
    """Nothing happens, beside busy loops: how many steps there were, and what was named in vain."""
    place = folder / "calm"
    place.mkdir()
    config = hurt_config(config, corpus, place / "calm")
    config = replace(
        config, train=replace(config.train, eval_every=20), state=replace(config.state, save_every=15, keep=2)
    )
    with _busy(), begin(config, place) as run:
        _go_on(run, 1)
        until_s = time.monotonic() + seconds
        run.wait_for(lambda: time.monotonic() > until_s, "the end", patience_s=seconds + 60.0)
        alarms = [line["lost"] for line in run.steps() if line["event"] == "resumed"]
        run.end()
        return {"seconds": seconds, "loops": LOOPS, "steps": run.step(), "alarms": alarms, "left": run.list_remains()}


def main() -> None:
    """Run both and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--calm", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no run is left
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        for part, config in (("demo", DEMO), ("small", SMALL)):
            folder = Path(name) / part
            folder.mkdir()
            config, corpus = tokens(config, folder)
            if part == "demo":
                found["calm"] = calm(config, corpus, folder, seconds=60 * options.calm)
            else:
                found["soak"] = soak(config, corpus, folder, seconds=60 * options.minutes, seed=options.seed)
    write_result(RESULT, **found)


if __name__ == "__main__":
    main()
