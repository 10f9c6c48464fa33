"""superstep prove --serve: a server against the trainer, bit by bit."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch

from superstep.cli.serve.serve_settings import kernels_folder
from superstep.comm.mesh import build_mesh
from superstep.data.batch import BatchSource
from superstep.launch.ranks import World, launch_on
from superstep.plan.resolution.resolve import Resolved
from superstep.run.reports.plan_line import layout_text
from superstep.serve.build_engine import open_engine
from superstep.serve.compute.runner.model_runner import follow
from superstep.serve.config import ServeConfig, plan_of
from superstep.serve.drafting.speculate import Speculation
from superstep.serve.engine import InferenceEngine
from superstep.serve.load_rank import load_rank
from superstep.train.proof.prove_lora import AdapterTexts, beside_adapters, losses_of, write_adapters
from superstep.train.proof.prove_serving import (
    KnownTexts,
    Open,
    ServingPath,
    TextLogprobs,
    answers,
    batch_of,
    compare,
    logprobs_of,
    losses_in_training,
    serve_logprobs,
    ways,
)
from superstep.train.weights.weights_folder import newest_checkpoint

Texts = list[list[int]]
T = TypeVar("T")


def prove_served(run: Resolved, root: Path, source: BatchSource, *, steps: int, tp: int, logprobs: int = 0) -> int:
    """Serve the newest checkpoint of a run on every path, and compare with training; print the differences.

    Args:
        run: in exact mode.
        root: the run's folder.
        source: of the prompts, with the size of a batch.
        steps: the fewest batches.
        tp: ranks of the server.
        logprobs: the fewest log-probabilities, over all paths.

    Raises:
        StateError: the run has no checkpoint.
    """
    checkpoint = newest_checkpoint(root)
    tokens, device = run.config.data.sequence_tokens, run.config.plan.device
    serve = ServeConfig(
        context_tokens=tokens, compute=run.config.numerics.compute, exact=True, tp=tp, kernels=kernels_folder(None)
    )
    prompts = _prompts(source, steps, tokens, logprobs)
    texts: Texts = launch_on(device, tp, _draw, checkpoint, serve, prompts, tokens)
    size = source.batch_sequences
    batches = [batch_of(texts[at : at + size]) for at in range(0, len(texts), size)]
    losses = launch_on(device, run.plan.mesh.world, losses_in_training, run, checkpoint, batches)
    _say(f"  {f'{layout_text(run)}, served on tp={tp}':60}{'log-probs':>12}{'other bits':>12}{'largest':>10}")
    results = launch_on(device, tp, _tell, checkpoint, serve, texts, prompts)
    compared = [
        compare(way.name, torch.cat(losses), row.results) for way, row in zip(ways(tokens), results, strict=True)
    ]
    with tempfile.TemporaryDirectory(prefix="superstep-adapters-") as folder:
        write_adapters(Path(folder), run.shape)
        # Exact mode's adapters need torch.
        by_torch = replace(serve, kernels=None)
        (beside,) = launch_on(device, tp, _measure_adapted, checkpoint, by_torch, texts, Path(folder))
    compared += [
        compare("no adapter, next to requests with adapters", torch.cat(losses), beside.plain),
        compare("an adapter, next to others, compared with alone", losses_of(beside.alone), beside.adapted),
    ]
    for way in compared:
        _say(f"  {way.way:60}{way.compared:>12,}{way.differing:>12,}{way.largest:>10.1e}")
    _say(
        f"Of {sum(row.guessed for row in results):,} drafted tokens {sum(row.stood for row in results):,} were "
        "accepted."
    )
    first = next((way for way in compared if way.first is not None), None)
    _say(
        f"{'PROVEN' if first is None else 'NOT PROVEN'}: {sum(way.compared for way in compared)} log-probabilities of "
        f"{checkpoint.name}, {sum(way.differing for way in compared)} with other bits than in training."
    )
    if first is not None and first.first is not None:
        _say(f"First: {first.way}, text {first.first[0]}, position {first.first[1]}.")
    return 0 if first is None else 1


def _prompts(source: BatchSource, steps: int, tokens: int, logprobs: int) -> Texts:
    """Prefixes of sequences, of every length: of ``steps`` batches at least, and enough for the log-probabilities."""
    size, every = source.batch_sequences, ways(tokens)
    prompts: Texts = []
    while len(prompts) < steps * size or logprobs_of(every, prompts, tokens) < logprobs:
        at = len(prompts)
        for number, row in enumerate(source.batch(at, slice(0, size)).tokens_BS.tolist(), at):
            prompts.append(row[: 1 + number * 37 % (tokens - 1)])
    return prompts


@dataclass(frozen=True, slots=True)
class ServingResult:
    """The results of a path, with its numbers of drafted and accepted tokens."""

    results: list[TextLogprobs]
    guessed: int
    stood: int


def _draw(world: World, folder: Path, serve: ServeConfig, prompts: Texts, tokens: int) -> Texts:
    way = ServingPath(name="all together")
    drawn = _each(world, folder, serve, [way], lambda opened, way: answers(opened(), way, prompts, tokens))
    return [[*p, *answer.ids] for of_adapter in drawn for p, answer in zip(prompts, of_adapter, strict=True)]


def _tell(world: World, folder: Path, serve: ServeConfig, texts: Texts, prompts: Texts) -> list[ServingResult]:
    def ask(opened: Open, way: ServingPath) -> ServingResult:
        engines: list[InferenceEngine] = []

        def opening() -> InferenceEngine:
            engines.append(opened())
            if way.guesses == "known":
                engines[-1].speculation = Speculation(KnownTexts(texts), serve.draft_tokens)
            return engines[-1]

        logprobs = serve_logprobs(opening, way, texts, prompts)
        now = engines[-1].counters
        return ServingResult(logprobs, now.drafted_tokens, now.accepted_tokens)

    return _each(world, folder, serve, ways(len(texts[0])), ask)


def _measure_adapted(
    world: World, folder: Path, serve: ServeConfig, texts: Texts, adapters: Path
) -> list[AdapterTexts]:
    return _each(
        world,
        folder,
        serve,
        [ServingPath(name="adapters")],
        lambda opened, way: beside_adapters(opened(), texts, adapters),
    )


def _each(
    world: World, folder: Path, serve: ServeConfig, ways: Sequence[ServingPath], ask: Callable[[Open, ServingPath], T]
) -> list[T]:
    """Results of engines for each path, on rank 0; the other ranks compute with it."""
    mesh = build_mesh(plan_of(folder, serve).plan, world.rank, world.device, timeout=timedelta(seconds=300))
    results: list[T] = []
    try:
        for way in ways:
            changed = way.of(serve)
            if world.rank > 0:
                assert mesh.tp is not None
                for _ in range(way.engines):
                    rank = load_rank(folder, changed, world.rank, mesh.tp, world.device)
                    follow(rank.forward, mesh.tp, world.device, rank.party, rank.small)
                continue
            opened: list[InferenceEngine] = []

            def open_one(changed: ServeConfig = changed, opened: list[InferenceEngine] = opened) -> InferenceEngine:
                opened.append(open_engine(folder, changed, tp=mesh.tp, device=world.device))
                return opened[-1]

            results.append(ask(open_one, way))
            opened[-1].end()
    finally:
        mesh.destroy()
    return results


def _say(text: str) -> None:
    print(text, flush=True)
