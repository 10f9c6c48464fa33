"""Faults that ranks can have with pictures in text, planted: the proof of a layout names each."""

from dataclasses import replace
from pathlib import Path

import pytest

from picture_samples import write_pictures
from plant_encoders import open_case, prove_each
from superstep.train.weights.model import resolve_config

pytestmark = pytest.mark.multiproc

SAYS = {
    "skip_encoder": "rank 1: unit 'embed': token 0 of row 0 has no row of its encoder, and its own is row 0",
    "place_one_off": "rank 1: unit 'embed': token 0 of row 0 has row 11 of its encoder, and its own is row 0",
    "mix_pictures": "gradients differ most in unit '",
    "lay_one_off": "rank 1: row 4 of the batch: 'pixels' is of another sample",
}


@pytest.fixture(scope="module", params=[{}, {"dp": 1, "zero": 0, "cp": 2}], ids=["dp", "cp"])
def case(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    write_pictures(folder, deepstack=(0,))
    with open_case(folder, "pictures.py", request.param) as case:
        yield case


def test_each_planted_fault_is_named(pool, case):
    kind = "shared rows" if case.run.plan.mesh.cp > 1 else "pictures"
    found = pool.run(2, prove_each, kind, case, Path.cwd(), timeout_s=240)[0]
    assert found.pop("none")[0]
    for name, (is_proven, said) in found.items():
        assert not is_proven
        assert SAYS.get(name, "gradient") in said, name


@pytest.mark.parametrize("case", [{}], indirect=True, ids=["dp"])
@pytest.mark.parametrize("encoder", ["spread", "bubbles"])
def test_a_fault_in_the_share_of_a_rank_is_named(pool, case, encoder):
    plan = replace(case.run.config.plan, pp=2, dp=1, zero=0, encoder=encoder)
    shared = replace(case, run=resolve_config(replace(case.run.config, plan=plan)))
    found = pool.run(2, prove_each, "shares of pictures", shared, Path.cwd(), timeout_s=240)[0]
    assert [is_proven for is_proven, _ in found.values()] == [True, False, False]
    assert "gradients differ most in unit 'vision." in found["skip_share"][1]
    assert "gradients differ most in unit '" in found["move_rows"][1]
