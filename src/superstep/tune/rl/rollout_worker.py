"""The rollout worker of a rank: one engine for each rank or few ranks, which sleeps between samplings.

    trainer   dp=2 tp=2      ranks 0 1 2 3
    sampler   2 of tp=2      0 1 │ 2 3         each answers every second group
    sampler   4 of tp=1      0 │ 1 │ 2 │ 3

Samplers with ranks of their own are a world each.

Replicas finish at different times, and meet until all are done:

    replica 0   sample ── meet ── sample ── meet ─ done ─ meet ─────────── meet
    replica 1   sample ── meet ── sample ── meet ── sample ── meet ── sample ─ done ─ meet

So a collective's time limit covers the work between two meetings, not a whole sampling: slow replicas are waited for,
and a stuck one ends the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch

from superstep.comm.collectives import sum_over
from superstep.comm.device import Device
from superstep.comm.mesh import Group, Mesh, build_mesh
from superstep.comm.objects import world_group
from superstep.errors import ConfigError
from superstep.grade.environment import Tasks
from superstep.grade.task import Task
from superstep.launch.ranks import World
from superstep.plan.config import DataConfig, ModelConfig, PlanConfig, RunConfig, TrainConfig
from superstep.plan.resolution.resolve import resolve
from superstep.serve.build_engine import open_both
from superstep.serve.compute.runner.model_runner import follow
from superstep.serve.compute.runner.rank_commands import Tensors
from superstep.serve.config import ServeConfig, plan_of
from superstep.serve.engine import InferenceEngine
from superstep.serve.engine_control import EngineController
from superstep.serve.load_rank import KnownModel, Rank, load_rank
from superstep.tune.rl.config import RolloutConfig
from superstep.tune.rl.from_rank0 import BEAT_S
from superstep.tune.rl.sampling import RolloutSampler, TaskGroup, TextCodec, require_vocab

MESH_TIMEOUT = timedelta(minutes=10)
ADAPTER = "trained"
"""The name of the trained adapters in the sampler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerSettings:
    """Settings of a sampler.

    Attributes:
        serve: of its engine; ``tp`` ranks share the model.
        how: of sampling.
        group: answers to a task.
        seed: of the run.
        start: the folder of the run's initial model.
        is_beside: whether versions are adapters beside its weights; otherwise whole models.
    """

    serve: ServeConfig
    how: RolloutConfig
    group: int
    seed: int
    start: Path
    is_beside: bool = False


class TrainerLeft(Exception):
    """The trainer needs no more samples."""


class ReplicaGroup:
    """Replicas of one world that sample together, on the first rank of one of them.

    Args:
        group: the first rank of each; None for one replica.
        device: of this one.
        every_s: seconds between meetings.
    """

    def __init__(self, group: Group | None, device: Device, every_s: float) -> None:
        self._group = group
        self._device = device
        self._every_s = every_s
        self._met_s = time.monotonic()

    @property
    def is_due(self) -> bool:
        """Whether the next meeting is due."""
        return time.monotonic() - self._met_s >= self._every_s

    def meet(self, *, is_done: bool) -> bool:
        """Wait for the others, at most for a step of theirs; whether all of them are done.

        Args:
            is_done: whether this one is.
        """
        left = sum_over(torch.tensor(int(not is_done), device=self._device.torch), self._group)
        self._met_s = time.monotonic()
        return int(left) == 0


