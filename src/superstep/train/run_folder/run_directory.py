"""The run directory: created, resumed, or refused; never overwritten."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

from superstep.errors import ConfigError, StateError
from superstep.plan.config import RunConfig
from superstep.plan.config_io import read_config, write_config
from superstep.plan.resolution.resolve import Resolved
from superstep.state.verify import glance, newest
from superstep.train.run_folder.run_paths import RunFolder, tokens_folder, write_whole

# Fields that may not change within a run: weights or cursor would be invalid.
_FIXED = ("model", "data.source", "data.corpus", "data.tokenizer", "data.text_field", "data.sequence_tokens",
          "data.packed", "data.validation_fraction", "train.seed", "lora", "freeze")  # fmt: skip


def choose(run: Resolved, look: Callable[[Path], object] = glance) -> tuple[Resolved, RunFolder, Path | None]:
    """Choose the run directory, as ``state.existing`` says. Read-only.

    Args:
        run: the requested run.
        look: raises Damaged for a checkpoint that cannot be resumed.

    Returns:
        The run, with its directory; the directory; and the checkpoint to resume from, if any: the newest one for which
        ``look`` raises nothing.

    Raises:
        StateError: the directory holds a run and ``state.existing`` is not set, or holds something else, or none of its
            checkpoints is complete.
        ConfigError: the run to resume has another model or other data.
    """
    state = run.config.state
    folder = RunFolder(root=Path(state.dir))
    if not state.dir.strip():
        raise StateError(f"state.dir = '{state.dir}' is not a path; name a folder.")
    if folder.root.exists() and not folder.root.is_dir():
        raise StateError(f"state.dir = '{state.dir}' is a file; name a folder.")
    try:
        is_free = not folder.root.exists() or not any(
            p.name not in ("data", folder.lock.name) for p in folder.root.iterdir()
        )
    except OSError as error:
        raise StateError(f"state.dir = '{state.dir}' cannot be read: {error.strerror}; name another folder.") from error
    if is_free:
        return run, folder, None
    if not folder.config.is_file():
        raise StateError(f"state.dir = '{state.dir}' holds files but no run; name another folder.")
    match state.existing:
        case "refuse":
            raise StateError(
                f"state.dir = '{state.dir}' already holds a run. Resume it with --state.existing resume, start one "
                "beside it by --state.existing new, or name another --state.dir."
            )
        case "new":
            return _beside(run)
        case "resume":
            _check_same(read_config(folder.config), run.config)
            return run, folder, newest(folder.checkpoints, look)


def _beside(run: Resolved) -> tuple[Resolved, RunFolder, None]:
    number = 2
    while Path(f"{run.config.state.dir}-{number}").exists():
        number += 1
    before, data = Path(run.config.state.dir), run.config.data
    state = replace(run.config.state, dir=f"{run.config.state.dir}-{number}")
    root = Path(state.dir)
    if data.source == str(tokens_folder(run.config, before)):  # conversations are prepared in the run's own folder
        data = replace(data, source=str(tokens_folder(run.config, root)))
    return replace(run, config=replace(run.config, state=state, data=data)), RunFolder(root=root), None


def _check_same(before: RunConfig, now: RunConfig) -> None:
    for name in _FIXED:
        section, _, key = name.partition(".")
        old, new = getattr(before, section), getattr(now, section)
        if old is None or new is None:
            if old != new:
                raise ConfigError(
                    f"[{section}] is {'left out' if new is None else 'given'}, and the run in state.dir = "
                    f"'{now.state.dir}' was started {'without' if old is None else 'with'} it; it cannot change "
                    "within a run. Set it back, or name another --state.dir."
                )
            continue
        for field in [key] if key else [f.name for f in fields(old)]:
            was, will = getattr(old, field), getattr(new, field)
            if was != will:
                raise ConfigError(
                    f"{section}.{field} = {will!r}, and the run in state.dir = '{now.state.dir}' was started with "
                    f"{was!r}; it cannot change within a run. Set it back, or name another --state.dir."
                )


def check_tokens(checkpoint: Path, corpus: Path) -> None:
    """Check that the prepared corpus is the one of a checkpoint.

    Raises:
        StateError: it is another, for which the run's weights and cursor would be invalid.
    """
    for name in ("tokenizer.json", "corpus.json"):
        if _stable(checkpoint / name) != _stable(corpus / name):
            raise StateError(
                f"the tokens in {corpus} are not those that {checkpoint} was trained on ({name} differs). Set "
                "data.cache to the folder that holds those, or start a new run with --state.existing new."
            )


def _stable(path: Path) -> object:
    """A JSON file without the fields that change when the same text is prepared elsewhere."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StateError(f"{path} cannot be read ({error}); resume from an older checkpoint.") from error
    return {key: value for key, value in fields.items() if key != "fingerprint"}


def write(run: Resolved, folder: RunFolder) -> None:
    """Save the resolved configuration: from then on the directory holds a run.

    Raises:
        Fault: it cannot be written.
    """
    write_whole(folder.config, write_config(run.config))
