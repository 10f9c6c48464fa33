"""Preparation of a run of reinforcement learning: it locks the run directory and makes the job of the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from superstep.comm.device import Device, choose
from superstep.plan.config_io import write_config
from superstep.plan.resolution.resolve import Resolved
from superstep.run.console import Console
from superstep.run.disk_check import require_activation_disk, require_disk
from superstep.run.launch_rules import OWN, Launcher, check_launch
from superstep.run.memory_check import require_fit
from superstep.run.reports.plan_line import plan_text
from superstep.run.rl.resolve_recipe import resolve_rl
from superstep.state.checkpoint import read_position
from superstep.state.verify import newest, verify
from superstep.train.resume import pass_over
from superstep.train.run_folder import run_directory
from superstep.train.run_folder.checkpoint_store import locked_folder, store_of
from superstep.train.run_folder.run_paths import RunFolder, write_whole
from superstep.train.weights.model import operations
from superstep.tune.recipe import RECIPE, shorter_sequences, write
from superstep.tune.rl.config import USUAL_TOKENS, RlRecipe
from superstep.tune.rl.initial_policy import check_same, check_tokenizer
from superstep.tune.rl.job import RlJob, job_of, own_ranks


@contextmanager
def prepare_rl_job(
    recipe: RlRecipe,
    kernels: Path | None,
    console: Console,
    *,
    launcher: Launcher = OWN,
    ranks: int | None = None,
    hosts: int = 1,
) -> Iterator[RlJob | None]:
    """The job of a recipe's ranks, with the run's directory locked for the block; None for a complete run.

    Args:
        recipe: the recipe of the run.
        kernels: the folder of compiled decoders; None uses torch.
        console: shows messages before the first step.
        launcher: starts the ranks.
        ranks: how many ranks another launcher has started; None if Superstep starts them.
        hosts: how many hosts share the ranks; with several, only the launcher of host 0 calls this.
    """
    run, start = resolve_rl(recipe, ranks, hosts)
    config = run.config
    if (shorter := shorter_sequences(recipe, config, USUAL_TOKENS)) is not None:
        console.say(shorter)
    check_launch(config, hosts, launcher)
    check_tokenizer(recipe.start, config)
    choice, folder, checkpoint = run_directory.choose(run, verify)
    check_same(recipe, folder)
    store = store_of(choice, checkpoint)
    trainers, samplers = choice.plan.mesh.world // hosts, own_ranks(recipe.rollout) // hosts
    here = launcher.local_ranks or trainers + samplers
    if choose(choice.config.plan.device, launcher.ranks_here(here)) == "cpu":
        require_fit(choice, Device("cpu"), operations(choice), ranks=min(here, trainers))
    require_activation_disk(choice, operations(choice), folder.root, trainers)
    with locked_folder(choice, folder, store, console.say) as is_fetched:
        if is_fetched:
            checkpoint = newest(folder.checkpoints, verify)
        step = 0 if checkpoint is None else read_position(checkpoint).step
        if step >= choice.config.train.steps:
            console.say(f"The run in {folder.root} is complete; raise --train.steps to continue it.")
            yield None
            return
        require_disk(choice, folder, step)
        job = job_of(
            choice,
            recipe.rl,
            recipe.rollout,
            recipe.grade,
            folder=folder,
            start=start,
            checkpoint=checkpoint,
            kernels=kernels,
            ranks_here=here,
        )
        for why in pass_over(checkpoint, verify) if checkpoint is not None else ():
            console.say(f"passed over: {why}")
        yield replace(job, files=_write_files(recipe, choice, folder, console))


def _write_files(recipe: RlRecipe, run: Resolved, folder: RunFolder, console: Console) -> dict[str, str]:
    """Write the texts that a resumed run needs into its directory; returns them by name."""
    has_begun = folder.config.is_file()
    files = {
        folder.config.name: write_config(run.config),
        RECIPE: write(replace(recipe, state=run.config.state)),
    }
    for name, text in files.items():
        write_whole(folder.root / name, text)
    if not has_begun:
        console.say(f"{folder.root}: {plan_text(run)}")
    return files
