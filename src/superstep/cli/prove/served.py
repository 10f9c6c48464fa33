"""superstep prove --serve: a server against the trainer, bit by bit."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch

from superstep.cli.describe import layout_text
from superstep.cli.served_model import newest_checkpoint
from superstep.data.stream import Source
from superstep.plan.resolve import Resolved
from superstep.runtime.launch import World, launch_on
from superstep.runtime.mesh import build_mesh
from superstep.serve.compute.ranks import follow
from superstep.serve.engine import Engine
from superstep.serve.load import ServeConfig, load_rank, open_engine, plan_of
from superstep.train.proof.adapted import Beside, beside_adapters, losses_of, write_adapters
from superstep.train.proof.served import Told, Way, answers, batch_of, compare, told_of, trained_losses, ways

Texts = list[list[int]]
T = TypeVar("T")


def prove_served(run: Resolved, root: Path, source: Source, *, steps: int, tp: int) -> int:
    """Serve the newest checkpoint of a run in every way, and hold it against training; print what differs.

    Args:
        run: in exact mode.
        root: the run's folder.
        source: of the prompts, and of how many there are in a batch.
        steps: batches.
        tp: ranks of the server.

    Raises:
        StateError: the run has no checkpoint.
    """
    checkpoint = newest_checkpoint(root)
    tokens, asked = run.config.data.sequence_tokens, run.config.plan.device
    serve = ServeConfig(context_tokens=tokens, compute=run.config.numerics.compute, exact=True, tp=tp)
    prompts = _prompts(source, steps, tokens)
    texts: Texts = launch_on(asked, tp, _draw, checkpoint, serve, prompts, tokens)
    size = source.batch_sequences
    batches = [batch_of(texts[at : at + size]) for at in range(0, len(texts), size)]
    losses = launch_on(asked, run.plan.mesh.world, trained_losses, run, checkpoint, batches)
    told: list[list[Told]] = launch_on(asked, tp, _tell, checkpoint, serve, texts, prompts)
    _say(f"  {f'{layout_text(run)}, served on tp={tp}':60}{'log-probs':>12}{'other bits':>12}{'largest':>10}")
    compared = [compare(way.name, torch.cat(losses), row) for way, row in zip(ways(tokens), told, strict=True)]
    with tempfile.TemporaryDirectory(prefix="superstep-adapters-") as folder:
        write_adapters(Path(folder), run.shape)
        (beside,) = launch_on(asked, tp, _adapted, checkpoint, serve, texts, Path(folder))
    compared += [
        compare("without an adapter, beside adapters", torch.cat(losses), beside.plain),
        compare("with an adapter, beside others, against alone", losses_of(beside.alone), beside.adapted),
    ]
    for way in compared:
        _say(f"  {way.way:60}{way.compared:>12,}{way.differing:>12,}{way.largest:>10.1e}")
    first = next((way for way in compared if way.first is not None), None)
    _say(
        f"{'PROVEN' if first is None else 'NOT PROVEN'}: {sum(way.compared for way in compared)} log-probabilities of "
        f"{checkpoint.name}, {sum(way.differing for way in compared)} with other bits than in training."
    )
    if first is not None and first.first is not None:
        _say(f"First: {first.way}, text {first.first[0]}, position {first.first[1]}.")
    return 0 if first is None else 1


def _prompts(source: Source, steps: int, tokens: int) -> Texts:
    """Beginnings of the first sequences, of every length."""
    size = source.batch_sequences
    rows = [row for step in range(steps) for row in source.batch(step * size, slice(0, size)).tokens_BS.tolist()]
    return [row[: 1 + number * 37 % (tokens - 1)] for number, row in enumerate(rows)]


def _draw(world: World, folder: Path, serve: ServeConfig, prompts: Texts, tokens: int) -> Texts:
    way = Way(name="all together")
    drawn = _each(world, folder, serve, [way], lambda engine, way: answers(engine, way, prompts, tokens))
    return [[*p, *answer.ids] for found in drawn for p, answer in zip(prompts, found, strict=True)]


def _tell(world: World, folder: Path, serve: ServeConfig, texts: Texts, prompts: Texts) -> list[list[Told]]:
    every = ways(len(texts[0]))
    return _each(world, folder, serve, every, lambda engine, way: told_of(engine, way, texts, prompts))


def _adapted(world: World, folder: Path, serve: ServeConfig, texts: Texts, adapters: Path) -> list[Beside]:
    return _each(
        world, folder, serve, [Way(name="adapters")], lambda engine, way: beside_adapters(engine, texts, adapters)
    )


def _each(
    world: World, folder: Path, serve: ServeConfig, ways: Sequence[Way], ask: Callable[[Engine, Way], T]
) -> list[T]:
    """What an engine of each way says, on rank 0; the other ranks compute with it."""
    mesh = build_mesh(plan_of(folder, serve).plan, world.rank, world.device, timeout=timedelta(seconds=300))
    found: list[T] = []
    try:
        for way in ways:
            changed = way.of(serve)
            if world.rank > 0:
                assert mesh.tp is not None
                follow(load_rank(folder, changed, world.rank, mesh.tp, world.device).forward, mesh.tp, world.device)
                continue
            engine = open_engine(folder, changed, tp=mesh.tp, device=world.device)
            found.append(ask(engine, way))
            engine.end()
    finally:
        mesh.destroy()
    return found


def _say(text: str) -> None:
    print(text, flush=True)
