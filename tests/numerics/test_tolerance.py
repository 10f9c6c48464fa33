"""The tolerances of fast mode follow from what was measured against exact mode."""

import json
from pathlib import Path

import pytest

from superstep.numerics.tolerance import ROUNDED, tolerance

FOUND = json.loads((Path(__file__).parents[2] / "bench" / "results" / "tolerance.json").read_text(encoding="utf-8"))
FACTORS = {
    "fp32": {"loss": 15, "gradient": 10, "gradient_later": 60, "update": 60},
    "bf16": {"loss": 100, "gradient": 5, "gradient_later": 5, "update": 3},
}
"""The most that a tolerance may be of what was measured."""


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("model", ["dense", "experts"])
def test_a_tolerance_is_what_was_measured_times_a_factor(dtype, model):
    rows = {row["distance"]: row for row in FOUND["distances"] if (row["dtype"], row["model"]) == (dtype, model)}
    allowed = tolerance(dtype, has_experts=model == "experts")
    for kind, most in FACTORS[dtype].items():
        together = rows["order"][kind] + rows["dtype"][kind]
        assert rows["prove"][kind] < getattr(allowed, kind) < most * together, (kind, rows)


@pytest.mark.parametrize("moments", ["8bit", "bf16"])
def test_so_is_what_moments_in_fewer_bits_may_differ_by(moments):
    path = Path(__file__).parents[2] / "bench" / "results" / "moments-tolerance.json"
    found = json.loads(path.read_text(encoding="utf-8"))["moments"][moments]
    assert found["moment"] < ROUNDED[moments] < 3 * found["moment"]
    allowed = tolerance("fp32", has_experts=False, moments=moments)
    for kind in ("loss", "gradient", "square", "update"):
        assert found[kind] < allowed.of(kind, is_first=False), kind
