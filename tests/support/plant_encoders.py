"""Faults that ranks can have with pictures or sounds in text, and proofs of a layout in which one rank has one."""

from contextlib import chdir, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import torch

from superstep.comm.device import Device
from superstep.data.samples import ragged_rows, sample_stream
from superstep.engine.parallel import whole_rows
from superstep.engine.values import microbatch
from superstep.launch.ranks import World
from superstep.model.multimodal import audio, vision
from superstep.model.multimodal import place_rows as place_rows_module
from superstep.plan.config_io import read_config
from superstep.train.proof.proof_inputs import Cases, prove_case
from superstep.train.weights.model import resolve_config


@contextmanager
def open_case(folder, samples, layout):
    """The proof of a layout of the run in a folder, which is the current one meanwhile. ``samples``: its file there."""
    threads = torch.get_num_threads()
    with chdir(folder):
        torch.set_num_threads(1)
        config = read_config(Path("run.toml"))
        run = resolve_config(replace(config, plan=replace(config.plan, **layout)))
        yield Cases(folder / "proof", folder / samples, steps=2).case(run, reruns=True)
        torch.set_num_threads(threads)


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


def mix_sounds():
    """Frames are convolved with the sounds beside theirs, and see them."""
    return mock.patch.object(audio, "number_sounds", lambda frames, numbers: torch.zeros_like(numbers))


def lay_one_off(field):
    """A field of a row is read one sample off."""
    inner = ragged_rows.lay_row

    def lay_row(samples, fields):
        row, other = inner(samples, fields), inner([*samples[1:], *samples[:1]], fields)
        return {**row, field: other[field]}

    return mock.patch.object(sample_stream, "lay_row", lay_row)


def skip_share(last):
    """What a rank encodes is left out."""
    inner = last.forward
    return mock.patch.object(last, "forward", lambda self, x: inner(self, x) * 0)


def move_rows(last):
    """The rows that a rank encodes go one place on."""
    inner = last.forward
    return mock.patch.object(last, "forward", lambda self, x: inner(self, x).roll(1, 1))


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


COMMON = {"none": nullcontext, "skip_encoder": skip_encoder, "place_one_off": place_one_off}
OF_SHARED_ROWS = {
    "none": nullcontext,
    "count_from_own": count_from_own,
    "count_gradient_twice": count_gradient_twice,
}
FAULTS = {
    "pictures": {**COMMON, "mix_pictures": mix_pictures, "lay_one_off": partial(lay_one_off, "pixels")},
    "sounds": {**COMMON, "mix_sounds": mix_sounds, "lay_one_off": partial(lay_one_off, "mel")},
    "shared rows": OF_SHARED_ROWS,
    **{
        f"shares of {kind}": {
            "none": nullcontext,
            "skip_share": partial(skip_share, last),
            "move_rows": partial(move_rows, last),
        }
        for kind, last in (("pictures", vision.Merger), ("sounds", audio.AudioProjector))
    },
}
"""Of each kind the faults by name."""


def prove_each(rank, world, kind, case, folder):
    """For each fault of a kind, which rank 1 has: whether the layout is proven, and what the verdict says."""
    verdicts = {}
    for name, plant in FAULTS[kind].items():
        with chdir(folder), plant() if rank == 1 else nullcontext():
            verdict = prove_case(World(rank, world, Device("cpu")), case)
        said = " | ".join([verdict.stream, (verdict.first and verdict.first.describe()) or "", *verdict.hints])
        verdicts[name] = (verdict.is_proven, said)
    return verdicts
