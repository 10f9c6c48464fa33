"""superstep tune rl: learns from rewards, on ranks that sample and train."""

from __future__ import annotations

import os

from superstep.cli.launcher import is_of_torchrun
from superstep.cli.serve.serve_settings import kernels_folder
from superstep.cli.train.terminal import Terminal
from superstep.errors import ConfigError
from superstep.run.rl.launch_rl import launch_rl
from superstep.run.rl.prepare_rl import prepared_rl_job
from superstep.tune.rl.config import RlRecipe


def run(recipe: RlRecipe) -> int:
    """Learn from rewards as a recipe says; the exit status."""
    if is_of_torchrun():
        raise ConfigError(
            "superstep tune rl launches its ranks itself, on one host: start it once, without torchrun (or srun), and "
            f"ask for {os.environ['WORLD_SIZE']} ranks with --plan.dp or --plan.tp."
        )
    with prepared_rl_job(recipe, kernels_folder(None), Terminal()) as job:
        if job is None:
            return 0
        if (status := launch_rl(job, Terminal())) is not None:
            return status
    print(f"\nResults: {job.folder.root}", flush=True)
    return 0
