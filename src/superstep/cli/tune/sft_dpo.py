"""superstep tune sft and dpo: what a run begins with and learns from is their own, its loop that of train."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path

from superstep.cli.choices import idle_places, places_of, shorter_sequences
from superstep.cli.launcher import is_of_torchrun, launcher
from superstep.cli.prepare_progress import show
from superstep.cli.train.terminal import Terminal
from superstep.data.token_files import Corpus, is_whole
from superstep.launch.torchrun import join
from superstep.plan.resolve import Resolved
from superstep.run.exit_messages import ended
from superstep.run.job import RunKind, TrainJob, asked_device, prepared_job
from superstep.run.job_message import JOB
from superstep.run.launch_ranks import launch
from superstep.run.rank import rank_of_torchrun
from superstep.train import run_directory
from superstep.train.model import resolved, vocab_of
from superstep.train.run_paths import RunFolder
from superstep.tune.config import USUAL_TOKENS, TuneConfig, check_recipe
from superstep.tune.dpo import lesson_of
from superstep.tune.epochs import length_of
from superstep.tune.initial_model import run_of
from superstep.tune.prepare_conversations import Conversations, Kind
from superstep.tune.recipe import RECIPE, write


def run(read: Callable[[], tuple[Kind, TuneConfig]]) -> int:
    """Learn from conversations or preferences.

    Args:
        read: what is to be done, and the recipe; under torchrun rank 0 alone is asked.
    """
    if is_of_torchrun():
        worker = partial(rank_of_torchrun, console=Terminal())
        return join(lambda ranks: _prepared(*read(), ranks), worker, JOB, asked_device)
    with _prepared(*read()) as job:
        if job is None:
            return 0
        if (status := launch(job, Terminal())) is not None:
            return status
    print(f"\nResults: {job.folder.root}", flush=True)
    return 0


def _prepared(kind: Kind, config: TuneConfig, ranks: int | None = None) -> AbstractContextManager[TrainJob | None]:
    verb, lesson = f"tune {kind}", lesson_of(config.dpo) if kind == "dpo" else None
    check_recipe(kind, config)
    run = resolved(run_of(config), ranks)
    if ranks is None:
        _say_choices(config, run)
    recipe = replace(config, **{name: getattr(run.config, name) for name in ("plan", "numerics")})

    def tokens(run: Resolved, folder: RunFolder, checkpoint: Path | None) -> Path:
        return _tokens(Conversations(run.config, config.sft, vocab_of(run), kind), folder, checkpoint, verb)

    return prepared_job(
        run,
        tokens,
        Terminal(),
        launcher=launcher(),
        kind=RunKind(verb=verb, files={RECIPE: write(recipe)}, lesson=lesson, length=length_of(config.sft.epochs)),
    )


def _say_choices(config: TuneConfig, run: Resolved) -> None:
    """What was chosen for the user and is perhaps not what he would have chosen."""
    idle = idle_places(run, *places_of(run)) if config.plan.dp is None else None
    for line in (shorter_sequences(config, run.config, USUAL_TOKENS), idle):
        if line is not None:
            print(line, flush=True)


def _tokens(wanted: Conversations, folder: RunFolder, checkpoint: Path | None, verb: str) -> Path:
    """The folder of tokens, made where need be. A run goes on with those that it was started with."""
    cache = wanted.run.data.cache
    kept = Path(cache) if cache else folder.root / "data"
    if checkpoint is None or not is_whole(kept):
        try:
            _prepare(wanted, kept, is_shared=bool(cache))
        except (KeyboardInterrupt, SystemExit) as error:
            if (status := ended(error, folder, Terminal(), verb, is_of_torchrun=is_of_torchrun())) is not None:
                raise SystemExit(status) from None
            raise
    if checkpoint is not None:
        run_directory.check_tokens(checkpoint, kept)
    return kept


def _prepare(wanted: Conversations, folder: Path, *, is_shared: bool) -> Corpus:
    if wanted.is_prepared(folder):
        return wanted.prepare(folder)
    return show(
        f"the conversations of {', '.join(wanted.run.data.corpus)}",
        folder,
        sys.stdout,
        lambda report, tell: wanted.prepare(folder, report, tell=tell, is_shared=is_shared),
    )
