"""Choices of what units keep within a budget: their memory, their cost beside the optimum, and their text."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest

import small
from bench.kept_optimum import find_optimum
from superstep.cost.program.budget.choose_kept import _Search, apply_kept, choose_kept, count_choices
from superstep.cost.program.budget.evict import Eviction, KeptUnit, evict
from superstep.cost.program.memory.memory import rank_bytes
from superstep.cost.program.time.op_prices import MachineRates
from superstep.cost.program.time.predict import durations, price_operations
from superstep.cost.program.time.simulate import simulate
from superstep.errors import ConfigError
from superstep.plan.config import Schedule
from superstep.plan.config_io import parse_config, write_config
from superstep.plan.resolution.resolve import resolve
from superstep.program import instructions as ins
from superstep.program.compile import compile_step
from superstep.run.reports.plan_line import plan_text
from superstep.train.weights import fit_budget as fit_module
from superstep.train.weights import model as model_module
from superstep.train.weights.model import resolve_config

MACHINE = MachineRates(gemm_flops_per_s=5e10, memory_bytes_per_s=1e10, link_bytes_per_s=2e9, link_latency_s=2e-5)
LAYOUTS = [
    {"microbatch": 1},
    {"microbatch": 1, "schedule": "gpipe"},
    {"microbatch": 1, "schedule": "zb-h1", "pp": 2},
    {"microbatch": 1, "schedule": "interleaved", "pp": 2, "chunks": 2},
    {"microbatch": 1, "schedule": "breadth-first", "pp": 2, "chunks": 2},
    {"microbatch": 1, "schedule": "zb-v", "pp": 2, "chunks": 2},
    {"microbatch": 1, "schedule": "1f1b", "pp": 4},
    {"microbatch": 1, "dp": 2, "zero": 3},
    {"microbatch": 1, "tp": 2, "pp": 2, "schedule": "1f1b"},
]


def run_of(memory, layers=8, **layout):
    config = small.config(layers=layers, recompute="auto", memory=memory, **layout)
    return resolve(replace(config, model=replace(config.model, width=64, head_dim=8, ffn=256)))


def size_of(run):
    return max(rank.bytes for rank in rank_bytes(run, compile_step(run.plan)))


def budgets_of(layout, count=4):
    """Bytes between the least and all kept."""
    most = size_of(run_of("1GiB", **layout))
    least = choose_kept(*priced(run_of("1KiB", **layout))).least.bytes
    return [int(least + (most - least) * number / count) + 1 for number in range(count)]


def priced(run, **rates):
    return run, price_operations(run, replace(MACHINE, **rates))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_choices_stay_within_each_budget_and_are_as_quick_as_the_same_for_all(layout):
    all_again_s = None
    for budget in budgets_of(layout):
        run = run_of(f"{budget}B", **layout)
        result = choose_kept(*priced(run))
        made = apply_kept(run, result.best.kept)
        assert size_of(made) <= budget
        assert result.best.bytes <= budget
        program = compile_step(made.plan)
        assert simulate(program, durations(made, program, MACHINE)).step_s == pytest.approx(result.best.step_s)
        all_again_s = next(plan.step_s for plan in (*result.others, result.best) if plan.name == "input of all")
        assert result.best.step_s <= all_again_s
    assert all_again_s is not None


def test_every_schedule_has_a_layout():
    assert {layout.get("schedule", "1f1b") for layout in LAYOUTS} == set(get_args(Schedule))


def test_what_fits_is_all_kept_and_a_quick_disk_is_used_before_computing_again():
    kept = choose_kept(*priced(run_of("1GiB", microbatch=1, activations=("disk",)))).best.kept
    assert set(count_choices(kept)) == {"all"}
    layout = {"microbatch": 1, "schedule": "gpipe", "activations": ("disk",)}
    budget = budgets_of(layout)[1]
    quick = choose_kept(*priced(run_of(f"{budget}B", **layout), disk_bytes_per_s=1e12)).best
    slow = choose_kept(*priced(run_of(f"{budget}B", **layout), disk_bytes_per_s=1e5)).best
    assert "disk" in count_choices(quick.kept)
    assert "input" not in count_choices(quick.kept)
    assert "disk" not in count_choices(slow.kept)
    assert quick.step_s < slow.step_s


def test_microbatches_of_a_unit_differ_and_so_do_their_instructions():
    layout = {"microbatch": 1, "schedule": "gpipe"}
    run = run_of(f"{budgets_of(layout)[2]}B", **layout)
    made = apply_kept(run, choose_kept(*priced(run)).best.kept)
    assert any(len(set(own)) > 1 for own in made.plan.kept)
    counts = count_choices(made.plan.kept)
    assert f"keeps ({', '.join(f'{choice} {count}' for choice, count in counts.items())})" in plan_text(made)
    assert sum(counts.values()) == 10 * 8
    again = {(i.unit, i.microbatch) for i in compile_step(made.plan).ranks[0] if isinstance(i, ins.Recompute)}
    chosen = {(u, m) for u, own in enumerate(made.plan.kept) for m, choice in enumerate(own) if choice == "input"}
    assert again == chosen


def find_ratios(layout):
    """For each rank and several limits: seconds of evictions over those of the optimum, alone and with the step's."""
    search = _Search(*priced(run_of("1GiB", **layout)))
    step_s = max(float(clock_s.max()) for clock_s in search.clocks_s)
    for rank in range(search.program.pp):
        levels, kept = search.levels[rank], list(search._list_kept(rank, ("selective", "input")))
        least = levels.copy()
        for unit in kept:
            for e in sorted(unit.evictions, key=lambda e: e.bytes)[-1:]:
                least[e.begin : e.end] -= e.bytes
                least[e.end] += e.extra_bytes
        for share in (0.8, 0.5, 0.2):
            limit = least.max() + share * (levels.max() - least.max())
            chosen = evict(levels, search.clocks_s[rank], kept, limit)
            optimum = find_optimum(levels, kept, limit)
            assert (chosen is None) == (optimum is None)
            if chosen:
                seconds = sum(e.seconds for e in chosen.values())
                assert seconds >= optimum * (1 - 1e-6)
                yield seconds / optimum, (step_s + seconds) / (step_s + optimum)


