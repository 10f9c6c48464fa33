"""A run's checkpoints, copied to a store during the run, and fetched from there if the disk has none.

    with mirrored(folder.checkpoints, store, keep=2):
        ...                 ranks save to the disk; complete checkpoints are copied, and training does not wait

The process that launched the ranks copies, so that a killed rank's checkpoints are copied as well.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from superstep.errors import DamagedCheckpoint, SuperstepError
from superstep.state.checkpoint_dirs import checkpoints, set_aside, step_named, step_of
from superstep.state.object_store.store import CheckpointStore
from superstep.state.verify import verify

POLL_S = 0.5

RETRY_S = 10.0
"""Pause after a store has failed."""


class Mirror:
    """Copies new checkpoints.

    Args:
        root: the local folder of checkpoints.
        store: their destination.
        keep: number of checkpoints that stay there.
    """

    def __init__(self, root: Path, store: CheckpointStore, keep: int) -> None:
        self._root = root
        self._store = store
        self._keep = keep
        self._there: set[tuple[int, bytes]] = set()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="superstep-mirror", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Copy the remaining ones; the thread ends.

        Raises:
            Fault: they cannot be copied.
        """
        self._is_over.set()
        self._thread.join()
        self.catch_up()

    def _run(self) -> None:
        wait_s = POLL_S
        while not self._is_over.wait(wait_s):
            try:
                self.catch_up()
                wait_s = POLL_S
            except (SuperstepError, OSError):  # it may be temporary; at the end it is raised
                wait_s = RETRY_S

    def catch_up(self) -> None:
        """Copy the disk's checkpoints to the store, and remove those of rolled-back steps."""
        whole = checkpoints(self._root)
        for left in sorted(self._root.glob("step-*.rolled-back*")):
            step = step_named(left.name.partition(".")[0])
            if step is not None and step not in map(step_of, whole) and step in self._store.steps():
                self._store.remove(step)
        new = [path for path in whole if self._label(path) not in self._there]
        for path in new:
            try:
                label = self._label(path)
                if not self._store.has(path):
                    self._store.push(path)
            except (DamagedCheckpoint, FileNotFoundError):
                if path.exists():
                    raise
                continue  # deleted meanwhile, as newer ones have come
            self._there.add(label)
        if new:
            self._store.prune(self._keep)

    @staticmethod
    def _label(path: Path) -> tuple[int, bytes]:
        """The identity of a checkpoint: after a rollback another one has its name."""
        try:
            return step_of(path), (path / "manifest.json").read_bytes()[-64:]
        except FileNotFoundError:
            return step_of(path), b""


@contextmanager
def mirror_checkpoints(root: Path, store: CheckpointStore | None, keep: int) -> Iterator[None]:
    """Within the block, checkpoints are copied, if there is a store.

    Raises:
        Fault: the last one cannot be copied, and there is no other error.
    """
    if store is None:
        yield
        return
    mirror = Mirror(root, store, keep)
    try:
        yield
    except BaseException:
        with suppress(SuperstepError, OSError):  # the first error is raised
            mirror.end()
        raise
    mirror.end()


def fetch_newest(store: CheckpointStore, root: Path) -> tuple[str, ...]:
    """Copy the newest complete checkpoint of a store to the disk, unless that has one as new; one line for each damaged
    one that is skipped.
    """
    here = max(map(step_of, checkpoints(root)), default=-1)
    warnings = []
    for step in reversed(store.steps()):
        if step <= here:
            break
        place = None
        try:
            place = store.fetch(step, root)
            verify(place)
        except DamagedCheckpoint as error:
            warnings.append(f"{store.url_of(step)} is passed over: {error.why}")
            if place is not None:
                set_aside(place)
        else:
            break
    return tuple(warnings)
