"""A ResNet and a plain stack of layers, listed as units, compute under every layout what one process does."""

import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from longer import many_ranks
from superstep.comm.device import Device
from superstep.data.batch import Batch
from superstep.errors import ConfigError
from superstep.launch.ranks import World
from superstep.model.custom.inspect import outline_of, pass_through
from superstep.model.custom.units_from_modules import as_units
from superstep.model.unit import initial
from superstep.plan.config import NumericsConfig, PlanConfig, RunConfig, TrainConfig
from superstep.plan.resolution.resolve import resolve
from superstep.train.proof.prove_tolerance import prove, write_reference

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


class Scaled(nn.Embedding):
    """As Gemma's: its rows times the root of the width."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * 3.0


class Lookups(nn.Module):
    """Embeddings of every kind, of numbers that the image gives."""

    def __init__(self):
        super().__init__()
        self.plain = nn.Embedding(13, 13)
        self.padded = nn.Embedding(13, 13, padding_idx=2)
        self.scaled = Scaled(13, 13)

    def forward(self, x: Tensor) -> Tensor:
        ids = (x.flatten(1)[:, :24] * 3).abs().long().clamp(max=12)
        return sum(table(ids) for table in self.children()).mean(1)


class Halved(nn.Linear):
    """A linear of one's own: other weights, a scale, and something beside the product."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight * 0.5, self.bias) + x.sum(-1, keepdim=True) * self.weight.mean()


def layers():
    """Layers that look like a plain linear or embedding and are not."""
    torch.manual_seed(6)
    hooked = nn.Linear(13, 13)
    hooked.register_forward_hook(_doubled)
    rest = [hooked, nn.Tanh(), nn.utils.parametrizations.weight_norm(nn.Linear(13, 13)), nn.Tanh()]
    return as_units([Lookups(), Halved(13, 13), nn.Tanh(), *rest, nn.Linear(13, CLASSES)])


def _doubled(layer, inputs, out):
    return out * 2.0


MODELS = {"resnet": resnet, "stack": stack, "layers": layers}


def batches():
    generator = torch.Generator().manual_seed(5)
    return tuple(
        Batch(
            {"pixels": torch.randn(8, 3, 8, 8, generator=generator)},
            torch.randint(CLASSES, (8,), generator=generator),
            8,
            reads="pixels",
        )
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
    1: [{}, {"microbatch": 2}],
    2: [
        {"dp": 2},
        {"dp": 2, "zero": 1, "recompute": "full"},
        {"dp": 2, "zero": 2, "recompute": "selective", "microbatch": 2},
        {"dp": 2, "zero": 3},
        {"pp": 2, "microbatch": 2},
        {"pp": 2, "microbatch": 2, "recompute": "full"},
        {"pp": 2, "chunks": 2, "microbatch": 1, "schedule": "interleaved"},
        {"pp": 2, "microbatch": 2, "schedule": "zb-h1"},
    ],
    4: [
        {"dp": 4, "zero": 3},
        {"dp": 4, "zero": 2},
        {"pp": 4, "microbatch": 1},
        {"pp": 4, "microbatch": 1, "schedule": "zb-h1"},
        {"dp": 2, "pp": 2, "zero": 3, "microbatch": 1, "chunks": 2},
        {"dp": 2, "pp": 2, "zero": 1, "microbatch": 2},
    ],
}


@pytest.mark.multiproc
@pytest.mark.parametrize("world", many_ranks(LAYOUTS))
def test_every_layout_computes_what_one_process_does(pool, references, world):
    """Each layout with one of the models in turn, so that each model meets data and pipeline parallelism."""
    few = [(name, plan) for at, plan in enumerate(LAYOUTS[world]) for nth, name in enumerate(MODELS) if at % 3 == nth]
    assert_proven(pool, references, world, few)


@pytest.mark.long
@pytest.mark.multiproc
@pytest.mark.parametrize("world", LAYOUTS)
def test_every_layout_of_every_model_computes_what_one_process_does(pool, references, world):
    assert_proven(pool, references, world, [(name, plan) for name in MODELS for plan in LAYOUTS[world]])


