"""grade check finds each of 24 graders that pay for what is not right, and says nothing against 6 sound ones."""

from __future__ import annotations

from pathlib import Path

import leaky_tasks
import pytest

from superstep.grade.attacks.attack_grader import check
from superstep.grade.config import GradeConfig
from superstep.grade.environment import load_environment
from superstep.grade.pool import Pool

SOURCE = Path(leaky_tasks.__file__)
CONFIG = GradeConfig(sandbox="none", timeout_s=10, grader_timeout_s=30, workers=2, retries=0)
LEAKY = [pytest.param(seed, family, id=leaky_tasks.name(kind)) for seed, (family, kind) in enumerate(leaky_tasks.LEAKY)]
SOUND = [pytest.param(len(LEAKY) + place, id=leaky_tasks.name(kind)) for place, kind in enumerate(leaky_tasks.SOUND)]


@pytest.fixture(scope="module")
def weaknesses():
    environment = load_environment(SOURCE)
    with Pool(SOURCE, CONFIG, is_heard=False) as pool:
        yield lambda seed: check(environment, pool, tasks=2, seed=seed).weaknesses


def test_there_are_24_leaky_graders_and_6_sound_ones():
    assert (len(LEAKY), len(SOUND)) == (24, 6)
    assert len({leaky_tasks.name(kind) for kind in leaky_tasks.KINDS}) == 30


@pytest.mark.parametrize(("seed", "family"), LEAKY)
def test_a_leaky_grader_is_found(weaknesses, seed, family):
    found = {each.attack: each.flaw for each in weaknesses(seed)}
    assert any(attack.startswith(family) for attack in found), found
    assert "refuses" not in found.values()


@pytest.mark.parametrize("seed", SOUND)
def test_a_sound_grader_is_not_flagged(weaknesses, seed):
    assert weaknesses(seed) == ()
