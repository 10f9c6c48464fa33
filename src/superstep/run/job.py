"""The job of a run's ranks: its directory, tokens and checkpoint, prepared and locked."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from superstep.comm.device import Device, choose
from superstep.cost.program.time.operation import UnitOperations
from superstep.data.token_files import open_corpus
from superstep.data.token_stream import stream_of
from superstep.observe.goodput import spent_s
from superstep.plan.config import DeviceKind
from superstep.plan.config_io import read_config, write_config
from superstep.plan.resolution.resolve import Resolved
from superstep.run.console import Console
from superstep.run.disk_check import require_disk
from superstep.run.launch_rules import OWN, Launcher, check_launch
from superstep.run.memory_check import require_fit
from superstep.run.recover import Recovery
from superstep.state.checkpoint import read_position
from superstep.state.object_store.store import CheckpointStore
from superstep.state.object_store.store_sync import fetch_newest, mirrored
from superstep.state.snapshots.memory_snapshot import Handles
from superstep.state.verify import newest, verify
from superstep.train.policy.sequence_loss import SequenceLoss
from superstep.train.run_folder import run_directory
from superstep.train.run_folder.checkpoint_store import store_of
from superstep.train.run_folder.folder_watch import FolderWatch
from superstep.train.run_folder.identity import identity_of, require_same_run
from superstep.train.run_folder.run_lock import hold
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
        lesson: a loss of whole sequences; None for a loss of each target.
        length: sets the steps by the tokens.
    """

    verb: str = "train"
    files: Mapping[str, str] = field(default_factory=dict)
    lesson: SequenceLoss | None = None
    length: Length | None = None


TRAINING = RunKind()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainJob:
    """The job that every rank receives."""

    run: Resolved
    folder: RunFolder
    corpus: Path
    checkpoint: Path | None
    was_complete: bool
    """Whether it continues beyond an earlier last step: then a demo's hints were shown already."""
    operations: tuple[UnitOperations, ...] | None
    """Operations of the units; None if they are not known before they run."""
    flops_per_token: float | None
    verb: str = "train"
    """The words after superstep that resume the run."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Texts to write into the run directory, by name."""
    lesson: SequenceLoss | None = None
    """A loss of whole sequences; None for a loss of each target."""
    snapshots: Handles | None = None
    """The ranks' memories that outlive them, if any."""
    recovered: Recovery | None = None
    """After a loss of ranks: the lost ones, and the snapshot to resume from instead of the checkpoint."""
    requested: Resolved | None = None
    """The requested run, if the current plan has fewer ranks: the directory keeps the requested one."""
    epoch: int = 0
    """Number of starts by launchers of several hosts: none of them has all memories, and ranks write checkpoints. 0
    with one launcher.
    """
    began_at_s: float = 0.0
    """Start of the launch, in seconds since 1970."""
    earlier_s: float = 0.0
    """Seconds of the run's earlier launches."""


def asked_device(job: TrainJob | None) -> DeviceKind | None:
    """The device of a run's settings."""
    return None if job is None else job.run.config.plan.device


@contextmanager
def prepared_job(
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
    _check_memory(run, traced, launcher, run.plan.mesh.world // hosts)
    with hold(folder), mirrored(folder.checkpoints, store, run.config.state.keep):
        checkpoint = _choose_checkpoint(run, folder, store, checkpoint, console)
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
                lesson=kind.lesson,
                began_at_s=began_at_s,
                earlier_s=spent_s(folder.metrics),
            )


def _check_memory(run: Resolved, traced: tuple[UnitOperations, ...] | None, launcher: Launcher, here: int) -> None:
    """Refuse a run that this host's memory does not hold. ``here``: its ranks, if the launcher does not say."""
    # torchrun gives the number of its ranks on this host, srun does not.
    if choose(run.config.plan.device, launcher.ranks_here(here)) == "cpu":
        # Only a GPU's own rank knows its free memory: reading it uses a part of it.
        require_fit(run, Device("cpu"), traced, ranks=launcher.local_ranks or here)


def _choose_checkpoint(
    run: Resolved, folder: RunFolder, store: CheckpointStore | None, checkpoint: Path | None, console: Console
) -> Path | None:
    """The checkpoint to resume from, chosen again now that the directory is locked: ranks of an earlier launch may have
    ended only now, and a store may have a newer one.
    """
    if store is not None and run.config.state.existing == "resume":
        for line in fetch_newest(store, folder.checkpoints):
            console.say(line)
    elif checkpoint is None:
        return None
    newest_one = newest(folder.checkpoints)
    if newest_one is not None:
        require_same_run(newest_one, identity_of(run))
    return newest_one


def _say_passes(run: Resolved, corpus: Path, console: Console) -> None:
    """Show a message if a step uses the data more than once."""
    opened, batch = open_corpus(corpus), run.config.train.batch_sequences
    if opened.manifest.train_tokens >= (batch + 1) * run.config.data.sequence_tokens:
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


def watch_of(job: TrainJob) -> FolderWatch:
    """A watch of the run directory, with the files that a replacement needs for resuming."""
    return FolderWatch(
        job.folder, {job.folder.config.name: write_config((job.requested or job.run).config), **job.files}
    )
