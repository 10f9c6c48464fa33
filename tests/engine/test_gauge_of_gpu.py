"""How a GPU is timed: by a clock that goes on while the host waits for it, and no sooner."""

import pytest
import torch

from superstep.comm.device import Device
from superstep.engine.measure import probe_collectives
from superstep.engine.measure.probe_kernels import TimingOptions


class Late(Device):
    """A GPU as far as a gauge can tell, whose memory is the host's."""

    @property
    def torch(self):
        return torch.device("cpu")


def test_a_gpu_is_timed_over_several_calls_and_a_cpu_over_one():
    """A GPU's kernel of microseconds would drown in the wait for its end; a step does not wait after each either."""
    now = [0.0]

    class Waits(Late):
        def synchronize(self):
            now[0] += 50e-6

    def work():
        now[0] += 2e-6

    clock = {"clock": lambda: now[0], "budget_s": 0.0}
    assert TimingOptions(device=Waits("cuda", 0), **clock).seconds(work) < 5e-6
    assert TimingOptions(device=Waits("cpu"), **clock).seconds(work) == pytest.approx(52e-6)
    assert TimingOptions(device=Waits("cuda", 0), **clock).seconds(work, calls=2) < 2.5e-6


def test_a_collective_is_timed_without_the_compute_before_it(monkeypatch):
    """A GPU has only been told of that when the clock is read."""
    now, queued = [0.0], [0.0]

    class Waits(Late):
        def synchronize(self):
            now[0] += queued[0]
            queued[0] = 0.0

    class Two:
        def size(self):
            return 2

    def queue(seconds):
        queued[0] += seconds

    monkeypatch.setattr(probe_collectives.torch, "mm", lambda *args: queue(1.0))
    monkeypatch.setattr(probe_collectives, "barrier", lambda device, group: None)
    monkeypatch.setattr(probe_collectives, "gather", lambda value, form: [value])
    monkeypatch.setattr(
        probe_collectives, "_work", lambda name, buffer, group: lambda: queue(1e-3 + buffer.nbytes * 1e-9)
    )
    rate = probe_collectives._rate("all-reduce", Two(), TimingOptions(device=Waits("cuda", 0), clock=lambda: now[0]))
    assert (rate.latency_s, rate.bytes_per_s) == pytest.approx((1e-3, 1e9))
