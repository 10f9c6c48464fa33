"""Preparation of a run: its directory, locked, its tokens, and the checkpoint to resume from."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from superstep.cost.program.time.operation import UnitOperations
from superstep.data.sources.source import describe_rows, open_source, stream_of
from superstep.data.token_files import Corpus
from superstep.observe.goodput import sum_spent_s
from superstep.plan.config_io import read_config
from superstep.plan.resolution.resolve import Resolved
from superstep.run.console import Console
from superstep.run.disk_check import require_activation_disk, require_disk
from superstep.run.job import TrainJob
from superstep.run.launch_rules import OWN, Launcher, check_launch
from superstep.run.memory_check import require_fit_here
from superstep.state.checkpoint import read_position
from superstep.state.verify import newest, verify
from superstep.train.policy.sequence_loss import SequenceLoss
from superstep.train.run_folder import run_directory
from superstep.train.run_folder.checkpoint_store import locked_folder, store_of
from superstep.train.run_folder.identity import identity_of, require_same_run
from superstep.train.run_folder.run_paths import RunFolder
from superstep.train.weights.initial_weights import check_start
from superstep.train.weights.model import flops_per_token, operations

Tokens = Callable[[Resolved, RunFolder, Path | None], Path]
"""Makes or opens the folder of a run's token files; receives the checkpoint to resume from."""

Length = Callable[[Resolved, Path], Resolved]
"""Sets a run's steps by its tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunKind:
    """Differences of a kind of run from ``superstep train``.

    Attributes:
        verb: the words after superstep that resume it.
        files: texts for its directory, by name.
        sequence_loss: a loss of whole sequences; None for a loss of each target.
        length: sets the steps by the tokens.
    """

    verb: str = "train"
    files: Mapping[str, str] = field(default_factory=dict)
    sequence_loss: SequenceLoss | None = None
    length: Length | None = None


TRAINING = RunKind()


@contextmanager
def prepare_job(
    run: Resolved,
    tokens: Tokens,
    console: Console,
    *,
    launcher: Launcher = OWN,
    kind: RunKind = TRAINING,
    hosts: int = 1,
) -> Iterator[TrainJob | None]:
    """The run's locked directory for the block, with its tokens; None for a complete run. With several hosts only the
    first one's launcher calls this.

    Args:
        run: the resolved run.
        tokens: makes or opens the token files.
        console: shows messages before the first step.
        launcher: of the ranks.
        kind: of run.
        hosts: that share the ranks.
    """
    check_launch(run.config, hosts, launcher)
    began_at_s = time.time()
    run, folder, checkpoint = run_directory.choose(run)
    store = store_of(run, checkpoint)
    if checkpoint is None:
        check_start(run)
    traced = operations(run)
    _require_room(run, traced, launcher, folder, run.plan.mesh.world // hosts)
    with locked_folder(run, folder, store, console.say) as is_fetched:
        checkpoint = _newest_of(run, folder) if is_fetched or checkpoint is not None else None
        step = 0 if checkpoint is None else read_position(checkpoint).step
        corpus = None if kind.length is None else tokens(run, folder, checkpoint)
        if kind.length is not None and corpus is not None:
            run = kind.length(run, corpus)
        if checkpoint is not None and step >= run.config.train.steps:  # nothing will read it again: verify every byte
            checkpoint = newest(folder.checkpoints, verify)
            step = 0 if checkpoint is None else read_position(checkpoint).step
        if step >= run.config.train.steps:
            console.say(f"The run in {folder.root} is complete at step {step}; raise --train.steps to continue it.")
            yield None
        else:
            require_disk(run, folder, step)
            corpus = corpus or tokens(run, folder, checkpoint)
            _say_passes(run, corpus, console)
            yield TrainJob(
                run=run,
                folder=folder,
                corpus=corpus,
                checkpoint=checkpoint,
                was_complete=checkpoint is not None
                and folder.config.is_file()  # it does not if the checkpoint came from a store
                and step >= read_config(folder.config).train.steps,
                operations=traced,
                flops_per_token=flops_per_token(run, traced),
                verb=kind.verb,
                files=kind.files,
                sequence_loss=kind.sequence_loss,
                began_at_s=began_at_s,
                earlier_s=sum_spent_s(folder.metrics),
            )


def _require_room(
    run: Resolved, traced: Sequence[UnitOperations] | None, launcher: Launcher, folder: RunFolder, ranks: int
) -> None:
    """Check this host's memory and disk for its ranks, before anything is written."""
    require_fit_here(run, traced, launcher, ranks)
    require_activation_disk(run, traced, folder.root, ranks)


def _newest_of(run: Resolved, folder: RunFolder) -> Path | None:
    """The newest checkpoint, which is to be of this run. It is chosen again once the directory is locked: ranks of an
    earlier launch may have ended only then.
    """
    checkpoint = newest(folder.checkpoints)
    if checkpoint is not None:
        require_same_run(checkpoint, identity_of(run), converts=run.config.state.convert)
    return checkpoint


def _say_passes(run: Resolved, corpus: Path, console: Console) -> None:
    """Show how full rows of ragged samples are, and a message if a step uses the data more than once."""
    opened, batch = open_source(corpus), run.config.train.batch_sequences
    if (rows := describe_rows(opened)) is not None:
        console.say(rows)
    if isinstance(opened, Corpus) and opened.manifest.train_tokens >= (batch + 1) * run.config.data.sequence_tokens:
        return  # then there are enough sequences, and counting is unnecessary
    passes = passes_of_a_step(batch, stream_of(run.config, opened, "train").sequences)
    if passes is not None:
        console.say(passes)


def passes_of_a_step(batch_sequences: int, sequences: int) -> str | None:
    """The message that a step uses the data more than once; None if it does not."""
    if batch_sequences <= sequences:
        return None
    times = f"{batch_sequences / sequences:,.1f}".removesuffix(".0")
    return (
        f"a step of {batch_sequences:,} sequences reads the {sequences:,} of the data {times} times; with "
        f"train.batch_sequences = {sequences} it reads them once."
    )
