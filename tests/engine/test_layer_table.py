"""Which implementation a layer gets: the first that computes it, then all that go round it, in their order."""

from __future__ import annotations

import torch
from torch import nn

from superstep.engine.layers.implementation import Implementation, install


def adds(name, kind, text, *, is_whole=False):
    """An implementation that appends its text to what the layer gave before."""
    return Implementation(
        name,
        "a test",
        lambda path, layer: isinstance(layer, kind),
        lambda p, layer, inner: lambda x: [*(inner(x) if name != "base" else []), text],
        is_whole,
    )


def test_the_first_that_applies_computes_and_all_others_go_round_it_in_their_order():
    module = nn.Sequential(nn.Linear(2, 2))
    computing = adds("base", nn.Linear, "first"), adds("base", nn.Linear, "second")
    around = adds("inner", nn.Linear, "inner"), adds("none", nn.Conv1d, "none"), adds("outer", nn.Linear, "outer")
    whole, linear = install(module, computing, around)
    assert module[0](torch.ones(1, 2)) == ["first", "inner", "outer"]
    assert [row.name for row in linear.chosen] == ["base", "inner", "outer"]
    assert (whole.path, whole.chosen, linear.path, linear.layer) == ("", (), "0", "Linear")


def test_layers_inside_one_that_is_computed_whole_get_none():
    module = nn.Sequential(nn.Linear(2, 2))
    computing = adds("base", nn.Sequential, "whole", is_whole=True), adds("base", nn.Linear, "linear")
    (only,) = install(module, computing)
    assert only.path == ""
    assert "forward" not in vars(module[0])
