"""The wait graph: what each rank's instruction needs of other ranks, and which of them has not given it yet.

    rank 0  waits at settle u3 for reduce u3        rank 1 has not come to its reduce u3: rank 0 waits for rank 1
    rank 1  works on backward u3 m1                 it waits for no known rank: it is the end of the chain

A rank that works may wait as well: sums over tied units and over tp, and the exchanges of tensor, context and expert
parallelism are part of an instruction. There it waits for the ranks of its group that are behind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from superstep.observe.doctor.observations import RankObservation, RunObservation
from superstep.plan.mesh import Coordinate, MeshShape
from superstep.program import instructions as ins
from superstep.program.instructions import Instruction, is_compute
from superstep.program.text import describe
from superstep.program.timeline import Arrival, Needs, brings


@dataclass(frozen=True, slots=True)
class RankWait:
    """A rank that waits for others.

    Attributes:
        what: it needs, in words: the tensor or the sum.
        missing: ranks that have not come to where they give it.
        past: ranks that have passed their own use of it, though this one lacks it.
    """

    rank: int
    what: str
    missing: tuple[int, ...]
    past: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Need:
    """A joint operation of several ranks: where each one's list has its part, and where the result is needed."""

    what: str
    parts: Mapping[int, int]
    needed: int | None = None