def assert_proven(pool, references, world, layouts):
    cases = [(name, run_of(name, **plan), str(references[name])) for name, plan in layouts]
    for (name, run, _), verdict in zip(cases, pool.run(world, _prove_all, cases, timeout_s=240)[0], strict=True):
        assert verdict.is_proven, (name, run.config.plan, verdict.first and verdict.first.describe())
        assert verdict.compared > 0


@pytest.mark.multiproc
def test_gradients_are_right_in_bf16(pool, references):
    """Of the stack: before a ReLU a bias's gradient is another in bf16 on one process as well, so many signs turn. Nor
    is the loss of eight samples an average over many.
    """
    case = ("stack", run_of("stack", compute="bf16", dp=2, zero=2), str(references["stack"]))
    (verdict,) = pool.run(2, _prove_all, [case], timeout_s=60)[0]
    assert verdict.is_deterministic
    assert [worst.describe() for worst in verdict.worst if worst.kind == "gradient" and worst.is_wrong] == []


def refusal(*modules, example=(8, 6)) -> str:
    def look():
        specs = as_units(modules)
        outline_of(specs, "the stack")
        pass_through(specs, torch.empty(example), torch.float32, "the stack")

    with pytest.raises(ConfigError) as caught:
        look()
    assert "\n" not in str(caught.value)
    return str(caught.value)


class Tied(nn.Module):
    """One matrix in two places of a module."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)
        self.two.weight = self.one.weight


def test_what_would_depend_on_the_layout_is_refused():
    assert "unit '1', '0' is a BatchNorm1d" in refusal(nn.Linear(6, 6), nn.Sequential(nn.BatchNorm1d(6)))
    assert "or torch.nn.GroupNorm" in refusal(nn.BatchNorm1d(6, track_running_stats=False))
    assert "unit '0', 'weight' has a hook, which would be lost" in refusal(with_hook(nn.Linear(6, 6)))
    assert "max_norm = 1), which ranks would do each for themselves" in refusal(nn.Embedding(6, 6, max_norm=1.0))
    assert "leave scale_grad_by_freq out" in refusal(nn.Embedding(6, 6, scale_grad_by_freq=True))
    assert "unit '1' changes its input in place" in refusal(nn.Linear(6, 6), nn.ReLU(inplace=True))
    assert "unit '0' changes its buffer 'running_mean'" in refusal(
        nn.InstanceNorm1d(6, track_running_stats=True), example=(8, 6, 5)
    )


class Calls(nn.Module):
    """A linear, and a function of what it gives."""

    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(6, 6), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x))


class Across(nn.Module):
    """Attention over the wrong dim: a slip that every shape allows."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


def with_hook(layer):
    layer.weight.register_hook(torch.neg)
    return layer


class Attends(nn.Module):
    """Torch's attention, with its weights dropped or not."""

    def __init__(self, dropout):
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, dropout=dropout, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


def fused(dropout_p):
    return lambda x: nn.functional.scaled_dot_product_attention(*[x[:, None, :, None]] * 3, dropout_p=dropout_p)


NOISE = {
    "dropout": nn.functional.dropout,
    "alpha": partial(nn.functional.alpha_dropout, training=True),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
    "rand_like": lambda x: x + torch.rand_like(x),
    "randn": lambda x: x + torch.randn(6, device=x.device),
    "randperm": lambda x: x[torch.randperm(8, device=x.device)],
    "gumbel": nn.functional.gumbel_softmax,
    "rrelu": lambda x: nn.functional.rrelu(x, training=True),
    "attention": fused(0.1),
}


@pytest.mark.parametrize("name", NOISE)
def test_a_forward_that_draws_at_random_is_refused(name):
    said = refusal(nn.Linear(6, 6), Calls(NOISE[name]))
    assert "unit '1' draws random numbers as it runs (" in said
    assert "drop with a torch.nn.Dropout module, draw from the argument noise (takes = ('noise',))" in said


