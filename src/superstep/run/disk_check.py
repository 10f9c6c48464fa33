"""The disk of a run's checkpoints and activations, checked before the launch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from superstep.cost.program.buffers import FP32
from superstep.cost.program.memory.activations import unit_bytes
from superstep.cost.program.time.instruction_seconds import count_moved
from superstep.cost.program.time.operation import UnitOperations
from superstep.cost.program.time.predict import pair_phases, sizes_of
from superstep.engine.measure.disk import direct_rates
from superstep.errors import ConfigError
from superstep.observe.number_format import bytes_text
from superstep.plan.narrow import count_saved_bytes
from superstep.plan.optimizers import state_bytes
from superstep.plan.resolution.resolve import Resolved
from superstep.program.compile import compile_step
from superstep.program.offload import find_most_away
from superstep.state.checkpoint_dirs import checkpoints
from superstep.state.fsync import file_system, free_bytes
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
    one -= count_saved_bytes(run.config, run.outline)
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


MOST_COPY_S = 30.0
"""The longest that one copy of a unit may take: ranks that wait for longer look as if they hang."""
IN_MEMORY = ("tmpfs", "ramfs")


def require_activation_disk(run: Resolved, traced: Sequence[UnitOperations] | None, folder: Path, ranks: int) -> None:
    """Check that a disk holds the activations that lie there within a step, and is fast enough.

    Args:
        run: the resolved run.
        traced: operations of its units; None if unknown.
        folder: of the files.
        ranks: that share this host.

    Raises:
        ConfigError: the folder lies in memory, or its disk is too small or too slow.
    """
    if "disk" not in run.plan.activations or (run.decoder is None and traced is None):
        return
    if (kind := file_system(folder)) in IN_MEMORY:
        raise ConfigError(
            f"plan.activations = 'disk', and state.dir = '{folder}' lies in memory ({kind}); set state.dir to a folder "
            "on a disk, or leave plan.activations out."
        )
    needed = largest = 0
    for phase, operations in pair_phases(run, traced):
        program = compile_step(phase.plan)
        moved = count_moved(program, sizes_of(phase, operations) or unit_bytes(phase))
        away = [find_most_away(program, rank, moved) for rank in range(program.pp)]
        needed = max(needed, sum(away) * ranks // program.pp)
        largest = max(largest, *moved.values(), 0)
    free = free_bytes(folder)
    if needed > free:
        raise ConfigError(
            f"plan.activations = 'disk': the ranks of this host keep {bytes_text(needed)} in '{folder}' at once, and "
            f"its disk has {bytes_text(free)} left; name a state.dir with more room, or set plan.microbatch lower."
        )
    slowest = min(direct_rates(folder))
    if largest * ranks > MOST_COPY_S * slowest:
        raise ConfigError(
            f"plan.activations = 'disk': a unit keeps {bytes_text(largest)}, which the disk of '{folder}' takes "
            f"{largest * ranks / slowest:.0f} s to copy for {ranks} ranks ({bytes_text(int(slowest))}/s); name a "
            "state.dir on a faster disk, or set plan.recompute to 'full'."
        )
