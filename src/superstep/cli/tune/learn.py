"""superstep tune sft and dpo: what a run begins with and learns from is their own, its loop that of train."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from superstep.cli.arguments.tune import RECIPE
from superstep.cli.preparing import show
from superstep.cli.train.ending import ended
from superstep.cli.train.job import Job, asked_device, launched, prepared_job, rank_of_torchrun
from superstep.data.tokens import Corpus, is_whole
from superstep.errors import ConfigError
from superstep.plan.config import RunConfig
from superstep.plan.resolve import Resolved
from superstep.plan.toml import read_config
from superstep.runtime.join import join
from superstep.train import rundir
from superstep.train.model import resolved, vocab_of
from superstep.train.run_folder import RunFolder
from superstep.tune.config import TuneConfig, read_recipe
from superstep.tune.dpo import lesson_of
from superstep.tune.length import check_epochs, length_of
from superstep.tune.prepare import Conversations, Kind
from superstep.tune.recipe import write
from superstep.tune.start import started


def run(read: Callable[[], tuple[Kind, TuneConfig]]) -> int:
    """Learn from conversations or preferences.

    Args:
        read: what is to be done, and the recipe; under torchrun rank 0 alone is asked.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return join(lambda ranks: _prepared(*read(), ranks), rank_of_torchrun, asked_device)
    with _prepared(*read()) as job:
        if job is None:
            return 0
        if (status := launched(job)) is not None:
            return status
    print(f"\nResults: {job.folder.root}", flush=True)
    return 0


def _prepared(kind: Kind, config: TuneConfig, ranks: int | None = None) -> AbstractContextManager[Job | None]:
    verb, lesson = f"tune {kind}", lesson_of(config.dpo) if kind == "dpo" else None
    check_epochs(config)
    run = resolved(_run(config), ranks)
    recipe = replace(config, **{name: getattr(run.config, name) for name in ("plan", "numerics")})

    def tokens(run: Resolved, folder: RunFolder, checkpoint: Path | None) -> Path:
        return _tokens(Conversations(run.config, config.sft, vocab_of(run), kind), folder, checkpoint, verb)

    return prepared_job(
        run, tokens, verb=verb, files={RECIPE: write(recipe)}, lesson=lesson, length=length_of(config.sft.epochs)
    )


def _run(config: TuneConfig) -> RunConfig:
    """What training is told. A run that goes on keeps the model that it began with."""
    folder = RunFolder(root=Path(config.state.dir))
    saved = folder.root / RECIPE
    if config.state.existing != "resume" or not folder.config.is_file():
        return started(config)
    if not saved.is_file():
        raise ConfigError(
            f"state.dir = '{folder.root}' holds a run that is no tuned one; go on with it by superstep train, or name "
            "another --state.dir."
        )
    before, run = read_recipe(saved), read_config(folder.config)
    before = replace(before, sft=replace(before.sft, epochs=config.sft.epochs))  # a run may be made longer
    for name in ("start", "sft", "dpo"):
        was, now = getattr(before, name), getattr(config, name)
        if was != now:
            raise ConfigError(
                f"{name} = {now!r}, and the run in state.dir = '{folder.root}' was started with {was!r}; it cannot "
                "change within a run. Set it back, or name another --state.dir."
            )
    data = replace(config.data, tokenizer=config.data.tokenizer or run.data.tokenizer)
    return replace(config.run, model=run.model, data=data)


def _tokens(wanted: Conversations, folder: RunFolder, checkpoint: Path | None, verb: str) -> Path:
    """The folder of tokens, made where need be. A run goes on with those that it was started with."""
    cache = wanted.run.data.cache
    kept = Path(cache) if cache else folder.root / "data"
    if checkpoint is None or not is_whole(kept):
        try:
            _prepare(wanted, kept, is_shared=bool(cache))
        except (KeyboardInterrupt, SystemExit) as error:
            if (status := ended(error, folder, verb)) is not None:
                raise SystemExit(status) from None
            raise
    if checkpoint is not None:
        rundir.check_tokens(checkpoint, kept)
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
