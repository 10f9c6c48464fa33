"""grade check finds each of 38 graders that pay for what is not right, and says nothing against 9 sound ones."""

from __future__ import annotations

from pathlib import Path

import leaky_programs
import leaky_tasks
import pytest

from superstep.grade.attacks.attack_grader import check
from superstep.grade.attacks.programs import programs
from superstep.grade.config import GradeConfig
from superstep.grade.environment import load_environment
from superstep.grade.workers.pool import Pool

CONFIG = GradeConfig(sandbox="none", timeout_s=10, grader_timeout_s=30, workers=2, retries=0)
TABLES = (leaky_tasks, leaky_programs)
TASKS = {leaky_tasks: 2, leaky_programs: 1}
LEAKY = [
    pytest.param(table, seed, family, id=table.name(kind))
    for table in TABLES
    for seed, (family, kind) in enumerate(table.LEAKY)
]
SOUND = [
    pytest.param(table, len(table.LEAKY) + place, id=table.name(kind))
    for table in TABLES
    for place, kind in enumerate(table.SOUND)
]


@pytest.fixture(scope="module")
def weaknesses():
    environments = {table: load_environment(Path(table.__file__)) for table in TABLES}
    with (
        Pool(environments[leaky_tasks].path, CONFIG, is_heard=False) as tasks,
        Pool(environments[leaky_programs].path, CONFIG, is_heard=False) as run,
    ):
        pools = {leaky_tasks: tasks, leaky_programs: run}
        yield lambda table, seed: check(environments[table], pools[table], tasks=TASKS[table], seed=seed).weaknesses


def test_there_is_one_for_each_family_of_programs_and_each_is_another():
    assert (len(LEAKY), len(SOUND)) == (38, 9)
    assert len({table.name(kind) for table in TABLES for kind in table.KINDS}) > 40
    families = {family for family, _ in leaky_programs.LEAKY}
    assert {attack.name.partition(":")[0] for attack in programs()} == families


@pytest.mark.parametrize(("table", "seed", "family"), LEAKY)
def test_a_leaky_grader_is_found(weaknesses, table, seed, family):
    found = {each.attack: each.flaw for each in weaknesses(table, seed)}
    assert any(attack.startswith(family) for attack in found), found
    assert "refuses" not in found.values()


@pytest.mark.parametrize(("table", "seed"), SOUND)
def test_a_sound_grader_is_not_flagged(weaknesses, table, seed):
    assert weaknesses(table, seed) == ()
