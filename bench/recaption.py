"""Better captions for a model of pictures (DALL-E 3, Betker 2023): what is asked for and drawn, by the training's text.

    python -m bench.recaption [--seeds 3] [--jobs 7 --device cuda --compute bf16] [--out bench/results/recaption.json]

A seed takes about ten minutes of one core. What lies in ``--folder`` is not made again, and the results are written
after each seed: the same command with more seeds goes on.

1. recipes/captioner.toml learns full and short captions from 2,000 pictures, and writes both for all 4,000.
2. recipes/flow.toml is trained on these pictures with each kind of text: alt texts alone, of which half are short and
   half belong to another picture; short captions; full captions. Of every blend the rest are alt texts.
3. Each model draws 768 full captions that are held out. A classifier looks at the four quarters of each picture: the
   score is the share of things that are at the place that was asked for, in that colour and shape.

Intervals are 1.96 standard errors of the mean over all pictures and seeds. The grid of pictures beside the results has
a column for each kind, and a row for each of some captions; its last column has the pictures that were asked for.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from bench.machine import write_result
from bench.trained_here import train_here
from superstep.launch.ranks import World, launch_apart
from superstep.model.unit import UnitGraph
from superstep.plan.config_io import read_config
from superstep.plan.user_file import run_file

RECIPES = Path("recipes")
KINDS = {
    "alt": ("full", 0.0),
    "short 95%": ("short", 0.95),
    "full 65%": ("full", 0.65),
    "full 80%": ("full", 0.80),
    "full 95%": ("full", 0.95),
}
"""The caption of each kind, and its share; the rest are alt texts."""
STEPS, ROWS, CAPTIONER_SHARE = 12, 10, 0.2
"""Steps of drawing, rows of the grid, and the captioner's share of the time."""
SAMPLES = '''"""The samples of recipes/flow.py with other captions."""

import json
from pathlib import Path

from superstep.plan.user_file import run_file

flow = run_file(Path("recipes/flow.py"), "flow")
INPUT, length = flow.INPUT, flow.length
MADE, ALT = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


def sample(split, index, noise):
    if split != "train":
        return flow.sample(split, index, noise)
    texts = MADE if noise.random() < {share} else ALT
    return flow.sample(split, index, noise, texts[index])
'''


@dataclass(frozen=True, slots=True)
class Recipes:
    """The recipes' files as modules."""

    scenes: ModuleType
    captioner: ModuleType
    flow: ModuleType


def read_recipes() -> Recipes:
    """The recipes of this folder."""
    flow = run_file(RECIPES / "flow.py", "flow")
    return Recipes(flow.scenes, run_file(RECIPES / "captioner.py", "captioner"), flow)


def train(
    world: World, recipe: str, options: argparse.Namespace, *, seed: int, share: float, data: Path | None = None
) -> UnitGraph:
    """Train a recipe on this rank, for a share of the time that is left."""
    config = read_config(RECIPES / f"{recipe}.toml")
    settings = {"seed": seed} if options.steps is None else {"seed": seed, "steps": options.steps}
    config = replace(
        config,
        data=replace(config.data, source=str(data or config.data.source)),
        train=replace(config.train, **settings),
        numerics=replace(config.numerics, compute=options.compute),
    )
    seconds = None if options.until is None else share * (options.until - time.time())
    trained = train_here(world, config, seconds=seconds)
    print(f"{data or recipe}: {trained.steps} steps, loss {trained.validations[-1]:.4f}", flush=True)
    return trained.model


@torch.no_grad()
def write_captions(model: UnitGraph, pixels: Tensor, style: int, recipes: Recipes, device: str) -> list[str]:
    """The likeliest words of each picture's caption, one at a time."""
    captioner, words = recipes.captioner, recipes.scenes.WORDS
    texts = []
    for part in pixels.split(512):
        written = torch.zeros(len(part), 0, dtype=torch.long)
        first = [captioner.ask(picture, style, written[0]) for picture in part]
        fields = {name: torch.stack([each[name] for each in first]).to(device) for name in ("pixels", "patches")}
        fields["pixels.sample"] = torch.zeros(fields["pixels"].shape[:2], dtype=torch.long, device=device)
        for _ in range(recipes.scenes.LONGEST):
            asked = captioner.ask(part[0], style, written[0])
            tokens = torch.cat([first_tokens(first), written], 1).to(device)
            fields |= {"tokens": tokens, "positions": asked["positions"].expand(len(part), -1, -1).to(device)}
            written = torch.cat([written, model(fields)[:, -1].argmax(-1, keepdim=True).cpu()], 1)
            if (written == 0).any(1).all():
                break
        rows = [row[: row.index(0)] if 0 in row else row for row in written.tolist()]
        texts += [" ".join(words[word] for word in row if word < len(words)) for row in rows]
    return texts


