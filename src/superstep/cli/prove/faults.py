"""superstep prove --faults: a run with all faults, against the same run undisturbed, bit by bit."""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from superstep.cli.flags.options import sections_of
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
from superstep.errors import ConfigError, Fault
from superstep.plan.config import RunConfig, StateConfig
from superstep.plan.resolution.resolve import Resolved
from superstep.run.reports.plan_line import layout_text

SAVE_EVERY = 3
BETWEEN = 4
"""Fewest steps of training between two faults, with a checkpoint among them."""

DESCRIBED: dict[Kind, str] = {
    "killed": "a rank is killed",
    "stopped": "a rank is stopped",
    "hung": "a rank hangs in C",
    "launcher": "the launcher is killed",
    "damaged": "the newest checkpoint is damaged",
    "full disk": "the disk is full",
}


def prove_faults(run: Resolved, corpus: Path, *, kinds: Sequence[Kind] = KINDS, seed: int = 0) -> int:
    """Inject each fault once, in random order; print the outcomes, and whether all steps have the bits of the
    undisturbed run. The exit status is 0 if they do.

    Args:
        run: in exact mode.
        corpus: the folder of its tokens, or its file of samples.
        kinds: of faults.
        seed: of the order and the targets.

    Raises:
        ConfigError: the run's ranks cannot be launched here.
    """
    if sys.platform != "linux":
        raise ConfigError("--faults needs Linux; run it there.")
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="superstep-faults-") as name:
        place = Path(name)
        _say(f"  {layout_text(run)}, snapshots each step")
        _say(f"  {'fault':34}{'detected':>12}{'trains after':>14}{'redone':>8}  of")
        with begin(hurt_config(run.config, corpus, place / "hurt"), place) as victim:
            hurts = [_next(victim, kind, draw) for kind in draw.sample(kinds, len(kinds))]
            _go_on(victim, BETWEEN)
            status, steps = victim.end(), victim.step()
            left = victim.list_remains()
        with begin(hurt_config(run.config, corpus, place / "whole", is_hurt=False), place) as whole:
            whole.wait_for(lambda: whole.step() >= steps, f"step {steps}")
            whole.end()
        count, differs = compare_steps(victim, whole)
    wrong = [f"{DESCRIBED[each.kind]}: {each.wrong}" for each in hurts if each.wrong]
    wrong += [f"left behind: {', '.join(left)}"] if left else []
    wrong += [differs] if differs else []
    wrong += [] if status == 143 else [f"after SIGTERM, it ended with exit status {status}"]
    for each in wrong:
        _say(f"✗ {each}")
    _say(verdict(hurts, count, wrong))
    return 1 if wrong else 0


def verdict(hurts: Sequence[FaultOutcome], steps: int, wrong: Sequence[str]) -> str:
    """The last line."""
    what = f"{len(hurts)} faults within {steps} steps"
    if wrong:
        return f"NOT PROVEN: {what}, {len(wrong)} wrong."
    redone = max((each.redone for each in hurts if each.kind in SIGNALS), default=0)
    return (
        f"PROVEN: {what}, each loss and gradient norm with the bits of the undisturbed run; a lost rank cost "
        f"{redone} {'step' if redone == 1 else 'steps'} at most, and nothing is left behind."
    )


def hurt_config(config: RunConfig, corpus: Path, folder: Path, *, is_hurt: bool = True) -> RunConfig:
    """The run in a folder of its own, without an end; with snapshots if faults are injected."""
    keep = StateConfig(
        dir=str(folder), save_every=SAVE_EVERY if is_hurt else 10**9, keep=3, snapshot_every=1 if is_hurt else None
    )
    place = str(corpus.resolve())
    data = replace(config.data, cache=place) if config.data.source is None else replace(config.data, source=place)
    return replace(
        RunConfig(**sections_of(config)),
        data=data,
        train=replace(config.train, steps=10**6, eval_every=10**6),
        numerics=replace(config.numerics, exact=True),
        state=keep,
        observe=replace(config.observe, tensorboard=False),
    )


def _next(run: FaultyRun, kind: Kind, draw: random.Random) -> FaultOutcome:
    _go_on(run, BETWEEN)
    try:
        result = hurt(run, kind, draw)
    except Fault as fault:
        raise Fault(f"{DESCRIBED[kind]}: {fault.message}") from fault
    noticed_text = "" if result.noticed_s is None else f"{result.noticed_s:.2f} s"
    again = f"{result.again_s:.2f} s"
    mark = "✗" if result.wrong else " "
    _say(f"{mark} {DESCRIBED[kind]:34}{noticed_text:>12}{again:>14}{result.redone:>8}  {result.what}")
    return result


def _go_on(run: FaultyRun, steps: int) -> None:
    run.wait_for(lambda: run.step() > 0, "its first step")
    until = run.step() + steps
    run.wait_for(lambda: run.step() >= until, f"step {until}")


def _say(text: str) -> None:
    print(text, flush=True)
