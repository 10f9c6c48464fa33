"""What sound is worth to a transcript: a recipe trained with its sounds and without, and the letters it gets wrong.

    python recipes/fetch_prompts.py . runs/prompts
    python -m bench.transcripts [--seeds 3] [--jobs 2] [--out bench/results/transcripts.json] [-- --plan.device cuda]

Both sides are the same model on the same samples; without sound all frames are 0. Losses are in nats for each letter of
held-out prompts with words that no training prompt has: the lowest of each run's validations. The trained model writes
each held-out prompt down, its likeliest letter at a time, at most 25 letters a second. The error rate is the number of
letters to change, insert or delete, to the number of letters; its interval is the middle 95% of 2,000 samples of the
prompts with replacement.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from bench.gan import load
from bench.machine import write_result
from superstep.model.unit import UnitGraph
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
FASTEST, RESAMPLES = 25, 2000


def train(folder: Path, flags: Sequence[str], case: tuple[int, bool]) -> Path:
    """Train one seed, with or without sound; returns the run's folder."""
    seed, has_sound = case
    run = folder / f"{'sound' if has_sound else 'silent'}-{seed}"
    data = RECIPE.with_suffix(".py") if has_sound else folder / "silent.py"
    settings = {"data.source": data, "train.seed": seed, "state.dir": run, "state.existing": "new"}
    command = [sys.executable, "-m", "superstep", "train", str(RECIPE)]
    with (folder / f"{run.name}.log").open("w", encoding="utf-8") as log:
        given = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
        subprocess.run([*command, *given, *flags], stdout=log, stderr=subprocess.STDOUT, check=True)
    return run


def read_losses(run: Path) -> list[float]:
    """The loss of each validation of a run."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [line["loss"] for line in map(json.loads, lines) if line["event"] == "evaluated"]


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="runs that train at once")
    parser.add_argument("--folder", type=Path, default=Path("runs/transcripts"))
    parser.add_argument("--device", default="cpu", help="where the trained model writes prompts down")
    parser.add_argument("--out", type=Path, default=Path("bench/results/transcripts.json"))
    parser.add_argument("flags", nargs="*", help="flags of superstep train, behind --")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    path = RECIPE.with_suffix(".py")
    (options.folder / "silent.py").write_text(SILENT.format(recipe=path), encoding="utf-8")
    cases = [(seed, has_sound) for seed in range(options.seeds) for has_sound in (True, False)]
    with ThreadPoolExecutor(options.jobs) as pool:
        runs = dict(zip(cases, pool.map(partial(train, options.folder, options.flags), cases), strict=True))
    recipe, rows = run_file(path, "audio_transcripts"), []
    for seed in range(options.seeds):
        losses = {name: read_losses(runs[seed, has_sound]) for name, has_sound in (("sound", True), ("silent", False))}
        best = {name: min(each) for name, each in losses.items()}
        model = load(runs[seed, True]).to(options.device).eval()
        pairs = list(write_down(model, recipe, options.device))
        rows.append(
            {"seed": seed, "less": round(1 - best["sound"] / best["silent"], 4), **best, "validations": losses}
            | error_rate(pairs)
            | {"examples": pairs[:: max(1, len(pairs) // 8)]}
        )
        print({name: value for name, value in rows[-1].items() if name not in ("validations", "examples")}, flush=True)
    write_result(options.out, held_out=recipe.length("validation"), runs=rows)


if __name__ == "__main__":
    main()
