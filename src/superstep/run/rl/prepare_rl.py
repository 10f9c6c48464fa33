"""The job of a run of reinforcement learning: its locked directory, and its ranks' initial state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from superstep.comm.device import Device, choose
from superstep.errors import ConfigError
from superstep.plan.config_io import write_config
from superstep.plan.resolution.resolve import Resolved
from superstep.run.console import Console
from superstep.run.disk_check import require_disk
from superstep.run.hosts.hosts import share_out
from superstep.run.launch_rules import OTHER_LAUNCHERS, OWN, SEVERAL_HOSTS, Launcher, check_launch
from superstep.run.memory_check import require_fit
from superstep.run.reports.plan_line import plan_text
from superstep.state.checkpoint import read_position
from superstep.state.object_store.store_sync import fetch_newest, mirrored
from superstep.state.verify import newest, verify
from superstep.train.resume import pass_over
from superstep.train.run_folder import run_directory
from superstep.train.run_folder.checkpoint_store import store_of
from superstep.train.run_folder.run_lock import hold
from superstep.train.run_folder.run_paths import write_whole
from superstep.train.weights.model import operations, resolve_config
from superstep.tune.recipe import RECIPE, shorter_sequences, write
from superstep.tune.rl.config import USUAL_TOKENS, RlRecipe, RolloutConfig
from superstep.tune.rl.initial_policy import check_same, check_tokenizer, with_start
from superstep.tune.rl.job import RlJob, job_of


@contextmanager
def prepared_rl_job(
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
        recipe: of the run.
        kernels: the folder of compiled decoders; None uses torch.
        console: shows messages before the first step.
        launcher: of the ranks.
        ranks: of another launcher; None under superstep's own.
        hosts: that share the ranks; with several this is for the first one's launcher to do.
    """
    run, start = resolved_rl(recipe, ranks, hosts)
    config = run.config
    if (shorter := shorter_sequences(recipe, config, USUAL_TOKENS)) is not None:
        console.say(shorter)
    check_launch(config, hosts, launcher)
    if not launcher.is_own or hosts > 1:
        _require_shared(recipe.rollout, SEVERAL_HOSTS if hosts > 1 else OTHER_LAUNCHERS)
    check_tokenizer(recipe.start, config)
    choice, folder, checkpoint = run_directory.choose(run, verify)
    check_same(recipe, folder)
    store = store_of(choice, checkpoint)
    here = choice.plan.mesh.world // hosts
    if choose(choice.config.plan.device, launcher.ranks_here(here)) == "cpu":
        require_fit(choice, Device("cpu"), operations(choice), ranks=launcher.local_ranks or here)
    with hold(folder), mirrored(folder.checkpoints, store, choice.config.state.keep):
        if store is not None and choice.config.state.existing == "resume":
            for line in fetch_newest(store, folder.checkpoints):
                console.say(line)
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
            ranks_here=launcher.local_ranks or here,
        )
        has_begun = folder.config.is_file()
        for why in pass_over(checkpoint, verify) if checkpoint is not None else ():
            console.say(f"passed over: {why}")
        files = {
            folder.config.name: write_config(choice.config),
            RECIPE: write(replace(recipe, state=choice.config.state)),
        }
        for name, text in files.items():
            write_whole(folder.root / name, text)
        if not has_begun:
            console.say(f"{folder.root}: {plan_text(choice)}")
        yield replace(job, files=files)


def resolved_rl(recipe: RlRecipe, ranks: int | None = None, hosts: int = 1) -> tuple[Resolved, Path]:
    """The run of a recipe, and the folder of the model that it begins with.

    Args:
        recipe: of the run.
        ranks: of another launcher; None under superstep's own.
        hosts: that share the ranks.

    Raises:
        ConfigError: it cannot work.
        StateError: the model is missing or incomplete.
    """
    config, start = with_start(recipe, recipe.rl, recipe.start)
    run = resolve_config(config, ranks)
    return (run if hosts == 1 else share_out(run, hosts)), start


def _require_shared(rollout: RolloutConfig, launcher: str) -> None:
    """Refuse what needs one launcher of superstep's, where another launcher has the ranks.

    Raises:
        ConfigError: something does; names the field.
    """
    if rollout.placement == "apart":
        raise ConfigError(
            "rollout.placement = 'apart' needs ranks that superstep launches itself, on one host, not those of "
            f"{launcher}; set it to 'shared'."
        )
