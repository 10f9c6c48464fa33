"""What sound is worth to a transcript: a recipe trained with its sounds and without, and the letters it gets wrong.

    python recipes/fetch_prompts.py . runs/prompts
    python -m bench.transcripts [--seeds 0 1 2] [--device cuda --compute bf16] [--out bench/results/transcripts.json]

Both sides are the same model on the same samples; without sound all frames are 0. Losses are in nats for each letter of
held-out prompts with words that no training prompt has: the lowest of each run's validations. The trained model writes
each held-out prompt down, its likeliest letter at a time, at most 25 letters a second. The error rate is the number of
letters to change, insert or delete, to the number of letters; its interval is the middle 95% of 2,000 samples of the
prompts with replacement.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from bench.machine import write_result
from bench.trained_here import train_here
from superstep.launch.ranks import World, launch_on
from superstep.model.unit import UnitGraph
from superstep.plan.config_io import read_config
from superstep.plan.user_file import run_file

RECIPE = Path("recipes/audio_transcripts.toml")
SILENT = '''"""The samples of a recipe without sound."""

from pathlib import Path

from superstep.plan.user_file import run_file

heard = run_file(Path("{recipe}"), "heard")
CAPACITY, INPUT, length, size = heard.CAPACITY, heard.INPUT, heard.length, heard.size


def sample(split, index, noise):
    fields = heard.sample(split, index, noise)
    return fields | {{"mel": 0 * fields["mel"]}}
'''
FASTEST, RESAMPLES, VALIDATIONS = 25, 2000, 12


@torch.no_grad()
def write_down(model: UnitGraph, recipe: ModuleType, device: str) -> Iterator[tuple[str, str]]:
    """What each held-out prompt says, and what the model hears."""
    samples = [recipe.sample("validation", n, np.random.default_rng(0)) for n in range(recipe.length("validation"))]
    mel = torch.nn.utils.rnn.pad_sequence([each["mel"] for each in samples], batch_first=True).to(device)
    sizes = torch.tensor([len(each["mel"]) for each in samples])
    numbers = -(torch.arange(mel.shape[1]) >= sizes[:, None]).long().to(device)  # 0 in the sample, -1 in the padding
    first = next(n for n, unit in enumerate(model.units) if isinstance(unit, torch.nn.Embedding))
    stem, *encoder = model.units[:first]
    embed, *blocks, head = model.units[first:]
    sounds = stem(mel, numbers)
    for block in encoder:
        sounds = block(sounds, numbers)
    letters = torch.zeros(len(samples), 1, dtype=torch.long, device=device)
    while letters.shape[1] <= recipe.CAPACITY["tokens"] and not bool((letters[:, 1:] == 0).any(1).all()):
        x: Tensor = embed(letters)
        for block in blocks:
            x = block(x, sounds, torch.zeros_like(letters), numbers)
        letters = torch.cat([letters, head(x[:, -1]).argmax(-1, keepdim=True)], 1)
    for each, row in zip(samples, letters[:, 1:].tolist(), strict=True):
        written = "".join(recipe.LETTERS[letter] for letter in row).partition(recipe.LETTERS[0])[0]
        said = "".join(recipe.LETTERS[letter] for letter in each["target"][:-1].tolist())
        yield said, written[: len(each["mel"]) * recipe.HOP * FASTEST // recipe.RATE]


def count_edits(said: str, written: str) -> int:
    """The fewest letters to change, insert or delete (Levenshtein 1966)."""
    row = list(range(len(written) + 1))
    for number, letter in enumerate(said, 1):
        left, row[0] = row[0], number
        for place, other in enumerate(written, 1):
            left, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, left + (letter != other))
    return row[-1]


def error_rate(pairs: Sequence[tuple[str, str]]) -> dict[str, float | list[float]]:
    """Letters that are wrong, to those that are said, with the interval."""
    counts = np.array([(count_edits(said, written), len(said)) for said, written in pairs])
    draws = np.random.default_rng(0).integers(len(counts), size=(RESAMPLES, len(counts)))
    rates = counts[draws].sum(1)
    low, high = np.quantile(rates[:, 0] / rates[:, 1], (0.025, 0.975))
    edits, letters = counts.sum(0)
    return {"error_rate": round(float(edits / letters), 4), "interval": [round(float(low), 4), round(float(high), 4)]}


def compare(world: World, options: argparse.Namespace) -> list[dict[str, object]]:
    """Both sides of each seed, one after another."""
    recipe, rows = run_file(RECIPE.with_suffix(".py"), "audio_transcripts"), []
    for number, seed in enumerate(options.seeds):
        config, trained = read_config(RECIPE), {}
        for place, (name, data) in enumerate({"sound": RECIPE.with_suffix(".py"), "silent": options.silent}.items()):
            one = replace(
                config,
                data=replace(config.data, source=str(data)),
                train=replace(config.train, seed=seed, steps=options.steps or config.train.steps),
                numerics=replace(config.numerics, compute=options.compute),
            )
            # Sides that are left share the time that is left.
            left = 2 * (len(options.seeds) - number) - place
            seconds = None if options.until is None else (options.until - time.time()) / left
            trained[name] = train_here(world, one, seconds=seconds, validations=VALIDATIONS)
        lowest = {name: min(each.validations) for name, each in trained.items()}
        pairs = list(write_down(trained["sound"].model, recipe, str(world.device.torch)))
        rows.append(
            {"seed": seed, "less": round(1 - lowest["sound"] / lowest["silent"], 4), **lowest}
            | {"steps": trained["sound"].steps, **error_rate(pairs)}
            | {"validations": {name: each.validations for name, each in trained.items()}}
            | {"examples": pairs[:: max(1, len(pairs) // 8)]}
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=None, help="of each run; the recipe's by default")
    parser.add_argument("--until", type=float, default=None, help="the second (Unix time) at which training ends")
    parser.add_argument("--compute", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, default=Path("bench/results/transcripts.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        options.silent = Path(folder) / "silent.py"
        options.silent.write_text(SILENT.format(recipe=RECIPE.with_suffix(".py")), encoding="utf-8")
        rows = launch_on(options.device, 1, compare, options)
    write_result(options.out, runs=rows)


if __name__ == "__main__":
    main()