def first_tokens(asked: Sequence[dict[str, Tensor]]) -> Tensor:
    """The tokens in front of each caption."""
    return torch.stack([each["tokens"] for each in asked])


def class_of(colour: str, shape: str, scenes: ModuleType) -> int:
    """The class of a thing; 0 is the empty ground."""
    return 1 + [*scenes.COLOURS].index(colour) * len(scenes.SHAPES) + scenes.SHAPES.index(shape)


def list_classes(of: object, scenes: ModuleType) -> list[int]:
    """The class in each quarter of a scene."""
    things = {place: class_of(colour, shape, scenes) for place, colour, shape in of.things}  # type: ignore[attr-defined]
    return [things.get(place, 0) for place in range(len(scenes.PLACES))]


def cut_quarters(pixels: Tensor) -> Tensor:
    """Each quarter as a picture of its own: [B, 3, 32, 32] to [B · 4, 3, 16, 16], in the order of places."""
    return pixels.unflatten(2, (2, 16)).unflatten(4, (2, 16)).permute(0, 2, 4, 1, 3, 5).flatten(0, 2)


def train_judge(scenes: ModuleType, device: str, steps: int, count: int) -> nn.Module:
    """A classifier of quarters, on scenes that nobody else sees."""
    torch.manual_seed(0)
    numbers = range(10**6, 10**6 + count)
    pixels = scenes.to_pixels(torch.stack([scenes.picture("train", number) for number in numbers])).to(device)
    classes = torch.tensor([list_classes(scenes.scene("train", n), scenes) for n in numbers], device=device)
    judge = nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(1024, 128), nn.ReLU()),
        nn.Linear(128, 1 + len(scenes.COLOURS) * len(scenes.SHAPES)),
    ).to(device)
    optimizer = torch.optim.AdamW(judge.parameters(), lr=2e-3)
    for _ in range(steps):
        chosen = torch.randint(len(pixels), (64,), device=device)
        noisy = pixels[chosen] + 0.1 * torch.randn_like(pixels[chosen])
        loss = F.cross_entropy(judge(cut_quarters(noisy)), classes[chosen].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return judge


@torch.no_grad()
def draw(model: UnitGraph, texts: Sequence[str], flow: ModuleType, device: str, steps: int) -> Tensor:
    """A picture for each caption, [B, 3, 32, 32]: Euler's steps from the same noise for every model."""
    _, read, *others = model.units
    words = torch.stack([flow.fill_caption(text) for text in texts]).to(device)
    pixels = torch.randn(len(texts), 3, 32, 32, generator=torch.Generator().manual_seed(0)).to(device)
    for left in range(steps, 0, -1):
        time = torch.full((len(texts), flow.PATCHES, 1), left / steps, device=device)
        x = read(torch.cat([flow.cut(pixels), time], -1), words)
        for unit in others:
            x = unit(x)
        pixels = pixels + (x - pixels) / left
    return pixels.clamp(-1, 1)


@torch.no_grad()
def score(judge: nn.Module, pixels: Tensor, classes: Tensor) -> Tensor:
    """For each picture the share of things that are where they were asked for, [B]."""
    seen = judge(cut_quarters(pixels)).argmax(-1).view(classes.shape)
    return ((seen == classes) & (classes > 0)).sum(1) / (classes > 0).sum(1)


def interval(scores: Tensor) -> dict[str, object]:
    """The mean, and 1.96 standard errors around it."""
    mean, error = float(scores.mean()), 1.96 * float(scores.std()) / math.sqrt(len(scores))
    return {"drawn": round(mean, 4), "interval": [round(mean - error, 4), round(mean + error, 4)]}


def write_png(path: Path, picture: Tensor) -> None:
    """A picture, uint8 [3, H, W]."""
    Image.fromarray(picture.permute(1, 2, 0).contiguous().numpy()).save(path, "PNG")


def leave(path: Path, value: object) -> None:
    """Write a file that another rank waits for: it is whole, or not there."""
    part = path.with_suffix(".part")
    torch.save(value, part)
    part.rename(path)


def wait_for(path: Path) -> Any:
    """What another rank leaves."""
    while not path.exists():
        time.sleep(0.2)
    return torch.load(path)


def recaption(world: World, options: argparse.Namespace) -> None:
    """Write both captions and the alt text of each picture into a file, with the share without a wrong word."""
    if (options.folder / "texts").exists():
        return
    recipes = read_recipes()
    scenes, count, device = recipes.scenes, recipes.flow.SCENES["train"], str(world.device.torch)
    model = train(world, "captioner", options, seed=0, share=CAPTIONER_SHARE)
    pixels = scenes.to_pixels(torch.stack([scenes.picture("train", number) for number in range(count)]))
    styles, learned = recipes.captioner.STYLES, min(recipes.captioner.SCENES["train"], count // 2)
    texts = {name: write_captions(model, pixels, n, recipes, device) for n, name in enumerate(styles)}
    right = {
        name: sum(texts[name][n] == make(scenes.scene("train", n)) for n in range(learned, count)) / (count - learned)
        for name, make in styles.items()
    }
    print("captions without a wrong word:", right, flush=True)
    texts["alt"] = [scenes.alt_text("train", number, count) for number in range(count)]
    leave(options.folder / "texts", (texts, right))


def name_drawn(options: argparse.Namespace, kind: str, seed: int) -> Path:
    """The file of what a model draws."""
    return Path(options.folder, f"{kind.replace(' ', '_').rstrip('%')}-{seed}")


def draw_kind(world: World, options: argparse.Namespace, kind: str, seed: int) -> None:
    """Train on one kind of text, and leave what the model draws: uint8 [B, 3, 32, 32]."""
    path = name_drawn(options, kind, seed)
    if path.exists():
        return
    recipes, (texts, _) = read_recipes(), wait_for(options.folder / "texts")
    caption, share = KINDS[kind]
    data = path.with_suffix(".py")
    data.write_text(SAMPLES.format(share=share), encoding="utf-8")
    data.with_suffix(".json").write_text(json.dumps([texts[caption], texts["alt"]]), encoding="utf-8")
    captions = [recipes.scenes.full_caption(recipes.scenes.scene("validation", n)) for n in range(options.asked)]
    model = train(world, "flow", options, seed=seed, share=1 / (options.seeds - seed), data=data)
    pixels = draw(model, captions, recipes.flow, str(world.device.torch), STEPS)
    leave(path, ((pixels + 1) * 127.5).round().to(torch.uint8).cpu())


def draw_grid(columns: Sequence[Tensor]) -> Tensor:
    """Columns of pictures, uint8 [B, 3, 32, 32], one below another: uint8 [3, H, W] with twice their size."""
    framed = [F.pad(column, (1, 1, 1, 1), value=255) for column in columns]
    grid = torch.cat([column.permute(1, 0, 2, 3).flatten(1, 2) for column in framed], 2)
    return grid.repeat_interleave(2, 1).repeat_interleave(2, 2)


def judge_drawn(world: World, options: argparse.Namespace, seeds: int) -> None:
    """Write the score of each kind over the first seeds, and of the pictures that were asked for."""
    scenes, device = read_recipes().scenes, str(world.device.torch)
    _, right = wait_for(options.folder / "texts")
    drawn = {kind: [wait_for(name_drawn(options, kind, seed)) for seed in range(seeds)] for kind in options.kinds}
    judge = train_judge(scenes, device, options.judge_steps, 4000)
    classes = torch.tensor([list_classes(scenes.scene("validation", n), scenes) for n in range(options.asked)])
    asked = torch.stack([scenes.picture("validation", number) for number in range(options.asked)])
    rows: dict[str, object] = {}
    for kind, pictures in (drawn | {"pictures asked for": [asked]}).items():
        scores = [score(judge, scenes.to_pixels(each).to(device), classes.to(device)) for each in pictures]
        rows[kind] = interval(torch.cat(scores)) | {"seeds": [round(float(each.mean()), 4) for each in scores]}
        print(kind, rows[kind], flush=True)
    write_png(options.out.with_suffix(".png"), draw_grid([*(each[0][:ROWS] for each in drawn.values()), asked[:ROWS]]))
    write_result(options.out, captions_right=right, asked=options.asked, kinds=rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        help="ranks at once: the captioner, a rank for each kind of text, and the classifier",
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/recaption"), help="for texts, samples and what is drawn"
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS])
    parser.add_argument("--steps", type=int, default=None, help="of each run; the recipe's by default")
    parser.add_argument("--until", type=float, default=None, help="the second (Unix time) at which training ends")
    parser.add_argument("--compute", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--judge-steps", type=int, default=300)
    parser.add_argument("--asked", type=int, default=768, help="held-out captions that each model draws")
    parser.add_argument("--out", type=Path, default=Path("bench/results/recaption.json"))
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        start = partial(pool.submit, launch_apart, options.device, 1)
        parts = [start(recaption, options)]
        for seed in range(options.seeds):
            parts += [start(draw_kind, options, kind, seed) for kind in options.kinds]
            parts.append(start(judge_drawn, options, seed + 1))
        for part in parts:
            part.result()


if __name__ == "__main__":
    main()
