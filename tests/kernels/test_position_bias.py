"""Biases by distance, against what their papers say."""

from __future__ import annotations

import math

import pytest
import torch

from superstep.kernels.position_bias import ByDistance, alibi, t5, t5_buckets


def test_eight_heads_have_the_slopes_of_the_paper():
    assert alibi(8).slopes.tolist() == [2.0**-n for n in range(1, 9)]
    assert alibi(16).slopes.tolist() == pytest.approx([2 ** (-n / 2) for n in range(1, 17)])


def test_other_numbers_of_heads_have_those_of_the_papers_code():
    assert alibi(12).slopes.tolist() == pytest.approx(
        [2.0**-n for n in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]
    )


def test_a_score_falls_with_distance():
    bias = alibi(2).of(torch.tensor([[0, 1, 5]]))
    assert bias.tolist() == [[[0.0, -(2.0**-4), -5 * 2.0**-4]], [[0.0, -(2.0**-8), -5 * 2.0**-8]]]


def test_half_of_the_buckets_are_for_one_distance_each():
    """And the others for ever more, each by the same factor: 32 buckets, the last from 113 tokens on."""
    found = t5_buckets(32, 128).tolist()
    assert found[:16] == list(range(16))
    for bucket in range(16, 31):
        least = 16 * math.exp((bucket - 16) / 16 * math.log(128 / 16))
        assert found.index(bucket) == math.ceil(least - 1e-9), bucket
    assert found.index(31) == 113
    assert found[-1] == 31
    assert found == sorted(found)


def test_what_is_farther_is_as_far():
    table = torch.arange(16.0).view(2, 8)
    bias = t5(table, 20)
    assert isinstance(bias, ByDistance)
    far = bias.of(torch.tensor([[20, 21, 5000]]))
    assert far.tolist() == [[[7.0] * 3], [[15.0] * 3]]


def test_each_entry_of_a_table_is_asked_for_by_its_distances_alone():
    table = torch.zeros(1, 8, requires_grad=True)
    (gradient,) = torch.autograd.grad(t5(table, 20).table.sum(), table)
    assert gradient.squeeze().tolist() == t5_buckets(8, 20).bincount(minlength=8).tolist()
