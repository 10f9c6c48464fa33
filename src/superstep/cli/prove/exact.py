"""superstep prove --exact: layouts against one rank, bit by bit."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from superstep.data.batch import Batch
from superstep.errors import StateError
from superstep.launch.ranks import World, launch_on
from superstep.plan.config import PlanConfig
from superstep.plan.resolution.resolve import Resolved
from superstep.run.reports.plan_line import layout_text
from superstep.train.proof.prove_exact import ExactVerdict, Relay, prove_exact, write_bits
from superstep.train.weights.model import resolve_config

STOP = 1
"""Finished steps at which one layout stops and another resumes."""


@dataclass(frozen=True, slots=True)
class ExactCase:
    """A layout, its batches, and the folder of one rank's bits for them."""

    run: Resolved
    batches: tuple[Batch, ...]
    reference: Path


def prove_bits(cases: Sequence[ExactCase]) -> int:
    """Run each layout from the start, and from where the one before it stopped; print the differences.

    All layouts have equally many ranks. The first resumes from one rank's checkpoint, and one rank resumes from the
    last one's: the number of ranks changes during the run.
    """
    references = {case.reference: case for case in cases}
    device = cases[0].run.config.plan.device
    with tempfile.TemporaryDirectory(prefix="superstep-prove-") as folder:
        ones = {reference: replace_run(case, _alone(case.run)) for reference, case in references.items()}
        for reference, one in ones.items():
            _wait_written(reference)
            launch_on(device, 1, write_bits, one.run, one.batches, reference, stop=STOP)
        _say(f"  {'layout':82}{'numbers':>12}{'other bits':>12}{'resumed':>10}")
        verdicts = launch_on(device, cases[0].run.plan.mesh.world, _ranks, tuple(cases), Path(folder))
        verdicts += [
            launch_on(device, 1, _one, one, Path(folder) / last)
            for reference, one in ones.items()
            for last in [_name_left(number) for number, case in enumerate(cases) if case.reference == reference][-1:]
        ]
    wrong = [verdict for verdict in verdicts if not verdict.is_proven]
    _say(
        f"{'NOT PROVEN' if wrong else 'PROVEN'}: {len(cases)} {'layout' if len(cases) == 1 else 'layouts'} on "
        f"{cases[0].run.plan.mesh.world} ranks and back on one: {sum(v.compared for v in verdicts)} numbers compared, "
        f"{sum(v.differing for v in verdicts)} with other bits."
    )
    return 1 if wrong else 0


def replace_run(case: ExactCase, run: Resolved) -> ExactCase:
    """The case on another layout."""
    return ExactCase(run, case.batches, case.reference)


def _alone(run: Resolved) -> Resolved:
    """The same run on one rank, at the same microbatch size; rules say which sums have cells."""
    plan = PlanConfig(microbatch=run.plan.microbatch, rules=run.config.plan.rules)
    return resolve_config(replace(run.config, plan=plan))


def _wait_written(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StateError(f"{folder} cannot hold the reference: {error.strerror}; free space there.") from error


def _name_left(number: int) -> str:
    return f"left-{number}"


def _ranks(world: World, cases: tuple[ExactCase, ...], folder: Path) -> list[ExactVerdict]:
    results = []
    left: dict[Path, Path] = {}
    for number, case in enumerate(cases):
        take = left.get(case.reference, case.reference / "checkpoint")
        relay = Relay(take=take, leave=folder / _name_left(number), step=STOP)
        results.append(prove_exact(world, case.run, case.batches, case.reference, relay))
        left[case.reference] = folder / _name_left(number)
        if world.rank == 0:
            _row(layout_text(case.run), results[-1])
            if take.parent == folder:
                shutil.rmtree(take, ignore_errors=True)
    return results


def _one(world: World, case: ExactCase, take: Path) -> ExactVerdict:
    verdict = prove_exact(world, case.run, case.batches, case.reference, Relay(take=take, leave=None, step=STOP))
    _row("one rank, from there", verdict)
    return verdict


def _row(name: str, verdict: ExactVerdict) -> None:
    mark = "  " if verdict.is_proven else "✗ "
    held = "same" if verdict.first_resumed is None else "DIFFERS"
    _say(f"{mark}{name:82}{verdict.compared:>12,}{verdict.differing:>12,}{held:>10}")
    if verdict.first is not None:
        _say(f"    first: {verdict.first.describe()}")
    if verdict.first_resumed is not None:
        _say(f"    first after the restart: {verdict.first_resumed.describe()}")


def _say(text: str) -> None:
    print(text, flush=True)
