"""superstep prove: the layout against the reference, in one table."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from superstep.cli.arguments.prove import ProveOptions, parse_emulated_gpus, read
from superstep.cli.choices import describe_changed_layout
from superstep.cli.flags.options import settle
from superstep.cli.prepare_progress import prepare_with_progress
from superstep.cli.prove.exact import ExactCase, prove_bits
from superstep.cli.prove.faults import prove_faults
from superstep.cli.prove.served import prove_served
from superstep.cli.prove.within_tolerance import prove_layouts, prove_on_emulated, prove_one
from superstep.comm.device import choose
from superstep.data.sources.source import open_source, stream_of
from superstep.errors import ConfigError
from superstep.plan.resolution.resolve import Resolved
from superstep.run.memory_check import require_fit_on_emulated_gpus
from superstep.run.tokens import proof_tokens
from superstep.train.proof.all_layouts import layouts
from superstep.train.proof.ignored_targets import make_ragged_batches
from superstep.train.weights.model import operations, resolve_config, vocab_of


def main(argv: Sequence[str]) -> int:
    """Prove; the exit status is 0 if everything holds."""
    options, yields_to = read(argv)
    if options.exact or options.serve or options.faults:
        options = replace(options, numerics=replace(options.numerics, exact=True))
    run = resolve_config(options) if yields_to is None else settle(options, yields_to, resolve_config)
    if (changed := describe_changed_layout(options, run, resolve_config)) is not None:
        _say(changed)
    # Fails before the reference has run for minutes.
    choose(options.plan.device, options.world or run.plan.mesh.world)
    if options.device is not None:
        require_fit_on_emulated_gpus(run, operations(run), parse_emulated_gpus(options)[1])
    with proof_tokens(run, partial(_prepare, run)) as corpus:
        if options.serve:
            stream = stream_of(run.config, open_source(corpus), "train")
            return prove_served(
                run,
                Path(argv[0]),
                stream,
                steps=options.steps,
                tp=options.serve_tp,
                logprobs=options.serve_logprobs or 0,
            )
        if options.faults:
            return prove_faults(run, corpus)
        if options.exact:
            return _exact(options, run, corpus)
        if options.device is not None:
            return prove_on_emulated(run, corpus, options)
        if not options.all:
            return prove_one(run, corpus, steps=options.steps)
        return prove_layouts(options, options.world or run.plan.mesh.world, corpus, steps=options.steps)


def _exact(options: ProveOptions, run: Resolved, corpus: Path) -> int:
    """Bits of one layout, or of every layout of a world."""
    world = options.world or run.plan.mesh.world
    runs = list(layouts(options, world)) if options.all else [run]
    if not runs:
        raise ConfigError(f"no layout of this model and batch fits {world} ranks; raise train.batch_sequences.")
    opened = open_source(corpus)
    with tempfile.TemporaryDirectory(prefix="superstep-prove-") as folder:
        return prove_bits(
            [
                ExactCase(
                    run,
                    make_ragged_batches(stream_of(run.config, opened, "train"), options.steps),
                    Path(folder) / _kind(run),
                )
                for run in runs
            ]
        )


def _prepare(run: Resolved, folder: Path) -> None:
    prepare_with_progress(run.config.data, vocab_of(run), folder, sys.stdout)


def _kind(run: Resolved) -> str:
    """Properties that a reference depends on besides the sizes: the model and the batches."""
    return f"tied={run.is_tied} packed={run.config.data.packed}"


def _say(text: str) -> None:
    print(text, flush=True)
