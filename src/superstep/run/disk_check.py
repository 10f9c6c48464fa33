"""Disk space of a run's checkpoints, checked before the launch."""

from __future__ import annotations

from superstep.cost.program.buffers import FP32
from superstep.errors import ConfigError
from superstep.observe.number_format import bytes_text
from superstep.plan.optimizers import state_bytes
from superstep.plan.resolution.resolve import Resolved
from superstep.state.checkpoint_dirs import checkpoints
from superstep.state.fsync import free_bytes
from superstep.train.run_folder.run_paths import RunFolder


def require_disk(run: Resolved, folder: RunFolder, step: int) -> None:
    """Check that the run's future checkpoints fit beside the existing ones.

    A new one is complete before the oldest is deleted: so one more than ``state.keep``, if so many are still to come.

    Args:
        run: the resolved run.
        folder: of it.
        step: after which it continues.

    Raises:
        ConfigError: they do not fit.
    """
    # Weights beside adapters are not saved.
    frozen = run.outline.numel - run.trained_numel if run.config.lora is None else 0
    state, one = run.config.state, state_bytes(run.config.train.optimizer) * run.trained_numel + FP32 * frozen
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