class RolloutWorker:
    """A rank's rollout worker.

    Args:
        world: the launched ranks.
        settings: of sampling.
        words: codec of the model.
        environment: of the tasks.
        others: samplers in other worlds: this one's number, and their count. None where all are in this world.
    """

    def __init__(
        self,
        world: World,
        settings: SamplerSettings,
        words: TextCodec,
        environment: Tasks,
        others: tuple[int, int] | None = None,
    ) -> None:
        if world.size % settings.serve.tp:
            raise ConfigError(
                f"rollout.tp = {settings.serve.tp} does not divide the {world.size} ranks that sample; choose one of "
                f"{[tp for tp in range(1, world.size + 1) if world.size % tp == 0]}."
            )
        self._here = world.size // settings.serve.tp
        self.replica, self.replicas = others or (world.rank // settings.serve.tp, self._here)
        self._settings = settings
        self._world = world
        self._words = words
        self._environment = environment
        self._mesh: Mesh | None = None
        self._rank: Rank | None = None
        self._open: tuple[InferenceEngine, EngineController, RolloutSampler] | None = None

    @property
    def is_first(self) -> bool:
        """Whether it is the first of the ranks that share its model."""
        return self._world.rank % self._settings.serve.tp == 0

    @property
    def is_alone(self) -> bool:
        """Whether it has the whole model."""
        return self._settings.serve.tp == 1

    def sample(
        self,
        source: Path | Tensors,
        version: int,
        tasks: Sequence[tuple[int, Task]],
        tell: Callable[[], None] = lambda: None,
    ) -> Iterator[TaskGroup]:
        """Take a version, answer this replica's share of some tasks, and free the memory once the other replicas of
        this world are done.

        Ranks that are not the first of their replica yield nothing. The iterator must be exhausted, unless ``tell``
        raises ``TrainerLeft``: then it ends.

        Args:
            source: of the version: a snapshot's folder, or whole tensors for a rank with the whole model.
            version: its number.
            tasks: with their groups.
            tell: called after each of the engine's steps, and each answer.
        """
        threads = torch.get_num_threads()
        # A version from a folder is verified by its digests, which name it.
        engine = self.take(source, "" if isinstance(source, Path) else f"step {version}")
        try:
            if engine is not None:
                replicas = self._replicas()

                def look() -> None:
                    tell()
                    if replicas.is_due:
                        engine[0].wait()
                        replicas.meet(is_done=False)

                with suppress(TrainerLeft):
                    yield from engine[2].sample(tasks[self.replica :: self.replicas], version, look)
                while not replicas.meet(is_done=True):
                    engine[0].wait()
                engine[1].sleep()
                if self._settings.serve.tp > 1:
                    engine[0].end()  # the others train now; they follow again with the next version
        finally:
            torch.set_num_threads(threads)  # exact mode uses one

    def take(
        self, version: Path | Tensors, number: str
    ) -> tuple[InferenceEngine, EngineController, RolloutSampler] | None:
        source = self._settings.start if self._settings.is_beside else version
        folder = source if isinstance(source, Path) else self._settings.start
        tp = self._group(folder)
        if not self.is_first:
            if self._rank is None:
                self._rank = load_rank(
                    folder, self._settings.serve, self._mesh_at.at.tp, self._mesh_at.tp, self._world.device
                )
            assert self._mesh_at.tp is not None
            follow(self._rank.forward, self._mesh_at.tp, self._world.device, self._rank.party, self._rank.small)
            return None
        if self._open is None:
            engine, steward = open_both(
                folder,
                self._settings.serve,
                tp=tp.tp if tp else None,
                device=self._world.device,
                known=KnownModel(version=""),
            )
            require_vocab(self._words, engine.info.vocab, folder)
            sampler = RolloutSampler(
                engine,
                self._words,
                self._environment,
                self._settings.how,
                group=self._settings.group,
                seed=self._settings.seed,
                adapter=ADAPTER if self._settings.is_beside else "",
            )
            self._open = engine, steward, sampler
            if source is not folder:
                steward.sleep()
                steward.wake(source, version=number)
        else:
            self._open[1].wake(source, version=number)
        if self._settings.is_beside:  # unmerged, so that a version is small, and exact mode has the trainer's sums
            assert isinstance(version, Path), "adapters come in folders"
            self._open[0].adapters.load(ADAPTER, version)
        return self._open

    @property
    def _mesh_at(self) -> Mesh:
        assert self._mesh is not None, "ranks share the model"
        return self._mesh

    def _group(self, folder: Path) -> Mesh | None:
        """The ranks of each replica, as a mesh of all."""
        if self._settings.serve.tp > 1 and self._mesh is None:
            plan = plan_of(folder, self._settings.serve)
            config = RunConfig(
                model=ModelConfig(name=str(folder / "config.json")),
                data=replace(DataConfig(), sequence_tokens=plan.config.data.sequence_tokens),
                train=TrainConfig(batch_sequences=self._here),
                plan=PlanConfig(tp=self._settings.serve.tp, dp=self._here, microbatch=1),
                numerics=plan.config.numerics,
            )
            self._mesh = build_mesh(resolve(config).plan, self._world.rank, self._world.device, timeout=MESH_TIMEOUT)
        return self._mesh

    def _replicas(self) -> ReplicaGroup:
        """Replicas of this world, on the first rank of one."""
        group = None
        if self._here > 1:
            group = world_group() if self.is_alone else self._mesh_at.sharers["dense"].fetch
        return ReplicaGroup(group, self._world.device, BEAT_S)

    def close(self) -> None:
        """Release the engine and its ranks."""
        if self._mesh is not None:
            self._mesh.destroy()
