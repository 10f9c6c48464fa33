"""The object store that a run's checkpoints are copied to while its launcher works in the run's directory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from superstep.errors import StateError
from superstep.plan.resolution.resolve import Resolved
from superstep.state.object_store.store import CheckpointStore
from superstep.state.object_store.store_sync import fetch_newest, mirror_checkpoints
from superstep.train.run_folder.run_lock import hold
from superstep.train.run_folder.run_paths import RunFolder


def store_of(run: Resolved, checkpoint: Path | None) -> CheckpointStore | None:
    """The run's object store, if configured.

    Args:
        run: the resolved run.
        checkpoint: the local one that the run resumes from, if any.

    Raises:
        StateError: it cannot be used, or holds another run.
    """
    state = run.config.state
    if state.store is None:
        return None
    store = CheckpointStore(state.store)
    if checkpoint is None and state.existing != "resume" and (steps := store.steps()):
        raise StateError(
            f"state.store = '{state.store}' already holds a run, up to step {steps[-1]}. Go on with it by "
            "--state.existing resume, or name another --state.store."
        )
    return store


@contextmanager
def locked_folder(
    run: Resolved, folder: RunFolder, store: CheckpointStore | None, say: Callable[[str], None]
) -> Iterator[bool]:
    """Lock the directory for the block, and copy its checkpoints to the store. If the run resumes, the store's newest
    checkpoint is fetched first; yields whether the store was looked at.

    Args:
        run: the resolved run.
        folder: of the run.
        store: of its checkpoints; None without one.
        say: shows what was fetched.
    """
    state = run.config.state
    with hold(folder), mirror_checkpoints(folder.checkpoints, store, state.keep):
        is_fetched = store is not None and state.existing == "resume"
        if store is not None and is_fetched:
            for line in fetch_newest(store, folder.checkpoints):
                say(line)
        yield is_fetched