def test_evictions_cost_at_most_5_percent_more_than_the_optimum():
    """With the rest of the step in each of them; what is computed again alone, in nine of ten."""
    ratios = [both for layout in LAYOUTS for both in find_ratios(layout)]
    assert len(ratios) > 20
    assert max(whole for _, whole in ratios) <= 1.05
    assert sum(alone > 1.05 for alone, _ in ratios) <= len(ratios) / 10


def test_an_eviction_that_adds_more_than_it_frees_is_not_chosen():
    levels, clock_s = np.array([4.0, 9.0, 4.0, 4.0]), np.arange(4.0)
    worse = Eviction(choice="input", begin=1, end=3, bytes=5, extra_bytes=9, seconds=1.0)
    better = Eviction(choice="selective", begin=1, end=3, bytes=5, seconds=3.0)
    assert evict(levels, clock_s, [KeptUnit((0, 0), 0, (worse,))], 6.0) is None
    chosen = evict(levels, clock_s, [KeptUnit((0, 0), 0, (better,))], 6.0)
    assert chosen == {(0, 0): better}
    assert evict(levels, clock_s, [KeptUnit((0, 0), 0, (better,))], 3.0) is None


def small_config(memory, **plan):
    return small.config(**{"layers": 8, "recompute": "auto", "memory": memory, "microbatch": 1} | plan)


def test_choices_travel_as_text_and_are_not_made_again(monkeypatch):
    """Ranks of torchrun and other hosts receive the configuration: all have the same program."""
    most = size_of(resolve_config(small.config(layers=8, microbatch=1, schedule="gpipe")))
    run = resolve_config(small_config(f"{int(0.8 * most)}B", schedule="gpipe"))
    assert run.plan.kept
    monkeypatch.setattr(fit_module, "choose_kept", lambda *_: pytest.fail("the choices are made"))
    again = resolve_config(parse_config(write_config(run.config)))
    assert again.plan == run.plan
    assert compile_step(again.plan) == compile_step(run.plan)


@pytest.mark.parametrize("plan", [{}, {"schedule": "gpipe"}, {"pp": 2, "schedule": "zb-h1"}], ids=str)
def test_a_budget_below_the_least_is_refused_and_the_named_one_fits(plan):
    with pytest.raises(
        ConfigError, match=r"plan.memory = '1KiB' is less than any choice takes: the least is"
    ) as caught:
        resolve_config(small_config("1KiB", **plan))
    assert "\n" not in str(caught.value)
    named = str(caught.value).split("set plan.memory to '")[1].split("'")[0]
    assert resolve_config(small_config(named, **plan)).plan.kept


def test_the_least_is_named_with_the_plan_that_reaches_it():
    with pytest.raises(ConfigError, match=r"with plan.recompute = 'full'") as caught:
        resolve_config(small_config("1KiB", schedule="gpipe"))
    least = str(caught.value).split("the least is ")[1].split(",")[0]
    full = resolve_config(small.config(layers=8, recompute="full", microbatch=1, schedule="gpipe"))
    assert size_of(full) <= float(least.split()[0]) * {"KiB": 2**10, "MiB": 2**20}[least.split()[1]] * 1.01


def test_a_budget_limits_every_policy_and_choices_by_hand():
    most = size_of(resolve_config(small.config(layers=8, microbatch=1)))
    small_budget = f"{most - 1}B"
    with pytest.raises(ConfigError, match=r"is less than the .* plan.recompute = 'none'; set plan.memory to .*'auto'"):
        resolve_config(small_config(small_budget, recompute="none"))
    with pytest.raises(ConfigError, match=r"is less than the .* or leave plan.kept out"):
        resolve_config(small_config(small_budget, kept=("all",) * 10))
    assert resolve_config(small_config(f"{most}B", recompute="none")).plan.kept == ()


def test_units_that_cannot_be_traced_have_no_budget(monkeypatch):
    run = resolve_config(small.config(layers=2, microbatch=1))
    monkeypatch.setattr(model_module, "_resolve_model", lambda *_: replace(run, decoder=None))
    monkeypatch.setattr(model_module, "operations", lambda _: None)
    with pytest.raises(ConfigError, match=r"cannot be traced, .* leave plan.memory out"):
        resolve_config(small_config("1GiB"))