def test_layers_that_draw_at_random_or_keep_a_state_are_refused_by_name():
    assert "unit '0', 'attention' drops at random (dropout = 0.1)" in refusal(Attends(0.1))
    assert "unit '0' drops at random (dropout = 0.5)" in refusal(nn.LSTM(6, 6, 2, dropout=0.5))
    assert "unit '0' drops at random (p = 0.2)" in refusal(nn.AlphaDropout(0.2))
    assert "use torch.nn.Dropout, or set its p to 0" in refusal(nn.FeatureAlphaDropout())
    assert "is spectral norm" in refusal(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)))
    with pytest.warns(FutureWarning):
        of_old = nn.utils.weight_norm(nn.Linear(6, 6))
    assert "'weight' made by a hook" in refusal(of_old)
    assert "torch.nn.utils.parametrizations.weight_norm" in refusal(of_old)


def test_units_that_mix_rows_or_count_are_refused():
    said = "unit '1' mixes the rows of a microbatch"
    assert said in refusal(nn.Linear(6, 6), Calls(lambda x: x - x.mean(0)))
    assert said in refusal(nn.Linear(6, 6), Calls(lambda x: torch.softmax(x, 0)))
    assert said in refusal(nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 4), Across()), example=(8, 5, 6))
    counted = iter(range(100))
    assert "gives another output each time" in refusal(nn.Linear(6, 6), Calls(lambda x: x + next(counted)))


def test_an_output_without_a_gradient_is_refused():
    assert "unit '1' gives an output that carries no gradient," in refusal(nn.Linear(6, 6), Calls(torch.detach))
    lost = "unit '1' gives an output that carries no gradient of its input"
    assert lost in refusal(nn.Linear(6, 6), Calls(lambda x: nn.Parameter(torch.ones(6, device=x.device)) + x.detach()))


@pytest.mark.parametrize(
    "module",
    [Attends(0.0), Calls(nn.functional.gelu), Calls(lambda x: nn.functional.dropout(x, 0.0)), Calls(fused(0.0))],
)
def test_what_draws_nothing_is_taken(module):
    example = torch.empty(3, 8, 6) if isinstance(module, Attends) else torch.empty(8, 6)
    specs = as_units([nn.Linear(6, 6), module])
    outline_of(specs, "the stack")
    pass_through(specs, example, torch.float32, "the stack")


def test_what_cannot_be_a_unit_is_refused():
    assert "unit '0', 'weight' has no elements: [6, 6, 0]" in refusal(nn.Conv1d(6, 6, 0))
    assert "unit '0' has one parameter in two places, the second 'two.weight'" in refusal(Tied())
    assert "unit '0', 'weight' is not trained; make it a buffer" in refusal(nn.Linear(6, 6).requires_grad_(False))
    assert "unit '1' does not run on an input [8, 6]" in refusal(nn.ReLU(), nn.Linear(5, 6))
    with pytest.raises(ConfigError, match=r"plan\.tp = 2 needs something to cut"):
        run_of("resnet", tp=2, dp=1)
    with pytest.raises(ConfigError, match="has 8 units between its first and its last"):
        run_of("resnet", pp=8, chunks=2, microbatch=1)


def test_values_are_those_of_the_module_and_shapes_differ_from_unit_to_unit():
    specs = resnet()
    first = specs[0].params["0.weight"]
    assert first.name == "0.0.weight"
    assert torch.equal(initial(first, (4, 3, 3, 3), seed=9), first.values)
    between = pass_through(specs, torch.empty(2, 3, 8, 8), torch.bfloat16, "resnet")
    assert [tuple(p.shape) for p in between][:3] == [(2, 3, 8, 8), (2, 4, 8, 8), (2, 4, 8, 8)]
    assert [tuple(p.shape) for p in between][-3:] == [(2, 10), (2, 9), (2, CLASSES)]
    assert {p.dtype for p in between} == {torch.bfloat16}


@pytest.mark.long
def test_the_script_on_the_page_trains(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "howto" / "any-module.md").read_text(encoding="utf-8")
    script = tmp_path / "resnet.py"
    script.write_text("\n".join(re.findall(r"^```python\n(.*?)^```$", page, re.S | re.M)), encoding="utf-8")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    first, last = map(float, re.findall(r"\d+\.\d+", done.stdout))
    assert last < first / 2
