import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from superstep.train.lr_schedule import learning_rate

COSINE = {"lr": 3e-3, "warmup_steps": 30, "decay": "cosine", "decay_steps": None, "min_lr_ratio": 0.1}


@st.composite
def schedules(draw):
    steps = draw(st.integers(1, 300))
    return {
        "steps": steps,
        "lr": draw(st.floats(1e-6, 1.0)),
        "warmup_steps": draw(st.integers(0, steps)),
        "decay": draw(st.sampled_from(["cosine", "wsd"])),
        "decay_steps": draw(st.none() | st.integers(1, 400)),
        "min_lr_ratio": draw(st.floats(0.0, 1.0)),
    }


def rates(s):
    return [learning_rate(step, **s) for step in range(s["steps"])]


@given(schedules())
def test_it_rises_through_the_warm_up_and_never_again(s):
    course = rates(s)
    peak = max(0, s["warmup_steps"] - 1)
    assert all(early < late for early, late in pairwise(course[: peak + 1]))
    assert all(early >= late * (1 - 1e-12) for early, late in pairwise(course[peak:]))


@given(schedules())
def test_it_stays_between_zero_and_lr_and_below_the_floor_only_in_the_warm_up(s):
    course = rates(s)
    assert all(0 <= rate <= s["lr"] * (1 + 1e-12) for rate in course)
    floor = s["min_lr_ratio"] * s["lr"]
    assert all(rate >= floor * (1 - 1e-12) for rate in course[s["warmup_steps"] :])


@given(schedules())
def test_the_warm_up_begins_above_zero_and_ends_at_lr(s):
    warmup = s["warmup_steps"]
    if warmup:
        assert learning_rate(0, **s) == pytest.approx(s["lr"] / warmup)
        assert learning_rate(warmup - 1, **s) == s["lr"]


@given(schedules())
def test_the_last_step_and_those_past_it_have_the_floor(s):
    if s["warmup_steps"] < s["steps"]:
        floor = pytest.approx(s["min_lr_ratio"] * s["lr"], rel=1e-9, abs=1e-15)
        assert learning_rate(s["steps"] - 1, **s) == floor
        assert learning_rate(s["steps"] + 100, **s) == floor


@given(schedules())
def test_wsd_stays_at_lr_until_its_fall_and_then_falls_by_equal_amounts(s):
    s |= {"decay": "wsd"}
    wanted = max(1, s["steps"] // 5) if s["decay_steps"] is None else s["decay_steps"]
    fall_steps = min(wanted, s["steps"] - s["warmup_steps"])
    course = rates(s)
    assert course[s["warmup_steps"] : s["steps"] - fall_steps] == pytest.approx(
        [s["lr"]] * (s["steps"] - fall_steps - s["warmup_steps"])
    )
    fall = [s["lr"], *course[s["steps"] - fall_steps :]]
    drop = s["lr"] * (1 - s["min_lr_ratio"]) / max(1, fall_steps)
    for above, below in pairwise(fall):
        assert above - below == pytest.approx(drop, rel=1e-6, abs=1e-12)


def test_halfway_down_the_cosine_is_halfway_to_the_floor():
    halfway = 30 + (600 - 30) // 2 - 1
    assert learning_rate(halfway, steps=600, **COSINE) == pytest.approx(3e-3 * (1 + 0.1) / 2)


def test_the_cosine_is_that_of_the_paper():
    """Loshchilov 2017, equation 5, with the position counted from the peak."""
    for step in range(30, 600):
        position = (step - 29) / 570
        expected = 3e-4 + 0.5 * (3e-3 - 3e-4) * (1 + math.cos(math.pi * position))
        assert learning_rate(step, steps=600, **COSINE) == pytest.approx(expected)
