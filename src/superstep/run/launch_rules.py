"""Which launchers support which settings of a run. Without torch."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from superstep.errors import ConfigError
from superstep.plan.config import RunConfig
from superstep.run.reports.sinks import require_trackers

SEVERAL_HOSTS = "a launcher on each of several hosts"


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
    state = config.state
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


def require_alone(config: RunConfig, web_port: int | None, launcher: str) -> None:
    """Refuse settings that need one launcher of all ranks.

    Args:
        config: of the run.
        web_port: of the live report.
        launcher: its name.

    Raises:
        ConfigError: one is set.
    """
    if config.observe.sample is not None:
        raise ConfigError(
            f"observe.sample = '{config.observe.sample}' needs ranks that one launcher of superstep has, not "
            f"those of {launcher}; leave it out, and run superstep sample RUN PROMPT."
        )
    if web_port is not None:
        raise ConfigError(
            f"--web needs ranks that one launcher of superstep train starts, not those of {launcher}; leave it out, "
            "and run superstep view RUN."
        )
