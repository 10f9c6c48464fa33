"""The benches of pictures: the plain side of the comparison, what both sides read, and the epochs to an error."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from bench import activations
from bench.activations_plot import draw_errors
from bench.plain_ddp import Chain, TorchNoise, use_torch_norms
from bench.sample_batches import read_batches, read_held_out
from digits import write_digits
from recipe_files import enter_folder
from superstep.data.samples.idx import read_idx
from superstep.model.by_place.batch_norm import BatchNorm
from superstep.model.custom.units_from_modules import as_units
from superstep.numerics.noise import SamplePlace
from superstep.plan.config_io import read_config
from superstep.train.weights.model import resolve_config


def test_the_plain_side_normalises_by_the_batch_and_keeps_running_statistics():
    ours = BatchNorm(3, group=8)
    (plain,) = use_torch_norms(nn.Sequential(ours))
    assert isinstance(plain, nn.BatchNorm2d)
    x = torch.randn(8, 3, 4, 4) * 2 + 1
    place = SamplePlace(samples=8, is_training=True)
    torch.testing.assert_close(plain(x), ours(x, place))
    assert not torch.equal(plain.running_mean, torch.zeros(3))
    torch.testing.assert_close(
        plain.eval()(x), (x - plain.running_mean[:, None, None]) / (plain.running_var[:, None, None] + 1e-5).sqrt()
    )


class Shift(nn.Module):
    def forward(self, x, noise):
        return x + noise.uniform("shift", x) if noise.place.is_training else x


def test_the_plain_side_draws_by_torch_and_only_in_training():
    chain = Chain(as_units([Shift(), nn.Linear(3, 3)], takes={0: ("noise",)}))
    x = torch.ones(2, 3)
    assert not torch.equal(chain(x), chain(x))
    chain.eval()
    assert torch.equal(chain(x), chain(x))
    assert TorchNoise(is_training=True).normal("n", x).shape == x.shape


def test_both_sides_read_the_same_rows(tmp_path, monkeypatch):
    write_digits(tmp_path / "runs" / "digits")
    enter_folder(tmp_path, monkeypatch)
    config = read_config(Path("recipes/lenet.toml"))
    train = replace(config.train, batch_sequences=20, eval_batches=2)
    run = resolve_config(replace(config, train=train, plan=replace(config.plan, dp=1)))
    batches = read_batches(run, slice(5, 15))
    first = next(batches)
    assert first.input.shape == (10, 1, 28, 28)
    assert first.valid_tokens == 20
    assert not torch.equal(first.input, next(batches).input)
    classes = read_idx("runs/digits/t10k-labels-idx1-ubyte").tolist()
    held_out = read_held_out(run, slice(0, 20))
    assert [batch.targets_BS.flatten().tolist() for batch in held_out] == [classes[:20], classes[20:40]]


def test_epochs_to_an_error_end_within_the_last_epoch():
    assert activations.epochs_to([0.5, 0.3, 0.2]) == 2.5
    assert activations.epochs_to([0.25]) == 1
    assert activations.epochs_to([0.5, 0.3]) == math.inf
    tried = {0.01: [0.6, 0.5], 0.1: [0.5, 0.3, 0.2], 0.3: [0.6, 0.4, 0.3, 0.1]}
    assert activations.choose_rate(tried) == 0.1
    assert activations.choose_rate({0.01: [0.6, 0.5], 0.1: [0.6, 0.4]}) == 0.1


@pytest.mark.parametrize("name", activations.ACTIVATIONS)
def test_both_networks_begin_with_the_same_values(name):
    build = activations.build_network
    values = [p for layer in build(activations.ACTIVATIONS[name], seed=3) for p in layer.parameters()]
    others = [p for layer in build(nn.GELU, seed=3) for p in layer.parameters()]
    assert len(values) == 8
    assert all(map(torch.equal, values, others))


def test_the_picture_has_a_line_for_each_seed_and_side():
    runs = [{"errors": {"relu": [0.5, 0.2], "tanh": [0.6, 0.5, 0.3, 0.2]}}] * 3
    svg = draw_errors(runs, wanted=0.25)
    assert svg.count("<polyline") == 6
    assert svg.count("stroke-dasharray") == 3 + 1
