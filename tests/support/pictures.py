"""A file of small pictures and a model of convolutions for them, as a user would write it."""

from pathlib import Path

PICTURES = '''
import functools

import torch
from torch import nn

from superstep.model.custom.units_from_modules import as_units


@functools.cache
def pictures(split):
    """Noise; each class has brighter pixels in its own place."""
    generator = torch.Generator().manual_seed(1 if split == "train" else 2)
    classes = torch.randint(10, (60 if split == "train" else 20,), generator=generator)
    pixels = torch.randn(len(classes), 1, 12, 12, generator=generator) / 2
    for row, c in enumerate(classes.tolist()):
        pixels[row, 0, c : c + 3, c % 5 : c % 5 + 4] += 1.5
    return pixels, classes


def length(split):
    return len(pictures(split)[1])


def sample(split, index, noise):
    pixels, classes = pictures(split)
    shift = int(noise.integers(-1, 2)) if split == "train" else 0
    return {"pixels": pixels[index].roll(shift, 2), "target": classes[index]}


def units(config):
    torch.manual_seed(0)
    return as_units(
        [
            nn.Sequential(nn.Conv2d(1, 4, 5, padding=2), nn.Tanh(), nn.AvgPool2d(2)),
            nn.Sequential(nn.Conv2d(4, 8, 3), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten()),
            nn.Sequential(nn.Linear(32, 20), nn.Tanh()),
            nn.Linear(20, 10),
        ]
    )
'''

TOML = """
[model]
source = "pictures.py"

[data]
source = "pictures.py"

[train]
steps = 6
batch_sequences = 12
lr = 5e-3
warmup_steps = 2
eval_every = 3

[plan]
dp = 2
zero = 2
microbatch = 3

[state]
dir = "run"
save_every = 3

[observe]
tensorboard = false
"""


def write_pictures(folder: Path, text: str = PICTURES) -> None:
    """``pictures.py`` and ``run.toml``."""
    (folder / "pictures.py").write_text(text, encoding="utf-8")
    (folder / "run.toml").write_text(TOML, encoding="utf-8")