class Waits:
    """The waits of one run."""

    def __init__(self, run: RunObservation) -> None:
        self._run = run
        self._needs = Needs(run.program)
        self._ranks = {rank.rank: rank for rank in run.ranks}

    @cached_property
    def all(self) -> tuple[RankWait, ...]:
        """Every rank that waits for another, or for something that others take for done."""
        return tuple(wait for rank in self._run.ranks if (wait := self._of(rank)) is not None)

    def _of(self, rank: RankObservation) -> RankWait | None:
        """A rank's first need that some have not given; or else the first that others have passed."""
        if rank.doing == "apart" or not rank.index < len(rank.follows):
            return None
        past: RankWait | None = None
        for need in self._of_instruction(rank):
            missing = tuple(p for p, at in need.parts.items() if p != rank.rank and not self._has_given(p, rank, at))
            if missing:
                return RankWait(rank.rank, need.what, missing)
            if past is None and need.needed is not None and (beyond := self._beyond(rank, need)):
                past = RankWait(rank.rank, need.what, (), beyond)
        return past

    def _has_given(self, rank: int, observed: RankObservation, index: int) -> bool:
        """Whether a rank has come to an instruction of its list, in the run of a program of ``observed``. A rank that
        waits in a step has come to its sums.
        """
        other = self._ranks.get(rank)
        if other is None:
            return True  # nothing is known of it, so that it is not to blame
        if other.at == (observed.run, index):
            match other.follows[index]:
                case ins.Step() | ins.Tie() | ins.ReducePartial():
                    return other.doing == "waits"
                case ins.Send() | ins.Fetch() | ins.Reduce() | ins.ReduceReplicas():
                    return False  # it has come to it, and has not started it
                case _:
                    return other.doing == "works"
        return other.at > (observed.run, index)

    def _beyond(self, rank: RankObservation, need: _Need) -> tuple[int, ...]:
        assert need.needed is not None
        others = (self._ranks[p] for p in need.parts if p != rank.rank and p in self._ranks)
        alike = (other for other in others if self._place(other.rank).pp == self._place(rank.rank).pp)
        return tuple(other.rank for other in alike if other.at > (rank.run, need.needed))

    def _of_instruction(self, rank: RankObservation) -> Iterator[_Need]:
        at, instruction = rank.index, rank.follows[rank.index]
        if rank.doing == "waits":
            for arrival in self._needs(instruction):
                yield from self._arrival(rank, arrival, at)
        match instruction:
            case ins.Step():
                if rank.doing == "waits":
                    yield _Need("the sums of the step", self._last(ins.Step()), at)
            case ins.Tie(unit):
                yield _Need(f"the sum of tied u{unit}", self._last(instruction, self._find_tied_ranks(rank, unit)), at)
            case ins.ReducePartial():
                yield _Need("the partial sums over tp", dict.fromkeys(self._over_tp(rank), at), at)
            case _ if rank.doing == "works" and (
                is_compute(instruction) or isinstance(instruction, ins.BackwardWeight)
            ):
                if len(members := self._within(rank)) > 1:
                    yield _Need(f"what its group exchanges in {describe(instruction)}", dict.fromkeys(members, at))

    def _arrival(self, observed: RankObservation, arrival: Arrival, before: int) -> Iterator[_Need]:
        """What a lane delivers, if it was started before."""
        at = next((j for j in reversed(range(before)) if brings(observed.follows[j]) == arrival), None)
        if at is None:
            return
        instruction = observed.follows[at]
        match instruction:
            case ins.Recv(wire, unit, m, peer):
                here = self._place(observed.rank)
                rank = self._mesh.rank(Coordinate(pp=peer, dp=here.dp, cp=here.cp, tp=here.tp))
                given = self._index(rank, ins.Send(wire, unit, m, here.pp))
                if given is not None:
                    yield _Need(f"{'act' if wire == 'act' else 'grad'} u{unit} m{m}", {rank: given})
            case ins.Fetch() | ins.Reduce() | ins.ReduceReplicas():
                members = self._sharers(observed.rank, is_over_replicas=isinstance(instruction, ins.ReduceReplicas))
                yield _Need(describe(instruction), dict.fromkeys(members, at), before)
            case _:
                return  # a copy, which needs nobody

    def _index(self, rank: int, instruction: Instruction) -> int | None:
        follows = self._ranks[rank].follows if rank in self._ranks else ()
        return follows.index(instruction) if instruction in follows else None

    def _last(self, instruction: Instruction, ranks: tuple[int, ...] | None = None) -> dict[int, int]:
        """Where each rank's list has an instruction, if it has."""
        indices = {rank: self._index(rank, instruction) for rank in (self._ranks if ranks is None else ranks)}
        return {rank: at for rank, at in indices.items() if at is not None}

    @property
    def _mesh(self) -> MeshShape:
        return self._run.mesh

    def _place(self, rank: int) -> Coordinate:
        return self._mesh.at(rank)

    def _over_tp(self, rank: RankObservation) -> tuple[int, ...]:
        return tuple(next(group for group in self._mesh.groups("tp") if rank.rank in group))

    def _find_tied_ranks(self, rank: RankObservation, unit: int) -> tuple[int, ...]:
        at = self._place(rank.rank)
        places = self._run.program.holders(unit)
        return tuple(self._mesh.rank(Coordinate(pp=pp, dp=at.dp, cp=at.cp, tp=at.tp)) for pp in places)

    def _sharers(self, rank: int, *, is_over_replicas: bool) -> tuple[int, ...]:
        """The ranks that share parameters with a rank; with experts, those of its dense parameters and of its
        experts.
        """
        mesh, ranks = self._mesh, set[int]()
        for family in ("dense", "experts") if mesh.ep > 1 else ("dense",):
            groups = mesh.replica_groups(family) if is_over_replicas else mesh.shard_groups(family)
            ranks |= set(next((group for group in groups if rank in group), []))
        return tuple(sorted(ranks))

    def _within(self, observed: RankObservation) -> tuple[int, ...]:
        """The ranks that take part in a rank's compute."""
        mesh = self._mesh
        groups = mesh.sequence_groups() + (mesh.expert_groups() if mesh.ep > 1 else [])
        return tuple(sorted({rank for group in groups if observed.rank in group for rank in group}))


def first_of(waits: Waits, rank: int) -> tuple[int, ...]:
    """The ranks at the end of the chains of waits from a rank; itself where it does not wait."""
    missing = {wait.rank: wait.missing for wait in waits.all}
    ends, visited, todo = list[int](), set[int](), [rank]
    while todo:
        at = todo.pop()
        if at in visited:
            continue
        visited.add(at)
        if missing.get(at):
            todo += missing[at]
        else:
            ends.append(at)
    return tuple(sorted(ends))
