"""Memory check of a run, before anything is written or launched."""

from __future__ import annotations

import math
from collections.abc import Sequence

from superstep.comm.device import Device, choose
from superstep.cost.program.memory.memory import RankBytes
from superstep.cost.program.memory.memory_fit import MemoryOverflow, memory_of, overflow, with_communicators
from superstep.cost.program.memory.snapshot_memory import snapshot_bytes
from superstep.cost.program.time.operation import UnitOperations
from superstep.cost.program.time.predict import memory_of_phases
from superstep.errors import ConfigError
from superstep.observe.number_format import bytes_text
from superstep.plan.config import RunConfig
from superstep.plan.resolution.fill_plan import host_error
from superstep.plan.resolution.resolve import Resolved
from superstep.run.launch_rules import Launcher
from superstep.train.weights.model import operations, resolve_config


def require_fit(
    run: Resolved,
    device: Device,
    traced: Sequence[UnitOperations] | None,
    *,
    ranks: int = 1,
    limit_bytes: int | None = None,
) -> None:
    """Check that the fullest rank of a run fits.

    Args:
        run: the resolved run.
        device: of its ranks.
        traced: operations of its units; None if unknown, and then nothing is checked.
        ranks: that share this host.
        limit_bytes: of one rank; None means the device's free memory, or its share of the host's.

    Raises:
        ConfigError: it does not fit; the line says what overflows, and what would fit.
    """
    if traced is None:
        return
    limit = device.free_bytes(ranks) if limit_bytes is None else limit_bytes
    if device.kind == "cpu":
        limit = _beside_snapshots(run, limit)
    excess = _find_overflow(run, traced, limit, has_communicators=device.kind != "cpu")
    if excess is not None:
        raise ConfigError(_refusal(excess))


def require_fit_here(run: Resolved, traced: Sequence[UnitOperations] | None, launcher: Launcher, ranks: int) -> None:
    """Check that the ranks of this host fit its memory; raises as ``require_fit``.

    Args:
        run: the resolved run.
        traced: operations of its units; None if unknown.
        launcher: of the ranks.
        ranks: on this host, if the launcher does not say.
    """
    # torchrun gives the number of its ranks on this host, srun does not.
    if choose(run.config.plan.device, launcher.ranks_here(ranks)) == "cpu":
        if "host" in run.plan.activations:
            raise ConfigError(host_error())
        # Only a GPU's own rank knows its free memory: reading it uses a part of it.
        require_fit(run, Device("cpu"), traced, ranks=launcher.local_ranks or ranks)


def require_fit_on_emulated_gpus(run: Resolved, traced: Sequence[UnitOperations] | None, gpu_bytes: int) -> None:
    """Check that the fullest rank of a run fits on an emulated GPU, which counts no memory of communicators.

    Args:
        run: the resolved run.
        traced: as for ``require_fit``.
        gpu_bytes: memory of each GPU.

    Raises:
        ConfigError: it does not fit; the line says what overflows, and what would fit.
    """
    if traced is None:
        return
    excess = _find_overflow(run, traced, gpu_bytes, has_communicators=False)
    if excess is not None:
        larger = f"emulate GPUs of at least {math.ceil(excess.needed_bytes / 2**20)}MiB"
        raise ConfigError(_refusal(excess, larger))


def _beside_snapshots(run: Resolved, limit_bytes: int) -> int:
    """A host rank's memory without its snapshots.

    Raises:
        ConfigError: the snapshots alone do not fit.
    """
    taken = snapshot_bytes(run)
    if taken and taken >= limit_bytes:
        raise ConfigError(
            f"state.snapshot_every = {run.config.state.snapshot_every}: snapshots need {bytes_text(taken)} of a rank's "
            f"host, and a rank has {bytes_text(limit_bytes)}; leave it out, or use more ranks or plan.zero above 0."
        )
    return limit_bytes - taken


def _find_overflow(
    run: Resolved, traced: Sequence[UnitOperations], limit_bytes: int, *, has_communicators: bool
) -> MemoryOverflow | None:
    """Why the fullest rank does not fit; ``has_communicators``: whether their memory counts."""

    def memory(config: RunConfig) -> tuple[RankBytes, ...]:
        other = run if config is run.config else resolve_config(config)
        ranks = _memory(other, run, traced)
        return with_communicators(ranks, other.plan) if has_communicators else ranks

    return overflow(run.config, memory, limit_bytes)


def _memory(other: Resolved, run: Resolved, traced: Sequence[UnitOperations]) -> tuple[RankBytes, ...]:
    """Memory of a run under another plan."""
    if run.decoder is not None:
        return memory_of(other)
    # Activations of a user's own units are traced again for another plan.
    return memory_of_phases(other, traced if other is run else operations(other))


def _refusal(excess: MemoryOverflow, *others: str) -> str:
    """The error.

    Args:
        excess: why the run does not fit.
        others: what would work besides changes of the plan.
    """
    parts = ", ".join(f"{name} {bytes_text(size)}" for name, size in excess.parts.items())
    mends = [f"{mend.field} to {_literal(mend.value)} ({bytes_text(mend.bytes)})" for mend in excess.mends]
    advice = f"set {' or '.join(mends)}" if mends else "no change of one field fits; use more ranks or a smaller model"
    advice = ", or ".join([advice, *others])
    return (
        f"plan: pipeline rank {excess.rank} needs {bytes_text(excess.needed_bytes)} ({parts}), a rank has "
        f"{bytes_text(excess.limit_bytes)}, and its {excess.category} do not fit; {advice}."
    )


def _literal(value: int | str) -> str:
    return f"'{value}'" if isinstance(value, str) else str(value)
