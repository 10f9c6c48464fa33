"""superstep tune sft and dpo: their own initial model and data, with the loop of train."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from superstep.cli.choices import idle_places, places_of
from superstep.cli.launcher import is_of_torchrun, launcher
from superstep.cli.prepare_progress import show
from superstep.cli.train.terminal import Terminal
from superstep.data.token_files import Corpus
from superstep.plan.resolution.resolve import Resolved
from superstep.run.exit_messages import end_by_signal
from superstep.run.job import TrainJob
from superstep.run.launch_ranks import join_torchrun, launch
from superstep.run.tune_job import prepare_tune_job, resolve_recipe
from superstep.train.run_folder.run_paths import RunFolder
from superstep.tune.config import USUAL_TOKENS, TuneConfig
from superstep.tune.prepare_conversations import Conversations, Kind
from superstep.tune.recipe import shorter_sequences


def run(read: Callable[[], tuple[Kind, TuneConfig]]) -> int:
    """Learn from conversations or preferences.

    Args:
        read: the kind and the recipe; under torchrun only rank 0 calls it.
    """
    if is_of_torchrun():
        return join_torchrun(lambda ranks: _prepare_job(*read(), ranks), Terminal())
    with _prepare_job(*read()) as job:
        if job is None:
            return 0
        if (status := launch(job, Terminal())) is not None:
            return status
    print(f"\nResults: {job.folder.root}", flush=True)
    return 0


def _prepare_job(kind: Kind, config: TuneConfig, ranks: int | None = None) -> AbstractContextManager[TrainJob | None]:
    run = resolve_recipe(kind, config, ranks)
    if ranks is None:
        _say_choices(config, run)
    return prepare_tune_job(run, kind, config, partial(_make, verb=f"tune {kind}"), Terminal(), launcher=launcher())


def _say_choices(config: TuneConfig, run: Resolved) -> None:
    """Show automatic choices that the user might not expect."""
    idle = idle_places(run, *places_of(run)) if config.plan.dp is None else None
    for line in (shorter_sequences(config, run.config, USUAL_TOKENS), idle):
        if line is not None:
            print(line, flush=True)


def _make(wanted: Conversations, kept: Path, folder: RunFolder, *, verb: str) -> None:
    """Make the token files of a run, with progress output."""
    try:
        _prepare(wanted, kept, is_shared=bool(wanted.run.data.cache))
    except (KeyboardInterrupt, SystemExit) as error:
        if (status := end_by_signal(error, folder, Terminal(), verb, is_of_torchrun=is_of_torchrun())) is not None:
            raise SystemExit(status) from None
        raise


def _prepare(wanted: Conversations, folder: Path, *, is_shared: bool) -> Corpus:
    if wanted.is_prepared(folder):
        return wanted.prepare(folder)
    return show(
        f"the conversations of {', '.join(wanted.run.data.corpus)}",
        folder,
        sys.stdout,
        lambda report, tell: wanted.prepare(folder, report, tell=tell, is_shared=is_shared),
    )
