"""What sound is worth to a transcript: a recipe trained with its sounds and without, and the letters it gets wrong.

    python recipes/fetch_prompts.py . runs/prompts
    python -m bench.transcripts [--seeds 0 1 2] [--device cuda --compute bf16] [--out bench/results/transcripts.json]

Both sides are the same model on the same samples; without sound all frames are 0. Losses are the decoder's, in nats for
each letter of held-out prompts with words that no training prompt has: the lowest of each run's validations. Then the
trained model writes each held-out prompt down, its likeliest letter at a time, at most 25 letters a second. The error
rate is the number of letters to change, insert or delete, to the number of letters; its interval is the middle 95% of
2,000 samples of the prompts with replacement.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from bench.machine import write_result
from bench.trained_here import train_here
from superstep.launch.ranks import World, launch_on
from superstep.model.unit import UnitGraph
from superstep.numerics.loss import IGNORE
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
FASTEST, RESAMPLES, VALIDATIONS = 25, 2000, 4


def read_held_out(recipe: ModuleType, device: str) -> dict[str, Tensor]:
    """The fields of all held-out samples, each in a row of its own. Targets of the padding are IGNORE."""
    samples = [recipe.sample("validation", n, np.random.default_rng(0)) for n in range(recipe.length("validation"))]
    fields = {}
    for name, fill in (("mel", 0), ("tokens", 0), ("target", IGNORE)):
        parts = [each[name] for each in samples]
        fields[name] = pad_sequence(parts, batch_first=True, padding_value=fill).to(device)
        sizes = torch.tensor([len(each) for each in parts], device=device)
        places = torch.arange(fields[name].shape[1], device=device)
        fields[f"{name}.sample"] = -(places >= sizes[:, None]).long()  # 0 in the sample, -1 in the padding
    return fields


@torch.no_grad()
def held_out_loss(model: UnitGraph, fields: Mapping[str, Tensor]) -> float:
    """The decoder's loss for each letter, in nats."""
    logits, target = model(dict(fields))[..., :-1], fields["target"]
    return float(F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=IGNORE))


@torch.no_grad()
def write_down(model: UnitGraph, recipe: ModuleType, fields: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """What each held-out prompt says, and what the model hears."""
    *encoder, find, read, block, write = model.units
    sounds, numbers = fields["mel"], fields["mel.sample"]
    for unit in encoder:
        sounds = unit(sounds, numbers)
    letters = torch.zeros(len(sounds), 1, dtype=torch.long, device=sounds.device)
    most = (numbers == 0).sum(1) * recipe.HOP * FASTEST // recipe.RATE
    while not bool(((letters[:, 1:] == 0).any(1) | (most < letters.shape[1])).all()):
        beside = find(sounds, numbers, letters, torch.zeros_like(letters))
        logits = write(block(read(letters, beside)), beside)[:, -1, :-1]
        letters = torch.cat([letters, logits.argmax(-1, keepdim=True)], 1)
    for target, row, count in zip(fields["target"], letters[:, 1:].tolist(), most.tolist(), strict=True):
        written = "".join(recipe.LETTERS[letter] for letter in row).partition(recipe.LETTERS[0])[0]
        said = "".join(recipe.LETTERS[letter] for letter in target[target > 0].tolist())
        yield said, written[:count]


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
    held_out = read_held_out(recipe, str(world.device.torch))
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
            fields = held_out if name == "sound" else held_out | {"mel": 0 * held_out["mel"]}
            judge = partial(held_out_loss, fields=fields)
            trained[name] = train_here(world, one, seconds=seconds, validations=VALIDATIONS, judge=judge)
        lowest = {name: min(each.validations) for name, each in trained.items()}
        pairs = list(write_down(trained["sound"].model, recipe, held_out))
        rows.append(
            {"seed": seed, "less": round(1 - lowest["sound"] / lowest["silent"], 4), **lowest}
            | {"steps": trained["sound"].steps, **error_rate(pairs)}
            | {"validations": {name: each.validations for name, each in trained.items()}}
            | {"examples": pairs[:: max(1, len(pairs) // 8)]}
        )
        print(json.dumps(rows[-1]), flush=True)
        write_result(options.out, runs=rows)
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
        launch_on(options.device, 1, compare, options)


if __name__ == "__main__":
    main()
