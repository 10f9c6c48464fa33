"""The groups that are counted are those that are made, and a GPU's plan is held against memory with room for them."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

import small
from plans import examples, plan_of, plans
from superstep.comm.device import Device
from superstep.comm.mesh import build_mesh
from superstep.cost.closed.memory import COMMUNICATOR_BYTES
from superstep.cost.program.memory.communicators import (
    MANY_BYTES,
    PAIR_BYTES,
    PEER_BYTES,
    communicator_bytes,
    rank_groups,
)
from superstep.cost.program.memory.memory_fit import by_category, memory_of, with_communicators
from superstep.errors import ConfigError
from superstep.plan.resolution.resolve import resolve
from superstep.run.memory_check import require_fit
from superstep.train.weights.model import operations

GPU = Device("cuda", 0)


class Counting:
    """NCCL's part of a transport for one rank, which keeps the groups that it is a member of."""

    has_channels = True
    shared = object()  # so that the group of all ranks is made like the others

    def __init__(self, rank):
        self.rank = rank
        self.made = []

    def group(self, ranks, **_):
        if self.rank not in ranks:
            return None
        self.made.append(tuple(ranks))
        return self.made[-1]

    def connect(self, group, device):
        pass

    def connect_channel(self, group, device, *, source):
        pass


@examples(60)
@given(plans(), st.integers(0, 10_000))
def test_each_rank_has_the_groups_that_are_counted(plan, number):
    rank = number % plan.mesh.world
    transport = Counting(rank)
    build_mesh(plan, rank, GPU, timeout=timedelta(seconds=1), transport=transport)
    assert sorted(len(group) for group in rank_groups(plan) if rank in group) == sorted(map(len, transport.made))
    # The closed form knows no plan when it says what a chip has left: it leaves room for no more than these.
    assert all(each >= COMMUNICATOR_BYTES * (plan.mesh.world > 1) for each in communicator_bytes(plan))


def test_bytes_are_those_of_groups_and_of_ranks_that_are_exchanged_with():
    def bytes_of(**layout):
        return communicator_bytes(plan_of(**layout))

    assert bytes_of() == (0,)
    assert bytes_of(dp=2) == (3 * PAIR_BYTES,), "all ranks, parameters, gradients"
    assert bytes_of(dp=4, zero=1) == (3 * MANY_BYTES,)
    # Three stages: all ranks, and two channels to each neighbour.
    assert bytes_of(pp=3) == tuple(MANY_BYTES + 2 * count * PAIR_BYTES for count in (1, 2, 1))
    ring, ulysses = (bytes_of(cp=4, context=context)[0] for context in ("ring", "ulysses"))
    assert ulysses - ring == 2 * PEER_BYTES
    (experts,) = bytes_of(dp=16, ep=16, experts=16)
    assert experts == 4 * MANY_BYTES + 7 * PEER_BYTES, "the same, and those with other experts"


def test_a_gpus_plan_is_refused_where_its_communicators_have_no_room():
    run = resolve(small.config(dp=2, layers=2, microbatch=4))
    (alone,) = memory_of(run)
    (rank,) = with_communicators([alone], run.plan)
    assert by_category(rank) == {"communicators": 3 * PAIR_BYTES} | by_category(alone)
    assert rank.bytes == alone.bytes + 3 * PAIR_BYTES == sum(by_category(rank).values())
    seen = operations(run)
    require_fit(run, GPU, seen, limit_bytes=rank.bytes)
    with pytest.raises(ConfigError, match=r"needs 1\.\d+ GiB \(communicators 1\.\d+ GiB, parameters .* do not fit"):
        require_fit(run, GPU, seen, limit_bytes=rank.bytes - 1)
    require_fit(run, Device("cpu"), seen, limit_bytes=alone.bytes)
