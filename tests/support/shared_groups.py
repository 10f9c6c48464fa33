"""Groups of ranks that share memory: all of one host, or of several that are made up."""

import contextlib
from dataclasses import replace
from datetime import timedelta
from unittest import mock

from superstep.comm.backend import reach
from superstep.comm.device import Device
from superstep.comm.shared_memory import region

CPU = Device("cpu")


def group_of(rank, world, *, seats=None, seconds=30.0):
    """Shared memory of all ranks; or of so many as a host has seats, and what is between hosts."""
    with hosts_of(rank, seats) if seats else contextlib.nullcontext():
        there = reach(rank, world, CPU)
    assert there.shared is not None, there.why
    return there.group(range(world), device=CPU, timeout=timedelta(seconds=seconds))


def hosts_of(rank, seats):
    """As if every so many ranks were a host of their own."""
    inner = region._offer

    def offer():
        found = inner()
        return replace(found, host=f"host {rank // seats}")

    return mock.patch.object(region, "_offer", offer)
