"""``superstep train`` on several hosts: its job on host 0 and on the others, with smaller plans where it is elastic."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import msgspec

from superstep.comm.codec import Codec
from superstep.launch.hosts.events import StartRanks
from superstep.launch.hosts.messages import Orders
from superstep.launch.ranks import RankWorld
from superstep.plan.resolution.resolve import Resolved
from superstep.run.console import Console
from superstep.run.hosts.elastic import plans_of
from superstep.run.job import TrainJob, watch_of
from superstep.run.prepare_job import Tokens, prepare_job
from superstep.run.rank import rank
from superstep.run.recover import Recovery
from superstep.state.snapshots.memory_snapshot import Handles
from superstep.state.verify import newest
from superstep.train.run_folder.folder_watch import FolderWatch
from superstep.train.run_folder.run_paths import RunFolder
from superstep.train.weights.model import flops_per_token, operations


class TrainFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Facts of host 0's job for the other hosts, with absolute paths."""

    dir: Path
    corpus: Path
    checkpoint: Path | None
    was_complete: bool
    began_at_s: float
    earlier_s: float


FACTS: Codec[TrainFacts] = Codec(TrainFacts)


class TrainOnHosts:
    """The kind of run.

    Args:
        run: of ``share_out``.
        hosts: their number.
        tokens: makes or opens them on host 0.
        console: shows messages before the first step.
    """

    verb = "train"
    text = ""

    def __init__(self, run: Resolved, hosts: int, tokens: Tokens, console: Console) -> None:
        self.run, self._hosts, self._tokens, self._console = run, hosts, tokens, console

    @cached_property
    def plans(self) -> dict[int, Resolved]:
        """The plan for each number of hosts."""
        return plans_of(self.run, self._hosts)

    def prepare(self) -> AbstractContextManager[TrainJob | None]:
        """The job on host 0, with the run's directory locked; None for a complete run."""
        return prepare_job(self.run, self._tokens, self._console, hosts=self._hosts)

    def facts(self, job: TrainJob, go: StartRanks) -> bytes:
        """Facts of host 0's job for the other hosts, as a message."""
        checkpoint = job.checkpoint if go.epoch == 1 else newest(job.folder.checkpoints)
        facts = TrainFacts(
            dir=job.folder.root.resolve(),
            corpus=job.corpus.resolve(),
            checkpoint=None if checkpoint is None else checkpoint.resolve(),
            was_complete=job.was_complete,
            began_at_s=job.began_at_s,
            earlier_s=job.earlier_s,
        )
        return FACTS.encode(facts)

    def job(self, given: Orders) -> TrainJob:
        """The job on another host."""
        facts = given.facts_of(FACTS)
        state = replace(self.run.config.state, dir=str(facts.dir))
        run = replace(self.run, config=replace(self.run.config, state=state))
        traced = operations(run)
        return TrainJob(
            run=run,
            folder=RunFolder(root=facts.dir),
            corpus=facts.corpus,
            checkpoint=None,
            was_complete=facts.was_complete,
            operations=traced,
            flops_per_token=flops_per_token(run, traced),
            began_at_s=facts.began_at_s,
            earlier_s=facts.earlier_s,
        )

    def start_job(self, job: TrainJob, given: Orders, snapshots: Handles | None) -> TrainJob:
        """The job of ranks that are started now."""
        go, checkpoint = given.go, given.facts_of(FACTS).checkpoint
        recovered = None
        if go.lost is not None:
            step = None if go.state is None else go.state[0]
            recovered = Recovery(step, go.lost.text, go.lost.at_s, is_gain=go.lost.is_gain)
        planned = self._plan_for(job, len(go.crew(self._hosts)))
        return replace(planned, checkpoint=checkpoint, recovered=recovered, epoch=go.epoch, snapshots=snapshots)

    def _plan_for(self, job: TrainJob, hosts: int) -> TrainJob:
        """The job with the plan for ``hosts`` hosts."""
        if hosts == self._hosts:
            return job
        plan = self.plans[hosts]
        run = replace(plan, config=replace(plan.config, state=job.run.config.state))
        traced = operations(run)
        return replace(job, run=run, requested=job.run, operations=traced, flops_per_token=flops_per_token(run, traced))

    def watch(self, job: TrainJob) -> FolderWatch:
        """A watch of the run directory."""
        return watch_of(job)

    def worlds(self, job: TrainJob, console: Console) -> list[RankWorld]:
        """The ranks."""
        return [RankWorld(size=job.run.plan.mesh.world, worker=rank, args=(job, console))]
