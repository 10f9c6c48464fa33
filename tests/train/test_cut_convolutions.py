"""Convolutions that tp cuts: over their output, their input, and by groups."""

import re
from pathlib import Path

import pytest
import torch

from superstep.cli.main import main
from superstep.engine.parallel import convolution
from superstep.errors import ConfigError
from superstep.plan.config import DataConfig, ModelConfig, NumericsConfig, PlanConfig, RunConfig, TrainConfig
from superstep.train.weights.model import resolve_config

FILE = """
import torch
from torch import nn
from superstep.model.custom.units_from_modules import as_units

def length(split):
    return 40

def sample(split, index, noise):
    return {"pixels": torch.from_numpy(noise.standard_normal((3, 9, 9))).float(), "target": torch.tensor(index % 5)}

def units(config):
    torch.manual_seed(config.train.seed)
    columns = [nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 8, 3, groups=2), nn.Tanh()]
    columns += [nn.Conv2d(8, 12, 3, padding=1), nn.Tanh(), nn.Conv2d(12, 8, 3, groups=4), nn.Tanh()]
    columns += [nn.Conv2d(8, 6, 1)]
    again = [nn.Tanh(), nn.Conv2d(6, 8, 1, groups=2), nn.AvgPool2d(5), nn.Flatten(), nn.Linear(8, 5)]
    into = [f"0.{number}.{leaf}" for number in (0, 2, 4, 6) for leaf in ("weight", "bias")]
    axes = dict.fromkeys([*into, "1.1.weight", "1.1.bias"], ("maps",))
    axes |= dict.fromkeys(["0.8.weight", "1.4.weight"], (None, "maps"))
    return as_units([nn.Sequential(*columns), nn.Sequential(*again)], axes=axes)
"""


def write(folder, text=FILE):
    path = folder / "maps.py"
    path.write_text(text, encoding="utf-8")
    return path


def flags(path):
    plan = ["--plan.tp", "2", "--plan.dp", "1", "--plan.sequence-parallel", "false", "--plan.rules.maps", "tp"]
    files = ["--model.source", str(path), "--data.source", str(path), "--state.dir", str(path.parent / "run")]
    return [*files, *plan, "--plan.microbatch", "4", "--train.batch-sequences", "8", "--train.steps", "4"]


@pytest.mark.multiproc
def test_cut_convolutions_compute_what_whole_ones_do(tmp_path, capfd):
    assert main(["prove", *flags(write(tmp_path))]) == 0, capfd.readouterr().out


@pytest.mark.multiproc
def test_cut_convolutions_have_the_bits_of_whole_ones_in_exact_mode(tmp_path, capfd):
    assert main(["prove", "--exact", *flags(write(tmp_path))]) == 0, capfd.readouterr().out


class Two:
    """Two ranks, of which this is the second."""

    def size(self):
        return 2

    def rank(self):
        return 1


def test_groups_send_nothing_and_whole_maps_meet():
    sent = []

    def note(name):
        return lambda x, *_: sent.append(name) or torch.cat([x, x], 1) if name == "gather" else sent.append(name) or x

    def own(inputs, groups):
        layer = torch.nn.Conv2d(inputs, 8, 1, groups=groups)
        layer.weight, layer.bias = (torch.nn.Parameter(p.detach()[4:]) for p in (layer.weight, layer.bias))
        return convolution.convolve_into_own(layer, layer.forward, Two(), note("enter"), note("gather"), note("keep"))

    assert own(8, 2)(torch.zeros(1, 4, 3, 3)).shape == (1, 4, 3, 3)
    assert sent == []
    assert own(8, 1)(torch.zeros(1, 4, 3, 3)).shape == (1, 4, 3, 3)
    assert own(8, 1)(torch.zeros(1, 8, 3, 3)).shape == (1, 4, 3, 3)
    assert sent == ["gather", "enter"]


def config(path, *, rules=(("maps", "tp"),), exact=False, **plan):
    return RunConfig(
        model=ModelConfig(source=str(path)),
        data=DataConfig(source=str(path)),
        train=TrainConfig(batch_sequences=8),
        plan=PlanConfig(**{"tp": 2, "dp": 1, "sequence_parallel": False, "rules": rules} | plan),
        numerics=NumericsConfig(exact=exact),
    )


REFUSED = [
    (("", ""), {"tp": 4}, "0.2.weight: its 2 groups do not split over plan.tp = 4.*set plan.rules.maps to 'none'"),
    (
        ('"0.8.weight", "1.4.weight"], (None, "maps")', '"0.8.weight"], (None, None, "maps")'),
        {},
        "cuts its dim 2 .* a convolution can be cut over its output",
    ),
    (('"0.8.weight"', '"0.9.weight"'), {}, r"axes names '0.9.weight' \(None, 'maps'\), which is no parameter"),
    (('"1.1.bias"], ("maps",)', '], ("maps",)'), {}, "'1.bias' has the axis None, and its weight has 'maps'"),
    (('["0.8.weight", "1.4.weight"]', '["1.4.weight"]'), {}, "no linear layer or convolution of unit '0' is cut over"),
    (("padding=1", 'padding=1, padding_mode="circular"'), {}, "convolution layer has a forward, hooks or options"),
]


@pytest.mark.parametrize(("change", "plan", "words"), REFUSED, ids=lambda value: None)
def test_a_cut_that_does_not_fit_is_refused_in_one_line(change, plan, words, tmp_path):
    with pytest.raises(ConfigError) as caught:
        resolve_config(config(write(tmp_path, FILE.replace(*change)), **plan))
    assert re.search(words, str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)


def test_exact_mode_refuses_logits_that_tp_cuts_and_more_ranks_than_cells(tmp_path):
    text = FILE.replace("nn.Linear(8, 5)", "nn.Linear(8, 4)").replace('"1.4.weight"]', "]")
    cut = text.replace('"1.1.weight", "1.1.bias"]', '"1.4.weight", "1.4.bias"]').replace("index % 5", "index % 4")
    with pytest.raises(ConfigError, match=r"no loss over a vocabulary that tp cuts.*set plan.tp to 1"):
        resolve_config(config(write(tmp_path, cut), exact=True))
    with pytest.raises(ConfigError, match=r"what tp cuts splits into 2 cells; set plan.tp to 2"):
        resolve_config(config(write(tmp_path), exact=True, tp=4))
    resolve_config(config(Path(tmp_path / "maps.py"), exact=True))
