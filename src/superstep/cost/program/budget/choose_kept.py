"""choose_kept: what each unit keeps of each microbatch within ``plan.memory``, and where.

Several choices are compiled, their memory is computed as for every plan, and they run on the simulator's clock: the
same for all units, and those of ``evict`` with and without copies to another place. The quickest that fits is taken. It
is made once, for all ranks: it is a field of the plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from superstep.cost.program.budget.evict import Eviction, KeptUnit, evict
from superstep.cost.program.memory.memory import RankBytes, rank_bytes
from superstep.cost.program.time.instruction_seconds import InstructionPrices, instruction_seconds
from superstep.cost.program.time.simulate import simulate
from superstep.hardware.units import Array
from superstep.plan.config import Kept, Place
from superstep.plan.resolution.budget import KeptChoices, find_budget, find_place, list_choices, write_kept
from superstep.plan.resolution.resolve import Resolved
from superstep.program import instructions as ins
from superstep.program.compile import compile_step
from superstep.program.offload import Key, list_passes
from superstep.program.peak_memory import UnitBytes, course

MOST_TRIES = 8
"""How often evictions are made anew with less room where the compiled program takes more than they expected."""
SHARE = 0.02
"""The share of what comes and goes within a step that a prediction may be too low, which stays free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptPlan:
    """Choices, with the step and the memory that they are predicted to take.

    Attributes:
        name: how they were made.
        bytes: of the fullest rank.
    """

    name: str
    kept: KeptChoices
    step_s: float
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetResult:
    """The choices for a budget.

    Attributes:
        best: the quickest that fits; None where none does.
        others: further choices that were tried, those without room too.
        least: those that take least memory.
    """

    best: KeptPlan | None
    others: tuple[KeptPlan, ...]
    least: KeptPlan


def apply_kept(run: Resolved, kept: KeptChoices) -> Resolved:
    """The run with choices of its units, in its plan and its configuration."""
    place = find_place(run.config.plan)
    places: tuple[Place, ...] = tuple(place if place in own else "device" for own in kept)
    activations = () if set(places) <= {"device"} else places
    config = replace(run.config, plan=replace(run.config.plan, kept=write_kept(kept)))
    return replace(run, config=config, plan=replace(run.plan, kept=kept, activations=activations))


def choose_kept(run: Resolved, prices: InstructionPrices) -> BudgetResult:
    """The quickest choices of a run that fit its budget. ``prices``: of the run without choices."""
    return _Search(run, prices).run_all()


