"""A process is asked to stop once, and told to the second time."""

import os
import signal

import pytest

from superstep.launch.stop_request import AGAIN_S, STOPPED, StopRequest, listening


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_a_request_is_kept_and_what_follows_at_once_is_the_same_one(clock):
    stop = StopRequest(clock)
    assert not stop.is_requested
    assert not stop.ask()
    clock.now += 0.9 * AGAIN_S
    assert not stop.ask(), "passed on by a launcher"
    assert stop.is_requested
    clock.now += 0.2 * AGAIN_S
    assert stop.ask()


def test_sigterm_asks_and_a_later_one_ends(clock):
    before = signal.getsignal(signal.SIGTERM)
    stop, passed = StopRequest(clock), []
    with listening(stop, lambda: passed.append(1)):
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.is_requested
        assert passed == [1]
        clock.now += AGAIN_S
        with pytest.raises(SystemExit) as end:
            os.kill(os.getpid(), signal.SIGTERM)
        assert end.value.code == STOPPED == 143
    assert signal.getsignal(signal.SIGTERM) is before
