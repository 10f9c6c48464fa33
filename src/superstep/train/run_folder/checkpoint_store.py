"""The object store that a run's checkpoints are copied to."""

from __future__ import annotations

from pathlib import Path

from superstep.errors import StateError
from superstep.plan.resolution.resolve import Resolved
from superstep.state.object_store.store import CheckpointStore


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
