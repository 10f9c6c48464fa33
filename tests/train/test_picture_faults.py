"""Faults that ranks can have with pictures in text, planted: the proof of a layout names each."""

import os
from contextlib import chdir, nullcontext
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from picture_samples import write_pictures
from superstep.comm.device import Device
from superstep.data.samples import ragged_rows, sample_stream
from superstep.engine.parallel import whole_rows
from superstep.engine.values import microbatch
from superstep.launch.ranks import World
from superstep.model.multimodal import place_rows as place_rows_module
from superstep.model.multimodal import vision
from superstep.plan.config_io import read_config
from superstep.train.proof.proof_inputs import Cases, prove_case
from superstep.train.weights.model import resolve_config

pytestmark = pytest.mark.multiproc


def skip_encoder():
    """The rows of the encoder are left out."""
    return mock.patch.object(place_rows_module, "place_rows", lambda x, rows, *others: x + 0 * rows.sum())


def place_one_off():
    """Each row of the encoder is one place off."""
    inner = place_rows_module.place_rows
    return mock.patch.object(
        place_rows_module, "place_rows", lambda x, rows, *others: inner(x, rows.roll(1, 1), *others)
    )


def mix_pictures():
    """Patches see the pictures beside theirs."""
    return mock.patch.object(vision, "number_pictures", lambda patches, numbers: torch.zeros_like(numbers))


def lay_one_off():
    """The patches of a row are read one sample off."""
    inner = ragged_rows.lay_row

    def lay_row(samples, fields):
        row, other = inner(samples, fields), inner([*samples[1:], *samples[:1]], fields)
        return {**row, "pixels": other["pixels"]}

    return mock.patch.object(sample_stream, "lay_row", lay_row)


def skip_share():
    """What a rank encodes is left out."""
    inner = vision.Merger.forward
    return mock.patch.object(vision.Merger, "forward", lambda self, x: inner(self, x) * 0)


def move_rows():
    """The rows that a rank encodes go one place on."""
    inner = vision.Merger.forward
    return mock.patch.object(vision.Merger, "forward", lambda self, x: inner(self, x).roll(1, 1))


SHARE_FAULTS = {"none": nullcontext, "skip_share": skip_share, "move_rows": move_rows}


def count_from_own():
    """A rank of several that share a row counts its tokens from 0 on."""
    return mock.patch.object(microbatch, "number_equal", lambda tokens: tokens * 0)


def count_gradient_twice():
    """Every rank that shares a row takes the whole gradient of the encoder's rows."""
    inner = whole_rows._Enter.backward

    def backward(ctx, grad):
        with mock.patch.object(torch, "zeros_like", lambda total: total):
            return inner(ctx, grad)

    return mock.patch.object(whole_rows._Enter, "backward", staticmethod(backward))


FAULTS = {
    "none": nullcontext,
    "skip_encoder": skip_encoder,
    "place_one_off": place_one_off,
    "mix_pictures": mix_pictures,
    "lay_one_off": lay_one_off,
    "count_from_own": count_from_own,
    "count_gradient_twice": count_gradient_twice,
}
OF_SHARED_ROWS = ("none", "count_from_own", "count_gradient_twice")


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
    before, threads = Path.cwd(), torch.get_num_threads()
    os.chdir(folder)
    torch.set_num_threads(1)
    config = read_config(Path("run.toml"))
    run = resolve_config(replace(config, plan=replace(config.plan, **request.param)))
    yield Cases(folder / "proof", folder / "pictures.py", steps=2).case(run, reruns=True)
    torch.set_num_threads(threads)
    os.chdir(before)


def _prove_each(rank, world, names, case, folder):
    verdicts = []
    for name in names:
        with chdir(folder), (FAULTS | SHARE_FAULTS)[name]() if rank == 1 else nullcontext():
            verdict = prove_case(World(rank, world, Device("cpu")), case)
        verdicts.append((verdict.is_proven, verdict.stream, verdict.first and verdict.first.describe(), verdict.hints))
    return verdicts


def test_each_planted_fault_is_named(pool, case):
    names = OF_SHARED_ROWS if case.run.plan.mesh.cp > 1 else [name for name in FAULTS if name in {"none", *SAYS}]
    found = dict(zip(names, pool.run(2, _prove_each, names, case, Path.cwd(), timeout_s=240)[0], strict=True))
    assert found.pop("none") == (True, "", None, ())
    for name, (is_proven, stream, first, hints) in found.items():
        assert not is_proven
        assert SAYS.get(name, "gradient") in " | ".join([stream, first or "", *hints]), name


@pytest.mark.parametrize("case", [{}], indirect=True, ids=["dp"])
@pytest.mark.parametrize("encoder", ["spread", "bubbles"])
def test_a_fault_in_the_share_of_a_rank_is_named(pool, case, encoder):
    plan = replace(case.run.config.plan, pp=2, dp=1, zero=0, encoder=encoder)
    shared = replace(case, run=resolve_config(replace(case.run.config, plan=plan)))
    found = pool.run(2, _prove_each, list(SHARE_FAULTS), shared, Path.cwd(), timeout_s=240)[0]
    assert [is_proven for is_proven, *_ in found] == [True, False, False]
    for says, (_, _, first, hints) in zip(("vision.", ""), found[1:], strict=True):
        assert f"gradients differ most in unit '{says}" in " | ".join([first or "", *hints])
