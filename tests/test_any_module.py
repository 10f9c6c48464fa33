"""A ResNet and a plain stack of layers, listed as units, compute under every layout what one process does."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from superstep.data.stream import Batch
from superstep.model.any import as_units
from superstep.model.inspect import outline_of
from superstep.plan.config import NumericsConfig, PlanConfig, RunConfig, TrainConfig
from superstep.plan.resolve import resolve
from superstep.runtime.device import Device
from superstep.runtime.launch import World
from superstep.train.prove import prove, write_reference

CLASSES = 7


class Residual(nn.Module):
    """Two convolutions beside a shortcut (He 2015, fig. 2), with group norm."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.GroupNorm(2, outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.GroupNorm(2, outputs),
        )
        self.shortcut = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet():
    torch.manual_seed(3)
    return as_units(
        [
            nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU()),
            Residual(4, 4, 1),
            Residual(4, 6, 2),
            Residual(6, 6, 1),
            Residual(6, 10, 2),
            Residual(10, 10, 1),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(10, 9),
            nn.Sequential(nn.Tanh(), nn.Linear(9, CLASSES)),
        ]
    )


class Temperature(nn.Module):
    """A parameter of no dim, and a table of whole numbers that is no parameter."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("order", torch.randperm(13))
        self.register_buffer("shift", torch.rand(13))

    def forward(self, x: Tensor) -> Tensor:
        return x[:, self.order] * self.scale + self.shift


def squares(out: Tensor, targets: Tensor) -> Tensor:
    return (out - targets[:, None]).square().sum()


def stack():
    """Odd widths, units without parameters first and between, a shared layer, and a loss of its own."""
    torch.manual_seed(4)
    shared = nn.Linear(13, 13)
    layers = [shared, nn.Tanh(), nn.Linear(13, 13), Temperature(), nn.Sequential(nn.GELU(), nn.Linear(13, 13)), shared]
    return as_units([nn.Flatten(), nn.Linear(3 * 8 * 8, 13), *layers, nn.Linear(13, 1)], loss=squares)


MODELS = {"resnet": resnet, "stack": stack}


def batches():
    generator = torch.Generator().manual_seed(5)
    return tuple(
        Batch(torch.randn(8, 3, 8, 8, generator=generator), torch.randint(CLASSES, (8,), generator=generator), 8)
        for _ in range(2)
    )


def run_of(name, compute="fp32", **plan):
    return resolve(
        RunConfig(
            train=TrainConfig(batch_sequences=8, warmup_steps=1, steps=10, lr=1e-3),
            plan=PlanConfig(**plan),
            numerics=NumericsConfig(compute=compute),
        ),
        outline=outline_of(MODELS[name](), name),
    )


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    folders = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for name, specs in MODELS.items():
        folders[name] = tmp_path_factory.mktemp(name)
        write_reference(specs(), run_of(name).config.train, batches(), folders[name])
    torch.set_num_threads(threads)
    return folders


def _prove_all(rank, world, cases):
    torch.set_num_threads(1)
    return [
        prove(World(rank, world, Device("cpu")), run, batches(), Path(folder), reruns=number == 0, specs=MODELS[name]())
        for number, (name, run, folder) in enumerate(cases)
    ]


LAYOUTS = {
    2: [
        {"dp": 2},
        {"dp": 2, "zero": 1, "recompute": "full"},
        {"dp": 2, "zero": 2, "recompute": "selective", "microbatch": 2},
        {"dp": 2, "zero": 3},
        {"pp": 2, "microbatch": 2},
        {"pp": 2, "microbatch": 2, "recompute": "full"},
        {"pp": 2, "chunks": 2, "microbatch": 1, "schedule": "interleaved"},
    ],
    4: [
        {"dp": 4, "zero": 3},
        {"dp": 4, "zero": 2},
        {"pp": 4, "microbatch": 1},
        {"dp": 2, "pp": 2, "zero": 3, "microbatch": 1, "chunks": 2},
        {"dp": 2, "pp": 2, "zero": 1, "microbatch": 2},
    ],
}


@pytest.mark.multiproc
@pytest.mark.parametrize("world", LAYOUTS)
def test_every_layout_computes_what_one_process_does(pool, references, world):
    cases = [(name, run_of(name, **plan), str(references[name])) for name in MODELS for plan in LAYOUTS[world]]
    for (name, run, _), verdict in zip(cases, pool.run(world, _prove_all, cases, timeout_s=240)[0], strict=True):
        assert verdict.is_proven, (name, run.config.plan, verdict.first and verdict.first.describe())
        assert verdict.compared > 0