class _Search:
    """The choices of a run that were tried."""

    def __init__(self, run: Resolved, prices: InstructionPrices) -> None:
        budget_bytes = find_budget(run.config.plan)
        assert budget_bytes is not None, "automatic choices have a budget"
        self.budget_bytes, self.prices = budget_bytes, prices
        self.run = replace(run, plan=replace(run.plan, kept=(), activations=()))
        self.sizes = prices.list_sizes()
        self.program = compile_step(self.run.plan, is_each_pass_checked=False)
        self.seconds = instruction_seconds(self.run, self.program, prices)
        self.memory = rank_bytes(self.run, self.program, self.sizes)
        self.place = find_place(run.config.plan)
        timeline = simulate(self.program, self.seconds)
        self.clocks_s = [np.array([e.end_s for e in timeline.of(rank)]) for rank in range(self.program.pp)]
        self.levels = [self._list_levels(rank) for rank in range(self.program.pp)]

    def _list_levels(self, rank: int) -> Array:
        stays = self.memory[rank].bytes - self.memory[rank].peak.bytes
        return np.array([stays + now.bytes for now in course(self.program, rank, self.sizes)], dtype=np.float64)

    def run_all(self) -> BudgetResult:
        everything = self._price("all kept", self._fill("all"))
        if self._fits(everything):
            return BudgetResult(best=everything, others=(), least=everything)
        less: list[Kept] = ["selective", "input", *([self.place] if self.place != "device" else [])]
        tried = [everything, *(self._price(f"{choice} of all", self._fill(choice)) for choice in less)]
        tried += [plan for choices in self._list_sets(less) if (plan := self._evict(choices)) is not None]
        fitting = [plan for plan in tried if self._fits(plan)]
        best = min(fitting, key=lambda plan: (plan.step_s, plan.bytes), default=None)
        least = min(tried, key=lambda plan: plan.bytes)
        if best is None:
            least = self._find_least(less, least)
            best = least if self._fits(least) else None
        return BudgetResult(best=best, others=tuple(plan for plan in tried if plan is not best), least=least)

    def _list_sets(self, less: Sequence[Kept]) -> Iterator[tuple[Kept, ...]]:
        yield ("selective", "input")
        if self.place != "device":
            yield tuple(less)
            yield (self.place,)

    def _fits(self, plan: KeptPlan) -> bool:
        return plan.bytes <= self.budget_bytes

    def _fill(self, choice: Kept) -> KeptChoices:
        """One choice for all units that have it."""
        plan = self.run.plan
        return tuple(
            ((choice if choice in list_choices(self.place, can_recompute=can_recompute) else "all"),)
            * plan.microbatches
            for can_recompute in plan.recomputed
        )

    def _price(self, name: str, kept: KeptChoices) -> KeptPlan:
        """Choices with their step, and the memory with what stays free beside it."""
        made = apply_kept(self.run, kept)
        program = compile_step(made.plan, is_each_pass_checked=False)
        seconds = instruction_seconds(made, program, self.prices)
        size = max(count_bytes(rank) for rank in rank_bytes(made, program, self.sizes))
        return KeptPlan(name=name, kept=kept, step_s=simulate(program, seconds).step_s, bytes=size)

    def _evict(self, choices: tuple[Kept, ...], budget_bytes: float | None = None) -> KeptPlan | None:
        """The choices of evictions, made again with less room until the compiled program fits; None where none does."""
        budget_bytes = self.budget_bytes if budget_bytes is None else budget_bytes
        limit_bytes = budget_bytes
        kept_units = [list(self._list_kept(rank, choices)) for rank in range(self.program.pp)]
        for number in range(MOST_TRIES):
            chosen: dict[Key, Eviction] = {}
            for levels, clock_s, units in zip(self.levels, self.clocks_s, kept_units, strict=True):
                evicted = evict(levels, clock_s, units, limit_bytes)
                if evicted is None:
                    return None
                chosen |= evicted
            plan = self._price(f"evictions of {', '.join(choices)}", self._write(chosen))
            if plan.bytes <= budget_bytes:
                return plan
            limit_bytes -= 2**number * (plan.bytes - budget_bytes)
        return None

    def _write(self, chosen: Mapping[Key, Eviction]) -> KeptChoices:
        plan = self.run.plan
        return tuple(
            tuple(chosen[unit, m].choice if (unit, m) in chosen else "all" for m in range(plan.microbatches))
            for unit in range(len(plan.units))
        )

    def _find_least(self, less: Sequence[Kept], least: KeptPlan) -> KeptPlan:
        """Choices that take less memory than the same of all units, by bisection."""
        low, high = 0.0, float(least.bytes)
        for _ in range(MOST_TRIES):
            middle = (low + high) / 2
            plan = self._evict(tuple(less), middle)
            if plan is None:
                low = middle
            else:
                least, high = min(least, plan, key=lambda one: one.bytes), min(middle, float(plan.bytes))
        return least

    def _list_kept(self, rank: int, choices: tuple[Kept, ...]) -> Iterator[KeptUnit]:
        """What a rank keeps between two passes, with the ways to keep less of it."""
        instructions = self.program.ranks[rank]
        begins: dict[Key, int] = {}
        passes = list_passes(instructions)
        number_of = {place: number for number, place in enumerate(passes)}
        for place, i in enumerate(instructions):
            match i:
                case ins.Forward(unit, m, keep) if keep != "nothing":
                    begins[unit, m] = place
                case ins.Backward(unit, m) | ins.BackwardInput(unit, m) if (unit, m) in begins:
                    begin = begins.pop((unit, m))
                    away = self._find_window(passes, number_of[begin], number_of[place])
                    evictions = tuple(self._list_evictions(unit, begin, place, away, choices))
                    yield KeptUnit((unit, m), begin, evictions)

    def _find_window(self, passes: Sequence[int], forward: int, backward: int) -> tuple[int, int] | None:
        """From where to where what was moved is away: it leaves during the next pass, and returns in one before."""
        back = backward - self.run.plan.reload_ahead
        return (passes[forward + 2], passes[back]) if back > forward + 2 else None

    def _list_evictions(
        self, unit: int, begin: int, end: int, away: tuple[int, int] | None, choices: tuple[Kept, ...]
    ) -> Iterator[Eviction]:
        size, took = self.sizes[unit], self.seconds.units[unit]
        can_recompute = self.run.plan.recomputed[unit]
        if can_recompute and "selective" in choices and size.kept_all > size.kept_selective:
            freed = size.kept_all - size.kept_selective
            yield Eviction(choice="selective", begin=begin, end=end, bytes=freed, seconds=took.again_s)
        if can_recompute and "input" in choices and size.kept_all > size.kept_input:
            freed, extra = size.kept_all - size.kept_input, self._count_extra(unit, size)
            yield Eviction(
                choice="input", begin=begin, end=end, bytes=freed, extra_bytes=extra, seconds=took.recompute_s
            )
        if self.place in choices and away is not None and (moved := self._count_moved(unit, size)) > 0:
            yield Eviction(
                choice=self.place, begin=away[0], end=away[1], bytes=moved, seconds=self._count_exposed_s(unit, moved)
            )

    def _count_extra(self, unit: int, size: UnitBytes) -> int:
        """How much more computing a unit again holds than its backward pass."""
        output = self.sizes[unit + 1].boundary if unit + 1 < len(self.sizes) else 0
        return max(0, size.forward_workspace + output - min(size.backward_workspace, size.input_workspace))

    def _count_moved(self, unit: int, size: UnitBytes) -> int:
        return size.kept_all - size.kept_input + sum(self.sizes[value].boundary for value in self.program.taken[unit])

    def _count_exposed_s(self, unit: int, moved: int) -> float:
        """The seconds of a unit's copies that its own passes do not hide."""
        took = self.seconds.units[unit]
        out_s, in_s = (self.prices.move_s(self.place, moved, is_out=is_out) for is_out in (True, False))
        return max(out_s - took.forward_s, 0.0) + max(in_s - self.run.plan.reload_ahead * took.backward_s, 0.0)


def count_bytes(rank: RankBytes) -> int:
    """A rank's bytes, with what stays free beside a prediction."""
    return rank.bytes + int(SHARE * rank.peak.bytes)


def count_choices(kept: KeptChoices) -> dict[Kept, int]:
    """How many units and microbatches have each choice."""
    counts: dict[Kept, int] = {}
    for choice in (choice for own in kept for choice in own):
        counts[choice] = counts.get(choice, 0) + 1
    return counts
