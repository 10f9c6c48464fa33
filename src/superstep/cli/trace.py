"""superstep trace: times of each instruction of the last steps, from the memory of the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from superstep.cli.arguments.trace import read
from superstep.errors import StateError
from superstep.observe.doctor.observations import RunObservation
from superstep.observe.multi_step_trace import newest_step, perfetto_steps, trace_of_step
from superstep.observe.number_format import seconds_text
from superstep.train.run_folder.inspect_run import live, read_failure, require_run
from superstep.train.run_folder.run_paths import RunFolder, write_whole


def main(argv: Sequence[str]) -> int:
    """Write the traces, and print their paths."""
    path, options = read(argv)
    folder = RunFolder(root=path)
    require_run(folder)
    run = observe_run(folder)
    out = Path(options.out) if options.out else folder.steps
    write_whole(out, perfetto_steps(run, name=str(folder.root), steps=options.steps), makes_folder=bool(options.out))
    when = "now" if run.is_live else "when it failed"
    print(f"the last steps of {len(run.ranks)} ranks, as of {when}: {out}, for ui.perfetto.dev or chrome://tracing")
    if (newest := newest_step(run)) is not None:
        step, ranks = newest
        write_whole(folder.trace, trace_of_step(step, ranks))
        took_s = max(n.end_s for notes in ranks for n in notes) - min(n.ready_s for notes in ranks for n in notes)
        print(f"step {step}, {seconds_text(took_s)}: {folder.trace}; superstep view {folder.root} draws it")
    return 0


def observe_run(folder: RunFolder) -> RunObservation:
    """The current run, or its last failure.

    Raises:
        StateError: it neither runs nor has failed.
    """
    with live(folder) as run:
        observed = read_failure(folder) if run is None else run.observe()
    if observed is None:
        raise StateError(
            f"'{folder.root}' does not train now on this host, and has no fault.json: run this while it trains. "
            "superstep view draws the step before its newest checkpoint."
        )
    return observed
