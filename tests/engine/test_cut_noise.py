"""Which elements of a whole tensor of random numbers a rank holds: those that it has of any other tensor."""

import pytest
import torch

from superstep.engine.parallel.noise import CutNoise
from superstep.errors import ConfigError
from superstep.numerics.noise import HeldElements
from superstep.plan.mesh import Coordinate, MeshShape
from superstep.plan.sharding.sequence import positions

TOKENS = 16
CPU = torch.device("cpu")


def elements(held: HeldElements) -> torch.Tensor:
    return (held.firsts[:, None] + torch.arange(held.width)).flatten()


def cut(cp, tp, whole, cp_rank=0, tp_rank=0):
    at = Coordinate(pp=0, dp=0, cp=cp_rank, tp=tp_rank)
    return CutNoise({"drop": torch.Size(whole)}.get, MeshShape(cp=cp, tp=tp), at, TOKENS)


CASES = {
    "whole": (1, 2, (TOKENS, 6), (TOKENS, 6), None, None),
    "columns": (1, 2, (TOKENS, 6), (TOKENS, 3), None, 1),
    "heads": (1, 2, (TOKENS, 4, 3, 5), (TOKENS, 2, 3, 5), None, 1),
    "sequence": (1, 2, (TOKENS, 6), (TOKENS // 2, 6), "tp", None),
    "heads before the sequence": (1, 2, (4, TOKENS, TOKENS), (2, TOKENS, TOKENS), None, 0),
    "zigzag": (2, 1, (TOKENS, 6), (TOKENS // 2, 6), "cp", None),
    "zigzag and columns": (2, 2, (TOKENS, 6), (TOKENS // 2, 3), "cp", 1),
    "zigzag and as many columns": (2, 2, (TOKENS, TOKENS), (TOKENS // 2, TOKENS // 2), "cp", 1),
    "zigzag and sequence": (2, 2, (TOKENS, 6), (TOKENS // 4, 6), "cp tp", None),
}
"""cp, tp, the whole shape, the shape held, how the sequence is cut, the dim that tp cuts."""


@pytest.mark.parametrize("name", CASES)
def test_a_rank_holds_the_elements_of_its_part(name):
    cp, tp, whole, shape, sequence, dim = CASES[name]
    numbers = torch.arange(torch.Size(whole).numel()).view(whole)
    for c in range(cp):
        for t in range(tp):
            mine = numbers
            if sequence:
                ways = tp if "tp" in sequence else 1
                mine = mine[list(positions(TOKENS, cp=cp, rank=c, tp=ways, part=t if ways > 1 else 0))]
            if dim is not None:
                mine = mine.chunk(tp, dim)[t]
            held = cut(cp, tp, whole, c, t)("drop", torch.Size(shape), CPU)
            assert torch.equal(elements(held), mine.flatten()), (c, t)


def test_rows_are_as_long_as_can_be():
    assert len(cut(1, 2, (TOKENS, 6))("drop", torch.Size((TOKENS, 6)), CPU).firsts) == 1
    assert len(cut(1, 2, (TOKENS, 6))("drop", torch.Size((TOKENS // 2, 6)), CPU).firsts) == 1
    assert cut(1, 2, (4, TOKENS, 6))("drop", torch.Size((2, TOKENS, 6)), CPU).width == 2 * TOKENS * 6


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("drop", (TOKENS, 4), "'drop' draws for a tensor [B, 16, 4], one device for [B, 16, 6]"),
        ("drop", (TOKENS,), "'drop' draws for a tensor [B, 16], one device for [B, 16, 6]"),
        ("other", (TOKENS, 6), "'other' draws for a tensor [B, 16, 6], one device for none"),
    ],
)
def test_a_part_that_is_not_known_is_refused(name, shape, words):
    with pytest.raises(ConfigError) as caught:
        cut(1, 2, (TOKENS, 6))(name, torch.Size(shape), CPU)
    assert words in str(caught.value)
    assert "plan.cp cuts the sequence" in str(caught.value)
