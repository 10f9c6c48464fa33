"""Measures engine steps on this machine, by running some of every kind on the real engine.

Three models of random weights: two of the same depth, one half as wide, and a third with the larger width and less
depth, so that a step's time for itself, for a layer and for a weight can be separated. Each answers batches of 1 to 64
requests, with short texts and long ones; ``cost.serve`` fits its kinds of work to the steps. The ranks are launched
like a server's, with its threads and its memory.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import psutil
import torch

from superstep.comm.mesh import Group, build_mesh
from superstep.cost.fit_serving import MeasuredStep, fit
from superstep.cost.serve import ComputeMode
from superstep.hardware.serving_rate import ServingRate
from superstep.launch.ranks import World, launch_apart
from superstep.model.axes import units
from superstep.model.decoder import Decoder
from superstep.model.files.hf import save_weights
from superstep.model.unit import global_tensors, initial, parameters
from superstep.plan.config import DeviceKind
from superstep.plan.model.shape import ModelShape
from superstep.plan.model.sizes.named_sizes import SHAPES
from superstep.serve.build_engine import open_engine
from superstep.serve.compute.runner.model_runner import follow
from superstep.serve.config import ServeConfig, plan_of
from superstep.serve.engine import InferenceEngine
from superstep.serve.load_rank import give_back, load_rank, share_cores
from superstep.serve.scheduling.request import Request, Sampling
from superstep.serve.scheduling.step_log import LogSettings, StepEntry, StepRecorder, samples

WIDTH, LAYERS, VOCAB = 768, 6, 32_768
"""The largest model of random weights: its weights must not stay in a cache where the real one's do not."""
USUAL = replace(SHAPES["llama3.2-1b"], vocab=32_000, heads=12, kv_heads=4, width=768, ffn=2048, layers=12)
"""The measured proportions where no model is named."""
BATCHES = (1, 2, 4, 8, 9, 16, 32, 64)
"""Requests at once: the numbers of rows that ``cost.serve`` has."""
CONTEXT = 1024
"""Tokens of the longest text, or the model's limit."""
LONG, TEXTS = 448, 8
"""Tokens of each long text, and their number: their keys together stay in no cache."""
ANSWER = 7
"""Tokens of an answer: one step fewer has one row for each request."""


@dataclass(frozen=True, slots=True)
class RankMeasurement:
    """Measurements of one rank.

    Attributes:
        way: how the steps were computed.
        linear_bytes: memory of the linears' weights.
        linears: weights of all linears.
        other_bytes: memory at the end without KV cache and linears.
    """

    samples: tuple[MeasuredStep, ...]
    way: ComputeMode
    linear_bytes: float
    linears: int
    other_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How seconds are counted.

    Attributes:
        clock: by default wall time; beside other programs the processor's clock is quieter, on one thread.
        threads: of a rank; None takes a server's.
    """

    clock: Callable[[], float] = time.perf_counter
    threads: int | None = None


def calibrate(shape: ModelShape, serve: ServeConfig, device: DeviceKind, timing: Timing | None = None) -> ServingRate:
    """Seconds of steps here, for models of such a shape.

    Args:
        shape: the proportions of the random models.
        serve: number format, exact, ranks, quantization, compiled operations.
        timing: None means a server's.

    Raises:
        ConfigError: it cannot be served so.
        Fault: a rank failed.
    """
    models = shapes(shape, serve.tp)
    context = min(CONTEXT + 128, shape.max_tokens)
    tokens = context + max(BATCHES) * (64 + ANSWER) + TEXTS * (LONG + 64)
    pages = tokens // serve.page_tokens + max(BATCHES)
    serve = replace(serve, context_tokens=context, pages=pages, requests=max(BATCHES), step_tokens=512, replay=None)
    with tempfile.TemporaryDirectory(prefix="superstep-calibrate-") as scratch:
        folders = [Path(scratch) / str(number) for number in range(len(models))]
        for each, folder in zip(models, folders, strict=True):
            save_random(each, folder)
        measured = launch_apart(device, serve.tp, calibrate_rank, folders, serve, timing or Timing())
    largest = measured[-1]
    held = max(0.1, largest.linear_bytes / largest.linears)
    samples_of_ranks = [sample for one in measured for sample in one.samples]
    # Of the first process, where one-time allocations are made.
    beside = max(0.0, measured[0].other_bytes - held * measured[0].linears)
    return fit(samples_of_ranks, largest.way, held_bytes=round(held, 3), beside_bytes=beside)


def shapes(shape: ModelShape, tp: int) -> tuple[ModelShape, ...]:
    """Models with the shape's proportions, small enough to measure in seconds.

    The largest comes last, after torch's one-time allocations.
    """
    narrow = min(shape.width, WIDTH) // 2
    return (
        scale_shape(shape, WIDTH, max(1, min(LAYERS, shape.layers) // 3), VOCAB // 2, tp),
        scale_shape(shape, narrow, LAYERS, VOCAB, tp),
        scale_shape(shape, WIDTH, LAYERS, VOCAB, tp),
    )


def scale_shape(shape: ModelShape, width: int, layers: int, vocab: int, tp: int) -> ModelShape:
    """A smaller model of the same proportions, with heads and ffn that ``tp`` divides."""
    width = max(64, min(shape.width, width, WIDTH) // 64 * 64)
    by = width / shape.width
    group = shape.heads // shape.kv_heads
    kv_heads = max(1, round(shape.kv_heads * by / tp)) * tp
    ffn = max(1, round(shape.ffn * by / (64 * tp))) * 64 * tp
    moe = shape.moe
    if moe is not None:
        experts = max(moe.experts_per_token + 1, min(moe.experts, 8))
        moe = replace(moe, experts=experts)
    return replace(
        shape,
        width=width,
        layers=max(1, min(shape.layers, layers)),
        vocab=max(256, min(shape.vocab, vocab) // 64 * 64),
        heads=kv_heads * group,
        kv_heads=kv_heads,
        ffn=ffn,
        moe=moe,
    )


@torch.no_grad()
def save_random(shape: ModelShape, folder: Path) -> None:
    """Save a model in Hugging Face's format, with initial weights."""
    decoder = Decoder(shape)
    for spec, param in parameters(decoder, units(shape)).values():
        param.copy_(initial(spec, param.shape, 0))
    save_weights(folder, global_tensors(decoder, units(shape)), shape)


