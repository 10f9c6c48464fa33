"""What collectives take: bounds, rings, trees, and domains."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from superstep.cost.closed.model_numbers import array
from superstep.hardware.catalogue import chip
from superstep.hardware.collectives import (
    WIRINGS,
    Links,
    RankGroup,
    all_reduce_s,
    all_to_all_s,
    dispatch_s,
    gather_s,
    relay_s,
    send_s,
)
from superstep.hardware.network import usual_cluster

LINKS = Links(
    link_bytes_per_s=array(100e9),
    link_latency_s=array(0),
    domain=array(8),
    network_bytes_per_s=array(10e9),
    network_latency_s=array(0),
    send_share=array(0.5),
)
SIZE = array(8e9)
GROUPS = st.builds(
    lambda ranks, stride: RankGroup(array(2.0**ranks), array(2.0**stride)), st.integers(0, 8), st.integers(0, 5)
)


def group(ranks: int, stride: int = 1) -> RankGroup:
    return RankGroup(array(ranks), array(stride))


def test_a_ring_in_a_domain_brings_each_rank_all_but_its_own_part():
    assert gather_s(SIZE, group(8), LINKS) == pytest.approx(8e9 * 7 / 8 / 100e9)
    assert gather_s(SIZE, group(1), LINKS) == 0


@pytest.mark.parametrize(("stride", "ports"), [(1, 8), (2, 4), (8, 1), (16, 1)])
def test_between_domains_a_ring_has_as_many_ports_as_ranks_in_one(stride, ports):
    ranks = 64
    rate = min(10e9 * ports, 100e9 if ports > 1 else np.inf)
    assert gather_s(SIZE, group(ranks, stride), LINKS) == pytest.approx(8e9 * 63 / 64 / rate)


@pytest.mark.parametrize(("ranks", "stride", "rate"), [(8, 1, 100e9), (64, 1, 10e9), (16, 4, 10e9), (2, 4, 100e9)])
def test_a_relay_beyond_a_domain_goes_through_one_port(ranks, stride, rate):
    assert relay_s(SIZE, group(ranks, stride), LINKS) == pytest.approx(8e9 * (ranks - 1) / ranks / rate, rel=1e-3)
    assert relay_s(SIZE, group(1), LINKS) == 0


def test_a_domain_that_the_group_does_not_fill_is_not_left_by_it():
    assert gather_s(SIZE, group(4, 2), LINKS) == pytest.approx(8e9 * 3 / 4 / 100e9)
    assert gather_s(SIZE, group(4, 4), LINKS) > 8e9 * 3 / 4 / 100e9


@given(GROUPS)
def test_an_all_reduce_is_two_gathers_and_over_many_domains_no_more(pair):
    slow = Links(
        link_bytes_per_s=array(100e9),
        link_latency_s=array(1e-6),
        domain=array(8),
        network_bytes_per_s=array(10e9),
        network_latency_s=array(1e-5),
        send_share=array(1),
    )
    twice, once = 2 * gather_s(SIZE, pair, slow), all_reduce_s(SIZE, pair, slow)
    assert once <= twice
    if np.ceil(pair.ranks / pair.local(slow.domain)) <= 2:
        assert once == pytest.approx(twice)


@given(GROUPS, st.integers(1, 16))
def test_going_once_to_a_domain_sends_no_more_than_going_to_each_expert(pair, copies):
    tokens = array(1e9)
    plain = all_to_all_s(tokens * copies, pair, LINKS)
    assert dispatch_s(tokens, array(copies), pair, LINKS) <= plain * (1 + 1e-9)


@given(st.integers(1, 8))
def test_a_token_with_one_expert_goes_once_either_way(ranks):
    pair = group(2**ranks)
    assert dispatch_s(SIZE, array(1), pair, LINKS) == pytest.approx(all_to_all_s(SIZE, pair, LINKS))


def test_a_transfer_takes_the_fast_links_within_the_domain_only():
    assert send_s(SIZE, array(7), LINKS) == pytest.approx(8e9 / 50e9)
    assert send_s(SIZE, array(8), LINKS) == pytest.approx(8e9 / 5e9)


def test_one_call_prices_many_groups_as_many_calls_do():
    ranks, strides = array([1, 2, 8, 64, 512]), array([1, 8, 1, 4, 8])
    together = gather_s(SIZE, RankGroup(ranks, strides), LINKS)
    assert together == pytest.approx(
        [gather_s(SIZE, RankGroup(r, s), LINKS) for r, s in zip(ranks, strides, strict=True)]
    )


def test_a_ring_steps_through_every_rank_and_a_tree_through_the_chains():
    late = replace(LINKS, link_latency_s=array(1e-6), network_latency_s=array(1e-5))
    nothing = array(0)
    # 64 ranks in 8 domains: 7 steps between domains, 56 inside of them.
    assert gather_s(nothing, group(64), late) == pytest.approx(7e-5 + 56e-6)
    # 1,024 in 128: a tree has 7 levels, and goes up and down a chain of 8.
    assert all_reduce_s(nothing, group(1024), late) == pytest.approx(2 * (2 * 7e-5 + 7e-6))


def test_without_a_switch_a_small_group_has_some_of_a_chips_links():
    mesh, cube = (replace(LINKS, wiring=array(WIRINGS.index(name))) for name in ("mesh", "cube"))
    for ranks, of_mesh, of_cube in ((2, 1 / 7, 1 / 3), (4, 3 / 7, 2 / 3), (8, 1, 1)):
        usual = gather_s(SIZE, group(ranks), LINKS)
        assert usual / gather_s(SIZE, group(ranks), mesh) == pytest.approx(of_mesh)
        assert usual / gather_s(SIZE, group(ranks), cube) == pytest.approx(of_cube)
    assert usual_cluster(chip("V100"), 8).topology == "cube"
    assert usual_cluster(chip("MI300X"), 8).topology == "mesh"
