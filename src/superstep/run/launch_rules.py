"""Which launchers support which settings of a run. Without torch."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from superstep.errors import ConfigError
from superstep.plan.config import RunConfig
from superstep.run.reports.sinks import require_trackers

SEVERAL_HOSTS = "a launcher on each of several hosts"
OTHER_LAUNCHERS = "torchrun and srun"


@dataclass(frozen=True, slots=True)
class Launcher:
    """The launcher of a run's ranks.

    Attributes:
        is_own: superstep's own, not torchrun or srun.
        local_ranks: number of ranks on this host, if another launcher gives it; else None.
    """

    is_own: bool = True
    local_ranks: int | None = None

    def ranks_here(self, ranks: int) -> int:
        """Number of ranks on this host.

        Args:
            ranks: its number of ranks under superstep's launcher.
        """
        return self.local_ranks or (ranks if self.is_own else 1)


OWN = Launcher()
"""Superstep's own launcher."""


def check_launch(config: RunConfig, hosts: int, launcher: Launcher) -> None:
    """Check that the launcher supports a run's settings.

    Args:
        config: of the run.
        hosts: that share its ranks, each with a launcher.
        launcher: of its ranks.

    Raises:
        ConfigError: it does not.
    """
    state, sample = config.state, config.observe.sample
    if sample is not None and (hosts > 1 or not launcher.is_own):
        raise ConfigError(
            f"observe.sample = '{sample}' needs ranks that one launcher of superstep has, not those of "
            f"{SEVERAL_HOSTS if hosts > 1 else OTHER_LAUNCHERS}; leave it out, and run superstep sample RUN PROMPT."
        )
    if state.snapshot_every is not None and (not launcher.is_own or sys.platform != "linux"):
        raise ConfigError(
            f"state.snapshot_every = {state.snapshot_every} needs ranks that superstep launches itself, on Linux; "
            "leave it out, or start the run without torchrun and srun."
        )
    if config.train.elastic and hosts == 1:
        raise ConfigError("train.elastic = true needs several hosts; start the run with --hosts, or set false.")
    if state.peers and hosts == 1:
        raise ConfigError(f"state.peers = {state.peers} needs several hosts; start the run with --hosts, or set 0.")
    require_trackers(config.observe)


def check_web(web_port: int | None, launcher: str) -> None:
    """Check that the launcher can serve the live report.

    Args:
        web_port: of the live report; None without one.
        launcher: its name.

    Raises:
        ConfigError: it cannot.
    """
    if web_port is not None:
        raise ConfigError(
            f"--web needs ranks that one launcher of superstep train starts, not those of {launcher}; leave it out, "
            "and run superstep view RUN."
        )