def calibrate_rank(world: World, folders: Sequence[Path], serve: ServeConfig, timing: Timing) -> list[RankMeasurement]:
    """Time the models of ``folders`` on one rank; the first rank returns the figures."""
    mesh = build_mesh(plan_of(folders[0], serve).plan, world.rank, world.device, timeout=timedelta(minutes=5))
    try:
        if world.rank > 0:
            assert mesh.tp is not None, "ranks share the model"
            for folder in folders:
                _share_cores(world, serve, timing)
                mine = load_rank(folder, serve, world.rank, mesh.tp, world.device)
                follow(mine.forward, mesh.tp, world.device, mine.party)
            return []
        return [_calibrate_one(world, folder, serve, timing, mesh.tp) for folder in folders]
    finally:
        mesh.destroy()


def _share_cores(world: World, serve: ServeConfig, timing: Timing) -> None:
    """Before each engine: an exact one leaves torch's own operations with one thread."""
    share_cores(world, serve)
    if timing.threads is not None:
        torch.set_num_threads(timing.threads)


def _calibrate_one(world: World, folder: Path, serve: ServeConfig, timing: Timing, tp: Group | None) -> RankMeasurement:
    give_back()
    _share_cores(world, serve, timing)
    before = _own_bytes(world)
    settings: list[LogSettings] = []
    entries: list[StepEntry] = []

    def watch(setting: LogSettings) -> StepRecorder:
        settings.append(setting)
        return StepRecorder(entries.append, timing.clock)

    engine = open_engine(folder, serve, tp=tp, device=world.device, watch=watch)
    after = _own_bytes(world)
    _ask(engine, (1, 32), is_greedy=True, salt="first")
    entries.clear()  # first-time work takes longer
    _ask(engine, BATCHES, is_greedy=True, salt="greedy")
    _ask(engine, (1, 8), is_greedy=False, salt="chance")
    engine.end()
    give_back()
    (setting,) = settings
    model = setting.model
    keys = setting.pages * setting.page_tokens * model.key_bytes  # all of them, as they are written once with zeros
    return RankMeasurement(
        samples=tuple(samples(setting, entries)),
        way=setting.way,
        linear_bytes=after - before - keys - model.embedding * model.bytes,
        linears=model.linears,
        other_bytes=_own_bytes(world) - keys - model.embedding * model.bytes,
    )


def _own_bytes(world: World) -> int:
    """Memory of this process alone: a file in the system's cache does not count."""
    if world.device.kind == "cuda":
        return int(torch.cuda.memory_allocated(world.device.torch))
    usage = psutil.Process().memory_info()
    return int(usage.rss - getattr(usage, "shared", 0))


def _ask(engine: InferenceEngine, batches: Sequence[int], *, is_greedy: bool, salt: str) -> None:
    """Compute every kind of step."""
    sampling = Sampling(max_tokens=ANSWER, temperature=0.0 if is_greedy else 1.0, ignore_eos=True)
    number = 0
    for batch in _batches(engine, batches):
        for prompt in batch:
            engine.add(Request(id=number, prompt=prompt, sampling=sampling, salt=salt))
            number += 1
        while not engine.is_idle:
            engine.step()


def _batches(engine: InferenceEngine, counts: Sequence[int]) -> Iterator[Sequence[tuple[int, ...]]]:
    """Prompts that are answered together."""
    most = min(CONTEXT, engine.info.context_tokens - ANSWER - 1)
    vocab = engine.info.vocab
    for count in counts:
        # Distinct short texts: each has a chunk of some rows beside those of the others.
        length = min(32, 4 + 256 // count, most)
        yield [tuple((7 * number + place + count) % vocab for place in range(length)) for number in range(count)]
    yield [tuple(place % vocab for place in range(most))]
    long = [tuple((5 * text + place) % vocab for place in range(min(LONG, most))) for text in range(TEXTS)]
    for count in (TEXTS, 2, 4 * TEXTS):  # the first ones' prompts are computed in chunks; later ones are cached
        if count <= max(counts):
            yield (long * 4)[:count]
    for length in (16, 64, 128, 256):
        yield [tuple((3 * length + place) % vocab for place in range(min(length, most)))]
