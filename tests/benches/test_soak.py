"""Minutes of faults, and minutes without any on a loaded machine: three with every change, twenty now and then."""

import pytest

from bench.soak import SMALL, calm, soak, tokens

pytestmark = pytest.mark.multiproc

MINUTES = [pytest.param(3, marks=pytest.mark.long), pytest.param(20, marks=pytest.mark.slow)]


@pytest.mark.parametrize("minutes", MINUTES)
def test_whatever_happens_the_bits_stay_and_nothing_is_left(short_folder, minutes):
    config, corpus = tokens(SMALL, short_folder)
    found = soak(config, corpus, short_folder, seconds=60 * minutes, seed=1)
    assert found["differs"] == ""
    assert found["left"] == []
    kinds = {kind: each for kind, each in found.items() if isinstance(each, dict)}
    assert len(kinds) == 6
    assert [each["wrong"] for each in kinds.values()] == [[]] * 6
    assert sum(each["times"] for each in kinds.values()) > 2 * minutes


@pytest.mark.slow
def test_a_loaded_machine_is_no_fault(short_folder):
    config, corpus = tokens(SMALL, short_folder)
    found = calm(config, corpus, short_folder, seconds=60 * 20)
    assert found["alarms"] == []
    assert found["left"] == []
    assert found["steps"] > 100
