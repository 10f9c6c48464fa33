"""superstep doctor: diagnosis of a run, live or after a failure."""

from __future__ import annotations

import json
import shutil
import time
import webbrowser
from collections.abc import Sequence
from dataclasses import asdict

from superstep.cli.arguments.doctor import read
from superstep.cli.damage import say_damage
from superstep.cli.doctor.doctor_text import page
from superstep.errors import StateError
from superstep.observe.doctor.diagnose import Diagnosis, diagnose
from superstep.observe.doctor.observations import RunObservation
from superstep.observe.jsonl import last_line
from superstep.observe.page.doctor import doctor_page
from superstep.train.run_folder.inspect_run import LiveRun, live, over, read_failure, require_run
from superstep.train.run_folder.run_lock import owner, preparation_text
from superstep.train.run_folder.run_paths import RunFolder, write_whole

PAGE_COLUMNS = 120
POLL_S = 0.2
LEAST_S, MOST_S = 1.0, 2.2
"""Seconds of observation: at least the first, for enough data; at most the second, without findings."""

GONE = ("", "T", "t", "Z")
"""States of a process that does not run."""

OVER = ("finished", "stopped")
"""Last events of a run that ended normally."""


def main(argv: Sequence[str]) -> int:
    """Print the page; 0 without findings, 1 with some."""
    path, options = read(argv)
    folder = RunFolder(root=path)
    if (prepared := preparation_text(folder)) is not None:
        if options.json:
            print(
                json.dumps(
                    {"run": str(folder.root), "is_live": True, "is_healthy": True, "preparing": prepared},
                    indent=1,
                )
            )
        else:
            print(f"{folder.root}: {prepared}.")
        return 0
    require_run(folder)
    say_damage(folder.metrics)
    examined_run = examine(folder)
    if examined_run is None:
        if options.json:
            nothing = Diagnosis(findings=(), waits=(), spent={}, is_still=False, step_s=0.0)
            print(json.dumps(as_json(folder, over(folder), nothing), indent=1))
            return 0
        print(f"{folder.root}: the run ended normally, so there is nothing to diagnose.")
        return 0
    run, verdict = examined_run
    if options.json:
        print(json.dumps(as_json(folder, run, verdict), indent=1))
    else:
        print(page(str(folder.root), run, verdict, width=shutil.get_terminal_size().columns, is_whole=options.stacks))
    if options.page or options.open:
        text = page(str(folder.root), run, verdict, width=PAGE_COLUMNS, is_whole=True)
        write_whole(folder.doctor, doctor_page(str(folder.root), run, verdict, text))
    if options.open:
        webbrowser.open(folder.doctor.resolve().as_uri())
    return 1 if verdict.findings else 0


def examine(folder: RunFolder) -> tuple[RunObservation, Diagnosis] | None:
    """The run, and its diagnosis; None for a run that ended normally.

    Raises:
        StateError: it does not train here, and has left no record.
    """
    diagnosis = None
    with live(folder) as run:
        if run is not None:
            diagnosis = look(run)
            if not any(each.kind == "gone" for each in diagnosis[1].findings) or not _has_ended(folder):
                return diagnosis
    event = last_line(folder.metrics).get("event")
    if event in OVER:
        return None
    observed = read_failure(folder)
    if observed is None and diagnosis is not None:
        return diagnosis
    observed = observed or over(folder)
    verdict = diagnose(observed)
    if not observed.ranks and not verdict.findings:  # a full disk has no room for a record either
        raise StateError(
            f"'{folder.root}' does not train now on this host, and has no fault.json: run this on the host of its "
            "ranks, while they run."
        )
    return observed, verdict


def _has_ended(folder: RunFolder) -> bool:
    """Whether a run with lost ranks is ending: then its launcher reports more."""
    until_s = time.monotonic() + MOST_S
    while owner(folder) is not None and time.monotonic() < until_s:
        time.sleep(POLL_S)
    return owner(folder) is None


def look(run: LiveRun) -> tuple[RunObservation, Diagnosis]:
    """The observation of a live run, with the stacks of its ranks, and its diagnosis."""
    begin_s = time.monotonic()
    run.looker.look()
    while True:
        time.sleep(POLL_S)
        looked_s = time.monotonic() - begin_s
        # A launcher ends a run with a stopped rank within a second.
        if looked_s < LEAST_S and not any(rank.state in GONE for rank in run.looker.look()):
            continue
        observed = run.observe()
        verdict = diagnose(observed)
        if verdict.findings or not verdict.is_still or looked_s >= MOST_S:
            break
    observed = run.with_stacks(observed)
    return observed, diagnose(observed)  # again: stacks show whose code a rank is in


def as_json(folder: RunFolder, run: RunObservation, verdict: Diagnosis) -> dict[str, object]:
    """The whole report except the notes, which superstep trace writes."""
    left_out = ("notes", "follows")
    ranks = [{name: value for name, value in asdict(rank).items() if name not in left_out} for rank in run.ranks]
    return {
        "run": str(folder.root),
        "is_live": run.is_live,
        "fault": run.fault,
        "host": run.host,
        "is_healthy": not verdict.findings,
        "stands": verdict.is_still,
        "step_s": verdict.step_s,
        "findings": [asdict(each) for each in verdict.findings],
        "waits": [asdict(each) for each in verdict.waits],
        "spent": {str(rank): asdict(each) for rank, each in verdict.spent.items()},
        "disk": asdict(run.disk),
        "ranks": ranks,
    }
