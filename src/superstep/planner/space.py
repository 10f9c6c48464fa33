"""The space of plans: every layout of a run on a cluster that ``plan.resolution.resolve`` accepts.

It is made in three levels, each of which decides what its parts of a step cost:

    core        mesh (pp, dp, cp, tp, ep), sequence parallelism, ring or Ulysses, microbatch, recomputation
    schedule    order of microbatches, chunks, group
    sharding    ZeRO stage, replicas

Left out are plans that another one equals or beats:

    sequence_parallel with tp = 1; Ulysses with cp = 1     they change nothing
    ZeRO where every shard has one rank                    it changes nothing
    breadth-first, one chunk, one group                    gpipe
    interleaved with one chunk                             1f1b that keeps more
    on one pipeline rank                                   all schedules but 1f1b, gpipe, and breadth-first with a stage
        for each block: there is no rank to wait for
    tp over more than ``FAR`` domains                      never seen to pay

The optimizer's state on the host has no column: the engine cannot run it yet.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from superstep.cost.closed.parallel_degrees import RECOMPUTE, SCHEDULES
from superstep.hardware.units import Array
from superstep.plan.config import Schedule
from superstep.plan.resolution.fill_plan import divisors
from superstep.plan.sharding.sequence import cp_of_heads, multiple
from superstep.planner.plan_columns import CONTEXT, Plans
from superstep.planner.search_problem import SearchProblem

FAR = 4
"""The most fast domains that tensor parallelism may span."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshDegrees:
    pp: int
    dp: int
    cp: int
    tp: int
    ep: int


