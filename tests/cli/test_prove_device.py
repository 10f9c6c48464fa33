"""How the emulated GPUs of prove are asked for: what is refused, and what each form stands for."""

from __future__ import annotations

from pathlib import Path

import pytest

from superstep.cli.arguments import prove
from superstep.cli.main import main

DEVICES = {
    "gpu": "must be strict, strict:8, strict:24GiB or strict:8x24GiB: the number of GPUs, and the memory of each in",
    "": "--device = '' must be strict,",
    "strict:": "the memory of each in GiB or MiB.",
    "strictx24GiB": "did you mean 'strict:24GiB'?",
    "strict:8:80GiB": "did you mean 'strict:8x80GiB'?",
    "strict:8x80": "did you mean 'strict:8x80GiB'?",
    "strict:8x80GB": "did you mean 'strict:8x80GiB'?",
    "strict:8x512m": "did you mean 'strict:8x512MiB'?",
    "Strict8": "did you mean 'strict:8'?",
    "strict:0": "--device = 'strict:0': the number of GPUs must be from 1 to 16, with 1MiB to 192GiB each.",
    "strict:99": "--device = 'strict:99': the number of GPUs must be from 1 to 16",
    "strict:1x0GiB": "--device = 'strict:1x0GiB': the number of GPUs must be from 1 to 16, with 1MiB to 192GiB each.",
    "strict --plan.tp 32": "with 1MiB to 192GiB each, and the plan has 32 ranks.",
    "strict:1 --plan.tp 2": "--device = 'strict:1': the plan has 2 ranks (tp 2), and each needs a GPU of its own; "
    "write strict:2, or leave the number out.",
    "strict:1x24GiB --plan.pp 2 --plan.tp 2": "the plan has 4 ranks (pp 2 x tp 2), and each needs a GPU of its own; "
    "write strict:4x24GiB,",
    "strict --plan.device cpu": "plan.device = 'cpu' and --device exclude each other",
    "strict --all": "--device emulates GPUs for one layout; leave --all, --world, --exact, --faults and --serve out.",
    "strict --world 2": "--device emulates GPUs for one layout",
}
"""What follows --device, and what its refusal must say."""


@pytest.mark.parametrize("words", DEVICES)
def test_gpus_that_cannot_be_emulated_are_refused_in_one_line(words, capsys):
    device, *flags = words.split(" ")
    assert main(["prove", "--plan.dp", "1", "--device", device, *flags]) == 2
    said = capsys.readouterr().err
    assert DEVICES[words] in said
    assert said.startswith("superstep: --device" if "cpu" not in words else "superstep: plan.device")
    assert said.count("\n") == 1


def test_a_model_of_ones_own_needs_as_many_gpus_as_it_has_ranks(capsys):
    run = [str(Path(__file__).parents[2] / "recipes/own_model.toml"), "--model.source", __file__]
    assert main(["prove", *run, "--device", "strict:1"]) == 2
    assert "the plan has 2 ranks (tp 2), and each needs a GPU of its own; write strict:2," in capsys.readouterr().err


@pytest.mark.parametrize(
    ("device", "gpus"),
    [
        ("strict", (4, 80 << 30)),
        ("strict:8", (8, 80 << 30)),
        ("strict:24GiB", (4, 24 << 30)),
        ("strict:16x1.5GiB", (16, 3 << 29)),
        ("strict:4x512MiB", (4, 512 << 20)),
    ],
)
def test_what_a_device_stands_for(device, gpus):
    options, _ = prove.read(["--plan.pp", "2", "--plan.dp", "2", "--device", device])
    assert prove.parse_emulated_gpus(options) == gpus


def test_an_order_is_of_emulated_gpus(capsys):
    assert main(["prove", "--out", "order.json"]) == 2
    assert (
        capsys.readouterr().err
        == "superstep: --out writes the order of kernels on emulated GPUs; add --device strict.\n"
    )
