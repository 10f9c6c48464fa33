"""ReLU beside tanh: epochs until a convolutional network has a training error of 25% (Krizhevsky 2012, figure 1).

Four layers learn the 10 categories of emoji, one maker's 1,860 pictures at 32 x 32, by SGD, through the engine on one
rank. Both sides have the same first values and batches; the activation differs, and the learning rate, which is chosen
for each side on a seed of its own. As in the paper pixels are those of the file less their mean, first weights have a
deviation of 0.01, and nothing regularises the networks.

    python recipes/fetch_emoji.py FOLDER_OF_PACKAGES runs/emoji
    python -m bench.activations [--seeds 3] [--epochs 40] [--rate-epochs 16]

Writes the figures, and the curves of each seed as a picture.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.activations_plot import draw_errors
from bench.machine import write_result
from bench.trained_here import copy_weights
from superstep.comm.mesh import build_mesh
from superstep.data.samples.idx import read_idx
from superstep.engine.engine import Engine
from superstep.engine.values.microbatch import microbatches
from superstep.launch.ranks import World, launch_on
from superstep.model.custom.inspect import outline_of
from superstep.model.custom.units_from_modules import as_units
from superstep.model.unit import UnitGraph
from superstep.plan.config import PlanConfig, RunConfig, TrainConfig
from superstep.plan.resolution.resolve import resolve

ACTIVATIONS: Mapping[str, Callable[[], nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh}
MAKER, SIZE, BATCH = "google", 32, 30
WANTED_ERROR = 0.25
RATES = (0.003, 0.01, 0.03, 0.1, 0.3)
FIRST_STD = 0.01
SEED_OF_RATES = 100


@dataclass(frozen=True, slots=True)
class Pictures:
    """Pixels from -255 to 255, less the mean of all pictures, [N, 3, 32, 32], and their categories [N]."""

    pixels: Tensor
    categories: Tensor


def read_pictures(folder: Path) -> Pictures:
    """The pictures of a maker on white."""
    rgba = read_idx(folder / f"{MAKER}.idx").float()
    pixels = F.interpolate((rgba[:, :3] - 255) * rgba[:, 3:] / 255, SIZE, mode="area")
    return Pictures(pixels - pixels.mean(0), read_idx(folder / "categories.idx").long())


def build_network(activation: Callable[[], nn.Module], seed: int) -> list[nn.Module]:
    """Three convolutions and a dense layer; the first values do not depend on the activation."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 16), (16, 16), (16, 32)):
        convolution = nn.Conv2d(inputs, outputs, 5, padding=2)
        layers += [nn.Sequential(convolution, activation(), nn.MaxPool2d(3, 2, padding=1))]
    layers += [nn.Sequential(nn.Flatten(), nn.Linear(32 * (SIZE // 8) ** 2, 10))]
    for layer in layers:
        for param in layer.parameters():
            nn.init.normal_(param, std=FIRST_STD) if param.ndim > 1 else nn.init.zeros_(param)
    return layers


def train(world: World, pictures: Pictures, name: str, seed: int, lr: float, epochs: int) -> list[float]:
    """The training error after each epoch, up to the first one that is low enough."""
    config = RunConfig(
        train=TrainConfig(batch_sequences=BATCH, optimizer="sgd", weight_decay=0.0, clip_norm=100.0, seed=seed),
        plan=PlanConfig(dp=1, microbatch=BATCH, device="cpu"),
    )
    units = as_units(build_network(ACTIVATIONS[name], seed))
    run = resolve(config, outline=outline_of(units, "four_layers"))
    mesh = build_mesh(run.plan, world.rank, world.device, timeout=timedelta(minutes=1))
    engine, errors = Engine(run, units, mesh, example=pictures.pixels[:1]), []
    model = UnitGraph(units, seed)
    order = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for rows in torch.randperm(len(pictures.pixels), generator=order).split(BATCH):
            step = microbatches(pictures.pixels[rows], pictures.categories[rows], run.plan, mesh)
            engine.train_step(step, valid_tokens=BATCH, lr=lr)
        copy_weights(engine, model)
        errors.append(find_error(model, pictures))
        if errors[-1] <= WANTED_ERROR:
            break
    mesh.destroy()
    return errors


@torch.no_grad()
def find_error(model: UnitGraph, pictures: Pictures) -> float:
    """The share of pictures in another category than the likeliest one."""
    guessed = torch.cat([model(pixels).argmax(-1) for pixels in pictures.pixels.split(500)])
    return round(float((guessed != pictures.categories).float().mean()), 4)


def epochs_to(errors: Sequence[float]) -> float:
    """Epochs until the error is low enough, with a straight line between the last two; infinite if it is not."""
    *_, before, last = 0.9, *errors
    if last > WANTED_ERROR:
        return float("inf")
    return round(len(errors) - (WANTED_ERROR - last) / (before - last), 2)


def choose_rate(tried: Mapping[float, Sequence[float]]) -> float:
    """The rate that needs the fewest epochs, or has the lowest error at last."""
    return min(tried, key=lambda lr: (epochs_to(tried[lr]), tried[lr][-1]))


def compare(world: World, options: argparse.Namespace) -> dict[str, object]:
    """The rates that each side tries, and its runs with the best one."""
    pictures = read_pictures(options.emoji)
    rates, tried, runs = {}, {}, []
    for name in ACTIVATIONS:
        every = {lr: train(world, pictures, name, SEED_OF_RATES, lr, options.rate_epochs) for lr in RATES}
        rates[name], tried[name] = choose_rate(every), {str(lr): errors for lr, errors in every.items()}
        print(name, {lr: (epochs_to(errors), errors[-1]) for lr, errors in every.items()}, flush=True)
    for seed in range(options.seeds):
        errors = {name: train(world, pictures, name, seed, rates[name], options.epochs) for name in ACTIVATIONS}
        epochs = {name: epochs_to(each) for name, each in errors.items()}
        runs.append({"seed": seed, "epochs": epochs, "ratio": round(epochs["tanh"] / epochs["relu"], 2)})
        runs[-1]["errors"] = errors
        print(runs[-1], flush=True)
    ratio = statistics.median(run["ratio"] for run in runs)
    return {"wanted_error": WANTED_ERROR, "lr": rates, "ratio": ratio, "runs": runs, "tried": tried}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--emoji", type=Path, default=Path("runs/emoji"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=40, help="at most, of a run")
    parser.add_argument("--rate-epochs", type=int, default=16, help="at most, of a run that tries a learning rate")
    parser.add_argument("--out", type=Path, default=Path("bench/results/activations.json"))
    parser.add_argument("--picture", type=Path, default=Path("docs/pictures/relu-tanh.svg"))
    options = parser.parse_args()
    figures = launch_on("cpu", 1, compare, options)
    write_result(options.out, **figures)
    options.picture.write_text(draw_errors(figures["runs"], WANTED_ERROR), encoding="utf-8")


if __name__ == "__main__":
    main()
