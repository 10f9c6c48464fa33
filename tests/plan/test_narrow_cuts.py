"""Moments in blocks, and matrices of several parts that tp cuts each on its own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from superstep.errors import ConfigError
from superstep.plan.config import PlanConfig, RunConfig, TrainConfig
from superstep.plan.model.attention_rule import DeltaShape
from superstep.plan.model.axes import outline_of
from superstep.plan.model.outline import Outline, Parameter, Unit
from superstep.plan.narrow import check_narrow
from superstep.plan.resolution.resolve import resolve
from superstep.plan.rules import DEFAULT


def check(sections, columns, tp):
    rows = sum(sections)
    fused = Parameter(
        name="qkv.weight", axes=("heads", "embed"), dims=(rows, columns), layer="linear", sections=sections
    )
    config = RunConfig(train=TrainConfig(moments="8bit"), plan=PlanConfig(tp=tp))
    check_narrow(config, Outline((Unit("block", (fused,)),)), DEFAULT)


def test_each_part_must_be_cut_between_blocks():
    check((512, 512, 1024), 2, tp=4)
    with pytest.raises(ConfigError, match=r"tp = 4: qkv.weight \[2048, 2\] .* plan.tp to one of \[1, 2\]"):
        check((256, 768, 1024), 2, tp=4)


def test_the_whole_may_split_where_a_part_does_not():
    """The whole of 4,096 elements halves into 8 blocks each, and the first part's 1,280 into two and a half."""
    check((2048,), 2, tp=2)
    with pytest.raises(ConfigError, match=r"set plan\.tp to 1, or train"):
        check((640, 640, 768), 2, tp=2)


def test_queries_keys_and_values_of_linear_attention_are_parts():
    shape = replace(
        resolve(RunConfig(plan=PlanConfig(dp=1))).shape,
        delta=DeltaShape(key_heads=2, value_heads=4, key_dim=16, value_dim=16),
    )
    outline = outline_of(shape)
    found = {p.name: p.sections for unit in outline.units for p in unit.parameters if p.sections}
    assert set(found.values()) == {(32, 32, 64)}


def test_a_padded_dim_may_be_cut_anywhere_between_rows_of_whole_blocks():
    check((300,), 256, tp=8)
