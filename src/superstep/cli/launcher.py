"""Who has started this process: superstep itself, torchrun or srun, by the environment that they leave."""

from __future__ import annotations

import os
from collections.abc import Mapping

from superstep.run.launch_rules import Launcher


def is_of_torchrun(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is one of the ranks that torchrun or srun has started."""
    return "RANK" in environment and "WORLD_SIZE" in environment


def launcher(environment: Mapping[str, str] = os.environ) -> Launcher:
    """What the environment says of who launches the ranks."""
    local = environment.get("LOCAL_WORLD_SIZE")
    return Launcher(is_own="RANK" not in environment, local_ranks=None if local is None else int(local))
