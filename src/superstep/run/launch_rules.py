"""What a run may ask of its launcher, and what only some launchers do. Without torch."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from superstep.errors import ConfigError
from superstep.plan.config import RunConfig
from superstep.run.reports.sinks import require_trackers

SEVERAL_HOSTS = "a launcher on each of several hosts"


@dataclass(frozen=True, slots=True)
class Launcher:
    """Who launches the ranks of a run.

    Attributes:
        is_own: superstep does, and not torchrun or srun.
        local_ranks: the ranks on this host, as another launcher says; None where it does not.
    """

    is_own: bool = True
    local_ranks: int | None = None

    def ranks_here(self, ranks: int) -> int:
        """The ranks on this host.

        Args:
            ranks: how many it has where superstep launches them.
        """
        return self.local_ranks or (ranks if self.is_own else 1)


OWN = Launcher()
"""Superstep's own launcher."""


def check_launch(config: RunConfig, hosts: int, launcher: Launcher) -> None:
    """See that the launcher of a run can do what is asked of it.

    Args:
        config: of the run.
        hosts: that share its ranks, each with a launcher.
        launcher: of its ranks.

    Raises:
        ConfigError: it cannot.
    """
    state = config.state
    if state.snapshot_every is not None and (not launcher.is_own or sys.platform != "linux"):
        raise ConfigError(
            f"state.snapshot_every = {state.snapshot_every} needs ranks that superstep launches itself, on Linux; "
            "leave it out, or start the run without torchrun and srun."
        )
    if config.train.elastic and hosts == 1:
        raise ConfigError("train.elastic = true needs several hosts; start it by --hosts, or set false.")
    if state.peers and hosts == 1:
        raise ConfigError(f"state.peers = {state.peers} needs several hosts; start it by --hosts, or set 0.")
    require_trackers(config.observe)


def require_alone(config: RunConfig, web_port: int | None, launcher: str) -> None:
    """See that nothing is asked for that needs one launcher of all ranks, where another launcher has them.

    Args:
        config: of the run.
        web_port: where its report is to be served.
        launcher: what has the ranks.

    Raises:
        ConfigError: it is asked for.
    """
    if config.observe.sample is not None:
        raise ConfigError(
            f"observe.sample = '{config.observe.sample}' needs ranks that one launcher of superstep has, not "
            f"those of {launcher}; leave it out, and run superstep sample RUN PROMPT."
        )
    if web_port is not None:
        raise ConfigError(
            f"--web needs ranks that one launcher of superstep train has, not those of {launcher}; leave it out, and "
            "run superstep view RUN."
        )
