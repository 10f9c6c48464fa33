"""``superstep tune rl`` on several hosts: its job on host 0 and on the others. Ranks share sampling and training."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import msgspec

from superstep.comm.codec import Codec
from superstep.launch.hosts.events import StartRanks
from superstep.launch.hosts.messages import Orders
from superstep.launch.ranks import RankWorld
from superstep.observe.events import Resumed
from superstep.plan.resolution.resolve import Resolved
from superstep.run.console import Console
from superstep.run.rl.prepare_rl import prepare_rl_job
from superstep.run.rl.resolve_recipe import resolve_rl
from superstep.run.rl.rl_rank import VERB, run_worlds
from superstep.state.checkpoint import read_position
from superstep.state.snapshots.memory_snapshot import Handles
from superstep.state.verify import newest
from superstep.train.run_folder.folder_watch import FolderWatch
from superstep.train.run_folder.run_paths import RunFolder
from superstep.tune.rl.config import RlRecipe
from superstep.tune.rl.job import RlJob, continue_from, find_remaining


class RlFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Facts of host 0's job for the other hosts, with absolute paths.

    Attributes:
        step: from which ranks start.
        pages: of each rank's KV cache.
    """

    dir: Path
    checkpoint: Path | None
    step: int
    pages: int | None


FACTS: Codec[RlFacts] = Codec(RlFacts)


class RlOnHosts:
    """The kind of run.

    Args:
        recipe: of the run.
        hosts: their number.
        kernels: the folder of compiled decoders; None uses torch.
        console: shows messages before the first step.
    """

    verb = VERB

    def __init__(self, recipe: RlRecipe, hosts: int, kernels: Path | None, console: Console) -> None:
        self.run, self._start = resolve_rl(recipe, hosts=hosts)
        self._recipe, self._hosts, self._kernels, self._console = recipe, hosts, kernels, console

    @property
    def plans(self) -> dict[int, Resolved]:
        """The plan for each number of hosts: it is not elastic."""
        return {self._hosts: self.run}

    @property
    def text(self) -> str:
        """The settings that all hosts must have in common, besides those of the plan."""
        return f"{self._recipe.rl}{self._recipe.rollout}{self._recipe.grade}"

    def prepare(self) -> AbstractContextManager[RlJob | None]:
        """The job on host 0, with the run's directory locked; None for a complete run."""
        return prepare_rl_job(self._recipe, self._kernels, self._console, hosts=self._hosts)

    def facts(self, job: RlJob, go: StartRanks) -> bytes:
        """Facts of host 0's job for the other hosts, as a message."""
        checkpoint = job.checkpoint if go.epoch == 1 else newest(job.folder.checkpoints)
        saved = 0 if checkpoint is None else read_position(checkpoint).step
        facts = RlFacts(
            dir=job.folder.root.resolve(),
            checkpoint=None if checkpoint is None else checkpoint.resolve(),
            step=saved if go.lost is None or go.state is None else go.state[0],
            pages=job.rollout.pages,
        )
        return FACTS.encode(facts)

    def job(self, given: Orders) -> RlJob:
        """The job on another host."""
        facts = given.facts_of(FACTS)
        state = replace(self.run.config.state, dir=str(facts.dir))
        run = replace(self.run, config=replace(self.run.config, state=state))
        folder = RunFolder(root=facts.dir)
        rollout = replace(self._recipe.rollout, pages=facts.pages)
        program, tasks = find_remaining(run, self._recipe.rl, rollout, folder, facts.step)
        return RlJob(
            run=run,
            rl=self._recipe.rl,
            rollout=rollout,
            grade=self._recipe.grade,
            folder=folder,
            start=self._start,
            checkpoint=None,
            program=program,
            tasks=tasks,
            kernels=self._kernels,
        )

    def start_job(self, job: RlJob, given: Orders, snapshots: Handles | None) -> RlJob:
        """The job of ranks that are started now."""
        go, facts = given.go, given.facts_of(FACTS)
        recovered, resumed = None, None
        if go.lost is not None:
            recovered = None if go.state is None else go.state[0]
            resumed_event = Resumed(step=facts.step, path="", lost_at_s=go.lost.at_s)
            resumed = (
                replace(resumed_event, joined=go.lost.text)
                if go.lost.is_gain
                else replace(resumed_event, lost=go.lost.text)
            )
        now = replace(job, checkpoint=facts.checkpoint, recovered=recovered, resumed=resumed)
        return continue_from(replace(now, epoch=go.epoch, snapshots=snapshots), facts.step)

    def watch(self, job: RlJob) -> FolderWatch:
        """A watch of the run directory."""
        return FolderWatch(job.folder, job.files)

    def worlds(self, job: RlJob, console: Console) -> list[RankWorld]:
        """The ranks that train, and those that only sample."""
        return run_worlds(job, console)
