"""What a run may ask of its launcher, and what only some launchers do. Without torch."""

from __future__ import annotations

import os
import sys

from superstep.cli.train.sinks import require_trackers
from superstep.errors import ConfigError
from superstep.plan.config import RunConfig

SEVERAL_HOSTS = "a launcher on each of several hosts"


def check_launch(config: RunConfig, hosts: int) -> None:
    """See that the launcher of a run can do what is asked of it.

    Args:
        config: of the run.
        hosts: that share its ranks, each with a launcher.

    Raises:
        ConfigError: it cannot.
    """
    state = config.state
    if state.snapshot_every is not None and ("RANK" in os.environ or sys.platform != "linux"):
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
            f"observe.sample = '{config.observe.sample}' needs ranks that one launcher of superstep train has, not "
            f"those of {launcher}; leave it out, and run superstep sample RUN PROMPT."
        )
    if web_port is not None:
        raise ConfigError(
            f"--web needs ranks that one launcher of superstep train has, not those of {launcher}; leave it out, and "
            "run superstep view RUN."
        )
