"""The launcher of this process: superstep itself, torchrun or srun, by their environment."""

from __future__ import annotations

import os
from collections.abc import Mapping

from superstep.run.launch_rules import Launcher


def is_of_torchrun(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is a rank under torchrun or srun."""
    return "RANK" in environment and "WORLD_SIZE" in environment


def launcher(environment: Mapping[str, str] = os.environ) -> Launcher:
    """The launcher of the ranks, by the environment."""
    local = environment.get("LOCAL_WORLD_SIZE")
    return Launcher(is_own="RANK" not in environment, local_ranks=None if local is None else int(local))
