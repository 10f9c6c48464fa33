"""Superstep from Python: its commands as functions that return values. None of them prints or exits.

All of them raise ``UserError`` (``ConfigError``, ``StateError``, ...) for a user's mistake, with the line that the
command prints; ``Fault`` for a failed run; ``KeyboardInterrupt`` for Ctrl-C.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from superstep.data.preparation.prepare import prepare
from superstep.observe.jsonl import read
from superstep.plan.config import RunConfig, StateConfig
from superstep.plan.resolution.resolve import Resolved
from superstep.run.console import SILENT, Console
from superstep.run.exit_messages import INTERRUPTED
from superstep.run.job import TrainJob
from superstep.run.launch_ranks import launch
from superstep.run.prepare_job import prepare_job
from superstep.run.rl.launch_rl import launch_rl
from superstep.run.rl.prepare_rl import prepare_rl_job
from superstep.run.tokens import tokens_in
from superstep.run.tune_job import prepare_tune_job, resolve_recipe
from superstep.state.checkpoint_dirs import checkpoints
from superstep.train.run_folder.run_paths import RunFolder
from superstep.train.weights.model import resolve_config, vocab_of
from superstep.tune.config import TuneConfig
from superstep.tune.prepare_conversations import Conversations, Kind
from superstep.tune.rl.config import RlRecipe
from superstep.tune.rl.job import RlJob


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """The result of training.

    Attributes:
        run_dir: its directory.
        steps: finished, over all launches of the run.
        last_loss: of the last of them, in nats a token; None without a finished step.
        checkpoint: the newest one; None without one.
        is_complete: whether the last step is done; False after a stop by SIGTERM.
    """

    run_dir: Path
    steps: int
    last_loss: float | None
    checkpoint: Path | None
    is_complete: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RlResult(TrainResult):
    """The result of reinforcement learning.

    Attributes:
        last_reward: of the last step, the mean of all graded answers; None without one.
    """

    last_reward: float | None


def train(config: RunConfig, *, console: Console = SILENT) -> TrainResult:
    """Train, as ``superstep train`` does.

    Args:
        config: the run, in the form of ``run.toml``.
        console: shows the run; silent by default.
    """
    run = resolve_config(config)
    with prepare_job(run, _tokens, console) as job:
        return _finish(run.config.state, job, lambda job: launch(job, console))


def tune_sft(config: TuneConfig, *, console: Console = SILENT) -> TrainResult:
    """Train on the answers of conversations, as ``superstep tune sft`` does.

    Args:
        config: the recipe.
        console: shows the run; silent by default.
    """
    return _tune("sft", config, console)


def tune_dpo(config: TuneConfig, *, console: Console = SILENT) -> TrainResult:
    """Train on preferences, as ``superstep tune dpo`` does.

    Args:
        config: the recipe.
        console: shows the run; silent by default.
    """
    return _tune("dpo", config, console)


def tune_rl(recipe: RlRecipe, *, kernels: Path | None = None, console: Console = SILENT) -> RlResult:
    """Train on rewards, as ``superstep tune rl`` does.

    Args:
        recipe: the recipe.
        kernels: the folder of compiled decoders; None uses torch.
        console: shows the run; silent by default.
    """
    with prepare_rl_job(recipe, kernels, console) as job:
        result = _finish(recipe.state, job, lambda job: launch_rl(job, console))
    reward = _last_event(RunFolder(root=result.run_dir), "rolled").get("reward")
    return RlResult(**asdict(result), last_reward=reward)


def _tune(kind: Kind, config: TuneConfig, console: Console) -> TrainResult:
    run = resolve_recipe(kind, config)
    with prepare_tune_job(run, kind, config, _make_conversations, console) as job:
        return _finish(run.config.state, job, lambda job: launch(job, console))


J = TypeVar("J", TrainJob, RlJob)


def _finish(state: StateConfig, job: J | None, launch: Callable[[J], int | None]) -> TrainResult:
    """The result of a run, after ``launch`` returns its ranks' exit status; without a job it is complete already."""
    status = None if job is None else launch(job)
    if status == INTERRUPTED:
        raise KeyboardInterrupt
    folder = RunFolder(root=Path(state.dir)) if job is None else job.folder
    steps, saved = _last_event(folder, "step"), checkpoints(folder.checkpoints)
    return TrainResult(
        run_dir=folder.root,
        steps=steps.get("step", 0),
        last_loss=steps.get("loss"),
        checkpoint=saved[-1] if saved else None,
        is_complete=status is None,
    )


def _last_event(folder: RunFolder, kind: str) -> Mapping[str, Any]:
    """The last line of a kind in a run's metrics; empty without one."""
    lines = read(folder.metrics) if folder.metrics.is_file() else ()
    return next((line for line in reversed(list(lines)) if line["event"] == kind), {})


def _tokens(run: Resolved, folder: RunFolder, checkpoint: Path | None) -> Path:
    data = run.config.data
    make = partial(prepare, data, vocab_of(run), is_shared=bool(data.cache))
    return tokens_in(run, folder, checkpoint, make)


def _make_conversations(wanted: Conversations, kept: Path, folder: RunFolder) -> None:
    del folder
    wanted.prepare(kept, is_shared=bool(wanted.run.data.cache))
