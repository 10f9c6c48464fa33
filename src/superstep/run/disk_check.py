"""Whether the checkpoints of a run have room where they will lie: seen before anything is launched."""

from __future__ import annotations

from superstep.errors import ConfigError
from superstep.observe.number_format import bytes_text
from superstep.plan.resolution.resolve import Resolved
from superstep.planner.goodput import STATE_BYTES
from superstep.state.checkpoint_dirs import checkpoints
from superstep.state.fsync import free_bytes
from superstep.train.run_folder.run_paths import RunFolder


def require_disk(run: Resolved, folder: RunFolder, step: int) -> None:
    """See that the checkpoints that will lie there at once have room beside those that do already.

    A new one is whole before the oldest goes: so one more than ``state.keep``, where so many are still to be written.

    Args:
        run: that is trained.
        folder: of it.
        step: that it goes on after.

    Raises:
        ConfigError: they have not.
    """
    state, one = run.config.state, STATE_BYTES * run.trained_numel
    to_come = -(-(run.config.train.steps - step) // state.save_every)
    count = max(1, min(to_come, state.keep + 1 - len(checkpoints(folder.checkpoints))))
    free = free_bytes(folder.root)
    if count * one <= free:
        return
    fits = free // one - 1
    fewer = f"set state.keep to {fits}, or " if 1 <= fits < state.keep else ""
    raise ConfigError(
        f"state.keep = {state.keep}: {count} more checkpoint{'s' if count > 1 else ''} of {bytes_text(one)} will lie "
        f"at once in '{folder.root}', with the one that is being written, and its disk has {bytes_text(free)} left; "
        f"{fewer}name a state.dir with more room."
    )
