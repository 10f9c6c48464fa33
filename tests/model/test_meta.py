"""Modules without values."""

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from superstep.model.meta import on_meta


class Seen(TorchDispatchMode):
    """The operations that pass by, by name."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Drawn(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.linear = nn.Linear(4, 3)
        self.own = nn.Parameter(torch.empty(2, 3).normal_(std=0.1))
        nn.init.xavier_normal_(self.linear.weight)
        nn.init.normal_(tensor=self.linear.bias)


def test_shapes_are_there_and_nothing_is_drawn():
    with on_meta(), Seen() as seen:
        module = Drawn()
    assert {tuple(p.shape) for p in module.parameters()} == {(5, 4), (3, 4), (3,), (2, 3)}
    assert all(p.is_meta for p in module.parameters())
    assert not [name for name in seen.names if "normal" in name]
    with torch.device("meta"), Seen() as seen:
        Drawn()
    assert [name for name in seen.names if "normal" in name], "torch draws them by itself"


def test_elsewhere_values_are_drawn():
    with on_meta():
        here = torch.empty(100, device="cpu").normal_()
    assert here.std() > 0.5
