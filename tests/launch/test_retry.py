"""How often a run is started again, on one host or on several."""

from superstep.launch.retry import MOST_TRIES, next_try


def _starts(states):
    """The numbers of the starts that follow losses, each from one of these states, until the run ends."""
    tries, before, numbers = 0, None, []
    for state in states:
        following = next_try(tries, is_same_state=state == before)
        if following is None:
            return numbers
        tries, before = following, state
        numbers.append(tries)
    return numbers


def test_starts_from_one_state_are_counted_and_come_to_an_end():
    assert _starts([7] * 9) == list(range(1, MOST_TRIES + 1))


def test_a_run_that_gets_further_is_counted_anew():
    assert _starts([3, 3, 4, 4, 9]) == [1, 2, 1, 2, 1]
    assert _starts(range(20)) == [1] * 20
