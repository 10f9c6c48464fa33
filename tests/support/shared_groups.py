"""Groups of ranks that share memory."""

from datetime import timedelta

from superstep.runtime.device import Device
from superstep.runtime.transport import reach

CPU = Device("cpu")


def group_of(rank, world, *, seconds=30.0):
    """Shared memory of all ranks."""
    there = reach(rank, world, CPU)
    assert there.shared is not None, there.why
    return there.group(range(world), device=CPU, timeout=timedelta(seconds=seconds))
