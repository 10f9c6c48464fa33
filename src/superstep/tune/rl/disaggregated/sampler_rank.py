"""A rank that samples while others train: its lane of the program, and its line to the trainer's rank 0."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from superstep.comm.objects import gather
from superstep.errors import StateError
from superstep.grade.environment import Tasks
from superstep.grade.workers.environment_process import EnvironmentProcess
from superstep.launch.ranks import World
from superstep.tune.program.instructions import Iterations, Retire, Sample, Take
from superstep.tune.rl.colocated import samples_from
from superstep.tune.rl.disaggregated.disaggregated import require_own_room, samplers_of
from superstep.tune.rl.disaggregated.hub_connection import HubConnection
from superstep.tune.rl.disaggregated.hub_messages import Retired, SampledGroup, SamplerHello
from superstep.tune.rl.job import RlJob, serve_of, worker_settings
from superstep.tune.rl.rollout_worker import RolloutWorker, TrainerLeft
from superstep.tune.rl.sampling import words_of

REMOVAL_S = 1.0
"""Seconds to wait for a version's folder to be removed."""


class SamplerLane:
    """One rank of a sampler.

    Args:
        seat: its rollout worker.
        line: to the trainer.
        environment: of the tasks.
        seed: of the tasks.
        tasks: task numbers of places that have exchanged theirs.
    """

    def __init__(
        self, seat: RolloutWorker, line: HubConnection, environment: Tasks, seed: int, tasks: Mapping[int, int]
    ) -> None:
        self._seat = seat
        self._line = line
        self._environment = environment
        self._seed = seed
        self._tasks = tasks
        self._has_left = False

    def run(self, program: Iterations) -> None:
        """Run the lane, until its end or until the trainer needs no more."""
        lane = program.lane("sampler")
        taken: Path | None = None
        at = 0
        while at < len(lane):
            match lane[at]:
                case Take(version):
                    # Ranks that share a model must leave together.
                    taken, *_ = paths = gather(self._line.version(version), Path | None)
                    if None in paths:
                        return
                case Sample(_, version):
                    assert taken is not None, "a version was taken"
                    batch = samples_from(lane[at:])
                    self._sample(batch, version, taken)
                    if any(gather(self._has_left, bool)):
                        return
                    at += len(batch)
                    continue
                case Retire(version):
                    if self._seat.is_first:
                        self._line.tell(Retired(version))
                case _:
                    raise AssertionError("a sampler does none of these")
            at += 1

    def _sample(self, places: list[int], version: int, folder: Path) -> None:
        numbers = [self._tasks.get(place, place) for place in places]
        tasks = [(number, self._environment.task(number, self._seed)) for number in numbers]
        try:
            for group in self._seat.sample(folder, version, tasks, self._look):
                self._line.tell(SampledGroup(group))
        except (StateError, OSError):
            if not self._is_removed(folder) or not self._line.ends_within():
                raise
            self._has_left = True

    def _is_removed(self, folder: Path) -> bool:
        """Whether a version's folder is gone, most likely with the run directory. The trainer will detect that, save
        the state and end the run; it could not if a sampler failed first.
        """
        return self._line.ends_within(REMOVAL_S) or not folder.exists()

    def _look(self) -> None:
        """Called after each step of the engine."""
        if self._line.is_over:
            self._has_left = True
            raise TrainerLeft


def sample_apart(world: World, job: RlJob, number: int) -> None:
    """One rank of a sampler, until the trainer needs no more.

    Args:
        world: the ranks that share the sampler's model.
        job: of the run.
        number: of the sampler.
    """
    assert world.store is not None, "the ranks were launched"
    pages = require_own_room(world, job, "sampler")
    serve = serve_of(job.run, replace(job.rollout, pages=pages), job.kernels)
    environment = EnvironmentProcess(job.rl.environment, job.rollout.reply_timeout_s)
    words = words_of(job.start)
    with ExitStack() as stack:
        stack.callback(environment.close)
        stack.callback(words.template.close)
        seat = RolloutWorker(world, worker_settings(job, serve), words, environment, others=(number, samplers_of(job)))
        hello, goes_on, attempts = SamplerHello(number, world.rank), True, itertools.count()
        while goes_on:
            line = HubConnection(world.store, hello, job.rollout.timeout_s, next(attempts))
            program, tasks = line.program()
            SamplerLane(seat, line, environment, job.run.config.train.seed, tasks).run(program)
            goes_on = line.close()
        seat.close()