def meshes(problem: SearchProblem) -> Iterator[MeshDegrees]:
    """Every mesh of all chips that the model, the sequence and the batch can be cut over."""
    shape, chips = problem.shape, problem.cluster.chips
    tokens = problem.sequence_tokens
    for tp in (n for n in divisors_within(chips, FAR * problem.cluster.domain) if _cuts(problem, n)):
        for pp in divisors_within(chips // tp, shape.layers):
            for cp in divisors_within(chips // tp // pp, tokens // 2):
                dp = chips // tp // pp // cp
                whole = tokens % multiple(cp, tp if shape.moe else 1) == 0 if cp > 1 else True
                if not whole or problem.batch_sequences % dp:
                    continue
                for ep in _expert_degrees(problem, dp * cp * tp):
                    mesh = MeshDegrees(pp=pp, dp=dp, cp=cp, tp=tp, ep=ep)
                    if all(problem.admits(name, getattr(mesh, name)) for name in ("pp", "dp", "cp", "tp", "ep")):
                        yield mesh


def divisors_within(number: int, most: int) -> list[int]:
    """Divisors of ``number`` up to ``most``, ascending."""
    return [n for n in range(1, min(number, most) + 1) if number % n == 0]


def _cuts(problem: SearchProblem, tp: int) -> bool:
    """Whether tp cuts the model's axes evenly, and a mixture's tokens; the vocabulary is padded."""
    shape = problem.shape
    sizes = (shape.heads, shape.kv_heads, problem.sequence_tokens if shape.moe else shape.ffn)
    return all(size % tp == 0 for size in sizes)


def _expert_degrees(problem: SearchProblem, ranks: int) -> list[int]:
    moe = problem.shape.moe
    return [1] if moe is None else divisors(math.gcd(moe.experts, ranks))


@dataclass(frozen=True, slots=True)
class Space:
    """The plans of a problem."""

    problem: SearchProblem

    def cores(self) -> Plans:
        """Every core, on 1f1b without ZeRO, the simplest first."""
        parts = [columns for mesh in meshes(self.problem) for columns in self._cores_of(mesh)]
        table = np.array(parts, dtype=np.float64).reshape(-1, 10).T
        ones, zeros = np.ones(table.shape[1]), np.zeros(table.shape[1])
        names = ("pp", "dp", "cp", "tp", "ep", "sequence_parallel", "context", "microbatch", "microbatches")
        columns = dict(zip((*names, "recompute"), table, strict=True))
        return Plans(
            **columns,
            schedule=zeros,
            chunks=ones,
            microbatch_group=zeros,
            zero=zeros,
            replicas=ones,
            layers=ones * self.problem.shape.layers,
            prefetch=ones * self.problem.base.plan.prefetch,
        )

    def _cores_of(self, mesh: MeshDegrees) -> Iterator[tuple[float, ...]]:
        problem = self.problem
        share = problem.batch_sequences // mesh.dp
        microbatches = [n for n in divisors(share) if problem.admits("microbatch", n)]
        recompute = [n for n, name in enumerate(RECOMPUTE) if problem.admits("recompute", name)]
        split = [s for s in self._sequence_splits(mesh) if problem.admits("sequence_parallel", bool(s))]
        context = [c for c in self._contexts(mesh) if problem.admits("context", CONTEXT[c])]
        degrees = (mesh.pp, mesh.dp, mesh.cp, mesh.tp, mesh.ep)
        for again, s, c, b in product(recompute, split, context, microbatches):
            yield (*degrees, s, c, b, share // b, again)

    def _sequence_splits(self, mesh: MeshDegrees) -> list[int]:
        if mesh.tp == 1:
            return [1] if self.problem.admits("sequence_parallel", value=True) else [0]
        tokens = self.problem.sequence_tokens
        is_whole = tokens % mesh.tp == 0 and (mesh.cp == 1 or tokens % multiple(mesh.cp, mesh.tp) == 0)
        return [1, 0] if is_whole else [0]

    def _contexts(self, mesh: MeshDegrees) -> list[int]:
        shape = self.problem.shape
        fits = mesh.cp > 1 and mesh.cp in cp_of_heads(shape.heads, shape.kv_heads, mesh.tp)
        return [CONTEXT.index("ring"), *([CONTEXT.index("ulysses")] if fits else [])]

    def schedules(self, pp: int, microbatches: int) -> Array:
        """Every (schedule, chunks, group) [n, 3] for these pipeline ranks and microbatches; no group is 0."""
        rows = [
            (SCHEDULES.index(name), chunks, group)
            for name, chunks, group in _orders(pp, microbatches, self.problem.shape.layers)
            if self.problem.admits("schedule", name)
            and self.problem.admits("chunks", chunks)
            and self.problem.admits("microbatch_group", group or None)
        ]
        return np.array(rows, dtype=np.float64).reshape(-1, 3)

    def shardings(self, data: int, experts: int) -> Array:
        """Every (zero, replicas) [n, 2] for ``data`` ranks with the same parameters, ``experts`` with the same experts
        (0 without experts).
        """
        admits = self.problem.admits
        shared = data > 1 or experts > 1
        copies = [n for n in divisors(data) if n == 1 or (n < data and experts % n == 0)]
        rows = [(0, 1), *((zero, n) for zero in (1, 2, 3) for n in copies if shared)]
        kept = [(zero, n) for zero, n in rows if admits("zero", zero) and admits("replicas", n)]
        return np.array(kept, dtype=np.float64).reshape(-1, 2)

    def with_schedules(self, cores: Plans) -> Plans:
        """Each core with every schedule, one core after the other."""
        tables = {key: self.schedules(*key) for key in _pairs(cores.pp, cores.microbatches)}
        parts = [tables[key] for key in _each(cores.pp, cores.microbatches)]
        schedule, chunks, group = _stack_columns(parts, 3)
        repeated = cores.take(np.repeat(np.arange(len(cores)), [len(part) for part in parts]))
        return replace(repeated, schedule=schedule, chunks=chunks, microbatch_group=group)

    def with_shardings(self, plans: Plans) -> Plans:
        """Each plan with every sharding, one plan after the other."""
        data, alike = plans.dp * plans.cp, self._alike(plans)
        tables = {key: self.shardings(*key) for key in _pairs(data, alike)}
        parts = [tables[key] for key in _each(data, alike)]
        zero, replicas = _stack_columns(parts, 2)
        repeated = plans.take(np.repeat(np.arange(len(plans)), [len(part) for part in parts]))
        return replace(repeated, zero=zero, replicas=replicas)

    def count(self, cores: Plans) -> Array:
        """The number of plans of each core."""
        schedules = {key: len(self.schedules(*key)) for key in _pairs(cores.pp, cores.microbatches)}
        orders = np.array([schedules[key] for key in _each(cores.pp, cores.microbatches)], dtype=np.float64)
        return orders * self.count_shardings(cores)

    def count_shardings(self, plans: Plans) -> Array:
        """The number of shardings of each plan."""
        data, alike = plans.dp * plans.cp, self._alike(plans)
        shardings = {key: len(self.shardings(*key)) for key in _pairs(data, alike)}
        return np.array([shardings[key] for key in _each(data, alike)], dtype=np.float64)

    def _alike(self, plans: Plans) -> Array:
        """Ranks with the same experts; 0 without experts."""
        if self.problem.shape.moe is None:
            return np.zeros(len(plans))
        return plans.dp * plans.cp * plans.tp / plans.ep


def _orders(pp: int, microbatches: int, layers: int) -> Iterator[tuple[Schedule, int, int]]:
    """Schedules with their chunks and group."""
    groups = divisors(microbatches)
    yield from (("1f1b", 1, 0), ("gpipe", 1, 0))
    if pp == 1:
        yield from (("breadth-first", layers, group) for group in groups if layers > 1)
        return
    yield ("zb-h1", 1, 0)
    if 2 * pp <= layers:
        yield ("zb-v", 2, 0)
    yield from (("breadth-first", 1, group) for group in groups[:-1])
    for chunks in range(2, layers // pp + 1):
        for group in (n for n in groups if n >= pp):
            yield from (("interleaved", chunks, group), ("breadth-first", chunks, group))


def _each(first: Array, second: Array) -> list[tuple[int, int]]:
    return [(int(a), int(b)) for a, b in zip(first, second, strict=True)]


def _pairs(first: Array, second: Array) -> list[tuple[int, int]]:
    """The pairs that occur."""
    return list(dict.fromkeys(_each(first, second)))


def _stack_columns(parts: Sequence[Array], columns: int) -> Array:
    return np.concatenate([np.empty((0, columns)), *parts]).T.copy()
