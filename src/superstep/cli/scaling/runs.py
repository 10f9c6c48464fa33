"""The runs of superstep scaling: CSV files, and run directories of superstep train."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from superstep.cli.damage import say_damage
from superstep.errors import ConfigError, StateError
from superstep.observe.jsonl import read
from superstep.plan.config_io import read_config
from superstep.plan.resolution.resolve import resolve
from superstep.scaling.model_sizes import non_embedding_parameters
from superstep.scaling.runs import TrainingRun, point_of, read_csv, run_of
from superstep.train.run_folder.run_paths import RunFolder


def read_runs(paths: Sequence[Path]) -> list[TrainingRun]:
    """All runs of some files and directories.

    Raises:
        StateError: a path does not exist, or a directory holds no run, or an unfinished one.
        ConfigError: a file is no table of runs, or the model of a directory has no single size.
    """
    by_path: dict[Path, list[TrainingRun]] = {}
    for path in paths:
        if not path.exists():
            raise StateError(f"'{path}' is not there; name a CSV file of runs, or run directories.")
        if path in by_path:
            raise ConfigError(f"'{path}' is named twice; name each run once.")
        by_path[path] = [_of_directory(path)] if path.is_dir() else read_csv(path)
    if len(by_path) == 1:
        return next(iter(by_path.values()))
    return [replace(run, name=f"{path}: {run.name}") for path, runs in by_path.items() for run in runs]


def _of_directory(path: Path) -> TrainingRun:
    """A run directory as a run: its validation losses, with the tokens so far."""
    folder = RunFolder(root=path)
    if not folder.config.is_file() or not folder.metrics.is_file():
        raise StateError(f"'{path}' is not a run directory: it lacks run.toml or metrics.jsonl. Name run directories.")
    say_damage(folder.metrics)
    params = _size(folder)
    tokens: dict[int, int] = {}
    losses: dict[int, float | None] = {}
    has_finished = False
    for event in read(folder.metrics):
        match event:
            case {"event": "step", "step": int(step), "tokens_seen": int(tokens_so_far)}:
                tokens[step] = tokens_so_far
            case {"event": "evaluated", "step": int(step), "loss": loss}:
                losses[step] = loss
            case {"event": "finished"}:
                has_finished = True
    if not has_finished:
        raise StateError(
            f"'{path}' has not finished, so its last loss is not its final one; resume it or leave it out."
        )
    points = []
    for step, loss in losses.items():
        if step not in tokens:  # before the first step: the loss without training
            continue
        if loss is None:
            raise ConfigError(
                f"'{path}' diverged: its loss after {tokens[step]:g} tokens is not a number; leave it out."
            )
        points.append(point_of(str(path), params, {"tokens": tokens[step], "loss": loss}))
    if not points:
        raise StateError(f"'{path}' has no validation loss; leave it out.")
    return run_of(str(path), str(path), params, points)


def _size(folder: RunFolder) -> float:
    config = read_config(folder.config)
    mend = "write its runs as a CSV file with the size that you choose"
    if config.model.source is not None:
        raise ConfigError(
            f"'{folder.root}' trains the model of {config.model.source}, whose embeddings are not known; {mend}."
        )
    shape = resolve(config).shape
    if shape.moe is not None:
        raise ConfigError(
            f"'{folder.root}' is a mixture of experts, which has a total size and a size for each token; {mend}."
        )
    return float(non_embedding_parameters(shape))
