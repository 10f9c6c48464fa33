"""The job of a run's ranks: its directory, tokens and checkpoint, prepared and held."""

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
"""Makes the folder of token files of a run, or finds it; given the checkpoint that it goes on from."""

Length = Callable[[Resolved, Path], Resolved]
"""The run with as many steps as its tokens make."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunKind:
    """What makes a run another one than that of ``superstep train``.

    Attributes:
        verb: the words after superstep that go on with it.
        files: texts for its directory, by name.
        lesson: what is learnt of a batch, where that is not each of its targets.
        length: sets the steps by the tokens.
    """

    verb: str = "train"
    files: Mapping[str, str] = field(default_factory=dict)
    lesson: SequenceLoss | None = None
    length: Length | None = None


TRAINING = RunKind()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainJob:
    """What every rank is told."""

    run: Resolved
    folder: RunFolder
    corpus: Path
    checkpoint: Path | None
    was_complete: bool
    """Whether it goes on beyond what was its last step: then what follows a demo has been seen."""
    operations: tuple[UnitOperations, ...] | None
    """What the units do; None where it cannot be told before they run."""
    flops_per_token: float | None
    verb: str = "train"
    """The words after superstep that go on with the run."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Texts to write into the run directory, by name."""
    lesson: SequenceLoss | None = None
    """What is learnt of a batch, where that is not each of its targets."""
    snapshots: Handles | None = None
    """The ranks' memories that outlive them, where there are any."""
    recovered: Recovery | None = None
    """What was lost, where something was, and the snapshot to go on from in the place of the checkpoint."""
    asked: Resolved | None = None
    """The run as it was asked for, where it goes on under a plan for fewer ranks: the directory keeps that one."""
    epoch: int = 0
    """How often launchers of several hosts have started ranks: none of them has all memories, and ranks write
    checkpoints. 0 where one launcher does."""
    began_at_s: float = 0.0
    """When the launch began, in seconds since 1970."""
    earlier_s: float = 0.0
    """What launches of the run before this one took."""


def asked_device(job: TrainJob | None) -> DeviceKind | None:
    """The device that a run asks for."""
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
    """The run's directory, held for the length of the block, and the tokens in their place; None where there is
    nothing left to do. With several hosts this is for the first one's launcher to do.

    Args:
        run: that is trained.
        tokens: makes them, or finds them.
        console: is told what there is to say before the first step.
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
    seen = operations(run)
    here = run.plan.mesh.world // hosts
    # torchrun says how many of its ranks are on this host, srun does not.
    if choose(run.config.plan.device, launcher.ranks_here(here)) == "cpu":
        # What a GPU has left its rank alone can tell: to ask takes a part of it.
        require_fit(run, Device("cpu"), seen, ranks=launcher.local_ranks or here)
    with hold(folder), mirrored(folder.checkpoints, store, run.config.state.keep):
        if store is not None and run.config.state.existing == "resume":
            for told in fetch_newest(store, folder.checkpoints):
                console.say(told)
            checkpoint = newest(folder.checkpoints)
        if checkpoint is not None:  # what was left of the run before may have come to its end only now
            checkpoint = newest(folder.checkpoints)
        if checkpoint is not None:
            require_same_run(checkpoint, identity_of(run))
        step = 0 if checkpoint is None else read_position(checkpoint).step
        corpus = None if kind.length is None else tokens(run, folder, checkpoint)
        if kind.length is not None and corpus is not None:
            run = kind.length(run, corpus)
        if checkpoint is not None and step >= run.config.train.steps:  # nobody will read it again: every byte, then
            checkpoint = newest(folder.checkpoints, verify)
            step = 0 if checkpoint is None else read_position(checkpoint).step
        if step >= run.config.train.steps:
            console.say(f"The run in {folder.root} is complete at step {step}; raise --train.steps to go on with it.")
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
                and folder.config.is_file()  # it is not where the checkpoint came from a store
                and step >= read_config(folder.config).train.steps,
                operations=seen,
                flops_per_token=flops_per_token(run, seen),
                verb=kind.verb,
                files=kind.files,
                lesson=kind.lesson,
                began_at_s=began_at_s,
                earlier_s=spent_s(folder.metrics),
            )


def _say_passes(run: Resolved, corpus: Path, console: Console) -> None:
    """Say where a step goes over the data more than once."""
    opened, batch = open_corpus(corpus), run.config.train.batch_sequences
    if opened.manifest.train_tokens >= (batch + 1) * run.config.data.sequence_tokens:
        return  # then there are as many sequences, and nobody need count them
    passes = passes_of_a_step(batch, stream_of(run.config, opened, "train").sequences)
    if passes is not None:
        console.say(passes)


def passes_of_a_step(batch_sequences: int, sequences: int) -> str | None:
    """That a step goes over the data more than once; None where it does not."""
    if batch_sequences <= sequences:
        return None
    times = f"{batch_sequences / sequences:,.1f}".removesuffix(".0")
    return (
        f"a step of {batch_sequences:,} sequences goes over the {sequences:,} of the data {times} times; "
        f"with train.batch_sequences = {sequences} it goes over them once."
    )


def watch_of(job: TrainJob) -> FolderWatch:
    """A watch of the run directory, which knows what a folder in its place needs to be gone on with."""
    return FolderWatch(job.folder, {job.folder.config.name: write_config((job.asked or job.run).config), **job.files})
