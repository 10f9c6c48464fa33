"""superstep prove, within a tolerance: one layout, one on emulated GPUs, or every layout of a world."""

from __future__ import annotations

import tempfile
from pathlib import Path

from superstep.cli.arguments.prove import ProveOptions
from superstep.cli.flags.new_file import write_new_file
from superstep.cli.prove.emulated import is_clean, prove_emulated, write_emulated_lines
from superstep.cli.prove.prove_text import sweep_head, sweep_lines, sweep_row, verdict_lines
from superstep.errors import ConfigError
from superstep.launch.ranks import World, launch_on
from superstep.plan.config import RunConfig
from superstep.plan.resolution.resolve import Resolved
from superstep.run.prove_layout import disk_named, proof_case, prove_layout
from superstep.strict.timeline import timeline_text
from superstep.train.proof.all_layouts import layouts
from superstep.train.proof.proof_inputs import Cases, ProofCase, prove_case
from superstep.train.proof.verdict import ProofVerdict


def prove_one(run: Resolved, corpus: Path, *, steps: int) -> int:
    """Prove one layout and print the verdict."""
    with proof_case(run, corpus, steps=steps) as case:
        verdict = prove_layout(case)
    for line in verdict_lines(case, verdict):
        _say(line)
    return 0 if verdict.is_proven else 1


def prove_on_emulated(run: Resolved, corpus: Path, options: ProveOptions) -> int:
    """Prove one layout on emulated GPUs, with the observations there."""
    with proof_case(run, corpus, steps=options.steps) as case:
        verdict, reports = launch_on("cuda", run.plan.mesh.world, prove_emulated, case)
    for line in (*verdict_lines(case, verdict), *write_emulated_lines(run, reports)):
        _say(line)
    if options.out is not None:
        write_new_file(Path(options.out), timeline_text([rank.step.trace for rank in reports]))
        _say(f"The order of a step's kernels: {options.out}, for ui.perfetto.dev or chrome://tracing.")
    return 0 if verdict.is_proven and is_clean(reports) else 1


def prove_layouts(config: RunConfig, world: int, corpus: Path, *, steps: int) -> int:
    """Prove every layout of ``world`` ranks; the exit status."""
    runs = list(layouts(config, world))
    if not runs:
        raise ConfigError(f"no layout of this model and batch fits {world} ranks; raise train.batch_sequences.")
    with tempfile.TemporaryDirectory(prefix="superstep-prove-") as folder, disk_named(Path(folder)):
        made = Cases(Path(folder), corpus, steps=steps)
        cases = [made.case(run, reruns=number % 4 == 0) for number, run in enumerate(runs)]
        _say(sweep_head())
        verdicts = launch_on(config.plan.device, world, _rank, tuple(cases))
    for line in sweep_lines(cases, verdicts):
        _say(line)
    return 0 if all(verdict.is_proven for verdict in verdicts) else 1


def _rank(world: World, cases: tuple[ProofCase, ...]) -> list[ProofVerdict]:
    verdicts = []
    for case in cases:
        verdicts.append(prove_case(world, case))
        if world.rank == 0 and len(cases) > 1:
            _say(sweep_row(case, verdicts[-1]))
    return verdicts


def _say(text: str) -> None:
    print(text, flush=True)
