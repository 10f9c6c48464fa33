"""The run directory: made new, gone on with, or left alone; never overwritten."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

from superstep.errors import ConfigError, Fault, StateError
from superstep.plan.config import RunConfig
from superstep.plan.resolve import Resolved
from superstep.plan.toml import read_config, write_config
from superstep.state.checkpoint import checkpoints
from superstep.train.session import RunFolder

# What may not change within one run: the weights or the cursor would mean something else.
_FIXED = ("model", "data.corpus", "data.tokenizer", "data.text_field", "data.sequence_tokens", "data.packed",
          "data.validation_fraction", "train.seed")  # fmt: skip


def choose(run: Resolved) -> tuple[Resolved, RunFolder, Path | None]:
    """Where the run will live, as ``state.existing`` says.

    Returns:
        The run, with the directory it was given; the directory; and the checkpoint to go on from, if any.

    Raises:
        StateError: the directory holds a run and was not told what to do, or holds something else.
        ConfigError: the run to go on with is of another model or of other data.
    """
    state = run.config.state
    folder = RunFolder(root=Path(state.dir))
    if folder.root.exists() and not folder.root.is_dir():
        raise StateError(f"state.dir = '{state.dir}' is a file; name a folder.")
    is_free = not folder.root.exists() or not any(p.name != "data" for p in folder.root.iterdir())
    if is_free:
        return run, folder, None
    if not folder.config.is_file():
        raise StateError(f"state.dir = '{state.dir}' holds files that are no run; name another folder.")
    match state.existing:
        case "refuse":
            raise StateError(
                f"state.dir = '{state.dir}' already holds a run. Go on with it by --state.existing resume, start one "
                "beside it by --state.existing new, or name another --state.dir."
            )
        case "new":
            return _beside(run)
        case "resume":
            _check_same(read_config(folder.config), run.config)
            found = checkpoints(folder.checkpoints)
            return run, folder, found[-1] if found else None


def _beside(run: Resolved) -> tuple[Resolved, RunFolder, None]:
    number = 2
    while Path(f"{run.config.state.dir}-{number}").exists():
        number += 1
    state = replace(run.config.state, dir=f"{run.config.state.dir}-{number}")
    return replace(run, config=replace(run.config, state=state)), RunFolder(root=Path(state.dir)), None


def _check_same(before: RunConfig, now: RunConfig) -> None:
    for name in _FIXED:
        section, _, key = name.partition(".")
        old, new = getattr(before, section), getattr(now, section)
        for field in [key] if key else [f.name for f in fields(old)]:
            was, will = getattr(old, field), getattr(new, field)
            if was != will:
                raise ConfigError(
                    f"{section}.{field} = {will!r}, and the run in state.dir = '{now.state.dir}' was started with "
                    f"{was!r}; it cannot change within a run. Set it back, or name another --state.dir."
                )


def write(run: Resolved, folder: RunFolder) -> None:
    """Make the directory and save the resolved configuration in it.

    Raises:
        Fault: it cannot be written.
    """
    try:
        folder.checkpoints.mkdir(parents=True, exist_ok=True)
        partial = folder.config.with_suffix(".partial")
        partial.write_text(write_config(run.config), encoding="utf-8")
        partial.rename(folder.config)
    except OSError as error:
        raise Fault(f"state.dir = '{folder.root}' cannot be written: {error.strerror}.") from error
