"""Twenty minutes of faults, and twenty without any on a loaded machine."""

import pytest

from bench.soak import SMALL, calm, soak, tokens

pytestmark = [pytest.mark.slow, pytest.mark.multiproc]

MINUTES = 20


def test_whatever_happens_for_twenty_minutes_the_bits_stay_and_nothing_is_left(short_folder):
    config, corpus = tokens(SMALL, short_folder)
    found = soak(config, corpus, short_folder, seconds=60 * MINUTES, seed=1)
    assert found["differs"] == ""
    assert found["left"] == []
    kinds = {kind: each for kind, each in found.items() if isinstance(each, dict)}
    assert len(kinds) == 6
    assert [each["wrong"] for each in kinds.values()] == [[]] * 6
    assert sum(each["times"] for each in kinds.values()) > 2 * MINUTES


def test_a_loaded_machine_is_no_fault(short_folder):
    config, corpus = tokens(SMALL, short_folder)
    found = calm(config, corpus, short_folder, seconds=60 * MINUTES)
    assert found["alarms"] == []
    assert found["left"] == []
    assert found["steps"] > 100
