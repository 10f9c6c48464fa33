"""Files of ragged samples with a model for each, as a user would write them."""

from pathlib import Path

SOUNDS = '''
import functools

import torch
from torch import nn

from superstep.model.custom.units_from_modules import as_units
from superstep.model.custom.within_samples import attend_within, mean_within, neighbours_within, positions_within

CAPACITY = {"values": 16, "places": 16, "target": 4}
INPUT = "values"


@functools.cache
def sounds(split):
    """Noise of 2 to 12 places, about another mean in each class."""
    generator = torch.Generator().manual_seed(1 if split == "train" else 2)
    sizes = 2 * torch.randint(1, 7, (50 if split == "train" else 30,), generator=generator)
    classes = torch.randint(3, sizes.shape, generator=generator)
    means = torch.tensor([[2.0, 0, 0], [0, 2, 0], [0, 0, 2]])
    values = [torch.randn(int(n), 3, generator=generator) + means[c] for n, c in zip(sizes, classes)]
    return values, classes


def length(split):
    return len(sounds(split)[1])


def size(split, index):
    places = len(sounds(split)[0][index])
    return {"values": places, "places": places, "target": 1}


def sample(split, index, noise):
    values, classes = sounds(split)
    drawn = torch.from_numpy(noise.normal(scale=0.1, size=values[index].shape)).float()
    places = torch.arange(len(drawn))
    positions = torch.stack([places, places // 4], 1)
    return {"values": values[index] + drawn, "places": positions, "target": classes[index, None]}


class Stem(nn.Module):
    """A convolution of stride 2, and positions in two dims."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Linear(9, 8)
        self.rows = nn.Embedding(16, 8)
        self.columns = nn.Embedding(4, 8)

    def forward(self, values, numbers, places):
        x = self.conv(neighbours_within(values, numbers)) + self.rows(places[..., 0]) + self.columns(places[..., 1])
        return x[:, ::2].tanh()


class Mix(nn.Module):
    """Attention to the whole sample."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.drop = nn.Linear(8, 24), nn.Linear(8, 8), nn.Dropout(0.1)

    def forward(self, x, numbers):
        qkv = self.qkv(x).unflatten(-1, (3, 2, 4)).unbind(2)
        return x + self.drop(self.out(attend_within(*qkv, numbers_BS=numbers[:, ::2]).flatten(2)))


class Classify(nn.Linear):
    def forward(self, x, numbers):
        x = x + 0.01 * positions_within(numbers[:, ::2]).unsqueeze(-1)
        return super().forward(mean_within(x, numbers[:, ::2], CAPACITY["target"]))


def units(config):
    torch.manual_seed(0)
    numbers = "values.sample"
    return as_units(
        [Stem(), Mix(), Mix(), Classify(8, 3)],
        inputs={0: ("values", numbers, "places"), 1: (0, numbers), 2: (1, numbers), 3: (2, numbers)},
    )
'''

WORDS = '''
import torch

from superstep.model.axes import units as decoder_units
from superstep.plan.model.shape import ModelShape

CAPACITY = {"tokens": 24, "target": 24}
INPUT = "tokens"
SHAPE = ModelShape(
    family="llama", layers=2, width=16, heads=2, kv_heads=1, head_dim=8, ffn=32, vocab=32, tied=False, qk_norm=False,
    norm_eps=1e-6, rope_theta=1e4, rope_scaling=None, max_tokens=24,
)


def length(split):
    return 40 if split == "train" else 12


def size(split, index):
    places = 3 + index * 7 % 17
    return {"tokens": places, "target": places, "counted": places - 2}


def sample(split, index, noise):
    """Numbers that grow by a step; the first two are given, and have no loss."""
    start, step, places = int(noise.integers(32)), 1 + index % 3, size(split, index)["tokens"]
    tokens = (start + step * torch.arange(places + 1)) % 32
    target = tokens[1:].clone()
    target[:2] = -100
    return {"tokens": tokens[:-1], "target": target}


def units(config):
    return decoder_units(SHAPE)
'''

TOML = """
[model]
source = "{name}.py"

[data]
source = "{name}.py"

[train]
steps = 6
batch_sequences = {batch}
lr = 5e-3
warmup_steps = 2
eval_every = 3
eval_batches = 2

[plan]
dp = 2
zero = 2
microbatch = 1

[state]
dir = "run"
save_every = 3

[observe]
tensorboard = false
"""


def write_ragged(folder: Path, name: str = "sounds", text: str | None = None) -> Path:
    """``sounds.py`` or ``words.py``, and ``run.toml``; returns the file."""
    path = folder / f"{name}.py"
    path.write_text(text or {"sounds": SOUNDS, "words": WORDS}[name], encoding="utf-8")
    (folder / "run.toml").write_text(TOML.format(name=name, batch=4), encoding="utf-8")
    return path
