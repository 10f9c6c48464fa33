"""A right engine passes at sizes where sums are long, few, uneven or odd."""

from dataclasses import replace

import pytest
import torch

import small
from corpus import write_corpus
from superstep.comm.device import Device
from superstep.launch.ranks import World
from superstep.plan.resolution.resolve import resolve
from superstep.train.proof.proof_inputs import Cases, prove_case

pytestmark = pytest.mark.multiproc

SIZES = {
    "vocabulary of 2^13, few tokens": ({"vocab": 2**13, "width": 128}, {"dp": 2, "zero": 1}, 2),
    "large vocabulary whole over tp": ({"vocab": 2**13, "width": 128}, {"tp": 2, "rules": (("vocab", "none"),)}, 2),
    "large vocabulary cut over tp, tied": ({"vocab": 2**13, "width": 128, "tied": True}, {"tp": 2}, 2),
    "odd sizes": ({"vocab": 1001, "width": 36, "ffn": 77, "heads": 3, "kv_heads": 3, "head_dim": 12}, {"dp": 2}, 6),
    "odd sizes, ZeRO-3": ({"vocab": 1001, "width": 36, "ffn": 77}, {"dp": 2, "zero": 3}, 6),
    "uneven stages": ({"vocab": 96, "layers": 2}, {"pp": 2, "stages": (3, 1)}, 4),
    "one sequence for each rank": ({"vocab": 2**12}, {"dp": 2, "zero": 2}, 2),
}


def _run(name, compute):
    model, plan, sequences = SIZES[name]
    config = small.config(layers=1, sequences=sequences, tied=False, compute=compute, **plan)
    return resolve(replace(config, model=replace(config.model, **model)))


def _prove(rank, world, cases):
    return [prove_case(World(rank, world, Device("cpu")), case) for case in cases]


EACH = tuple((name, compute) for name in SIZES for compute in ("fp32", "bf16"))
HALF = tuple((name, ("fp32", "bf16")[number % 2]) for number, name in enumerate(SIZES))


PARTS = [
    HALF[2:6],
    pytest.param(HALF, marks=pytest.mark.long),
    pytest.param(EACH, marks=pytest.mark.slow),
]
"""The short run has a large vocabulary over tp, odd sizes without and with ZeRO-3, and uneven stages."""


@pytest.mark.parametrize("each", PARTS, ids=len)
def test_right_engines_are_proven(pool, tmp_path, each):
    torch.set_num_threads(1)
    corpus = write_corpus(tmp_path / "corpus", vocab=64)
    cases = [
        Cases(tmp_path / f"{number}", corpus, steps=2).case(_run(*one), reruns=number % 4 == 0)
        for number, one in enumerate(each)
    ]
    verdicts = pool.run(2, _prove, cases, timeout_s=300)[0]
    for one, verdict in zip(each, verdicts, strict=True):
        assert verdict.is_proven, (one, verdict.first and verdict.first.describe(), verdict.again.first)
