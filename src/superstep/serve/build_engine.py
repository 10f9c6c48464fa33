"""From a folder of weights to an engine: the plan, this rank's part of the model, and its KV cache."""

from __future__ import annotations

import ctypes
import gc
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from superstep.comm.device import Device
from superstep.comm.mesh import Group
from superstep.cost.serve import ComputeMode, RankModelSize, model_of_rank
from superstep.engine.exact.modules import require_exact
from superstep.errors import ConfigError
from superstep.hardware.host import cores
from superstep.launch.ranks import World
from superstep.model.hf import open_weights
from superstep.numerics.dtypes import DTYPES
from superstep.numerics.invariant_attention import BLOCK
from superstep.plan.resolution.resolve import Resolved
from superstep.serve.compute.draft_model import DraftModel
from superstep.serve.compute.paged_attention import FAST_BLOCK
from superstep.serve.compute.runner.choose_backend import ComputeSettings, choose
from superstep.serve.compute.runner.model_runner import Compute, ModelRunner
from superstep.serve.compute.runner.rank_commands import CommandChannel
from superstep.serve.compute.serving_model import ServedUnits, build, fill
from superstep.serve.config import NGRAM, ServeConfig, check_served, check_vocab, fast, plan_of
from superstep.serve.drafting.grammar_protocol import Matchers
from superstep.serve.drafting.speculate import Drafter, NgramDrafter, Speculation
from superstep.serve.engine import InferenceEngine, StepObserver
from superstep.serve.engine_control import EngineController
from superstep.serve.files.weights import read_version
from superstep.serve.scheduling.kv_pages import Pages
from superstep.serve.scheduling.request import ModelInfo
from superstep.serve.scheduling.step import Budget
from superstep.serve.scheduling.step_log import LogFile, LogSettings

Watching = Callable[[LogSettings], StepObserver]


def ends_of_text(folder: Path) -> tuple[int, ...]:
    """The tokens that end an answer of a folder's model."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        ids = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
        if ids is not None:
            return tuple(ids) if isinstance(ids, list) else (ids,)
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """What is already known of a folder's model.

    Attributes:
        weights: where they are, if not in the folder.
        version: of the weights; computing it reads all of them once more.
    """

    run: Resolved | None = None
    weights: Path | None = None
    version: str | None = None


NOTHING = KnownModel()


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank of a server.

    Attributes:
        forward: its part of the model.
        party: its part in commands between steps.
        pages: of keys, that fit its memory.
        context_tokens: the most tokens of a prompt and its answer.
        is_paged: whether every row reads its keys in their pages.
        small: its part of the draft model; None without.
    """

    run: Resolved
    forward: Compute
    party: CommandChannel
    pages: int
    context_tokens: int
    is_paged: bool
    small: Compute | None = None


def load_rank(
    folder: Path,
    serve: ServeConfig,
    rank: int,
    tp: Group | None,
    device: Device,
    known: KnownModel = NOTHING,
) -> Rank:
    """This rank's part of a folder's model.

    Args:
        rank: of those that share the model.
        tp: the group of these.

    Raises:
        ConfigError: it cannot be served so, or not on this machine.
        StateError: the folder holds no model, or it is damaged.
    """
    run, weights = known.run or plan_of(folder, serve), known.weights or folder
    shape, threads = run.shape, torch.get_num_threads()
    if serve.exact:
        require_exact(DTYPES[serve.compute], device)
    check_served(run, serve)
    context_tokens = serve.context_tokens or shape.max_tokens
    least = -(-context_tokens // serve.page_tokens)
    served = build(run, rank, tp, device)
    fill(served, open_weights(weights))
    small = _small(run, serve, rank, tp, device)
    key_bytes = sum(setting_model(each, serve).key_bytes for each in ([run] if small is None else [run, small.run]))
    page_bytes = serve.page_tokens * key_bytes
    free_bytes = device.free_bytes(serve.tp * serve.dp)
    pages = serve.pages or usual_pages(least, serve.requests, free_bytes, page_bytes)
    require_pages(pages, page_bytes, free_bytes, serve.page_tokens)
    settings = ComputeSettings(
        pages=pages,
        page_tokens=serve.page_tokens,
        quantize=serve.quantize,
        kernels=serve.kernels,
        threads=threads,
        has_adapters=bool(serve.adapters),
    )
    forward, memory = choose(served, settings, tp, device)
    guessing = None
    if small is not None:
        guessing, beside = choose(small, settings, tp, device)
        memory.sleep_with(beside)
    give_back()
    party, is_paged = CommandChannel(memory, weights, tp, device, serve.read_timeout_s), memory.is_paged
    return Rank(run, forward, party, pages, context_tokens, is_paged, guessing)


def give_back() -> None:
    """Return memory that loading took to the system: glibc keeps it otherwise."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def require_pages(pages: int, page_bytes: int, free_bytes: int, page_tokens: int) -> None:
    """Check that a rank has memory for its pages of the KV cache.

    Raises:
        ConfigError: it has not; names a context that would fit, if one page does.
    """
    if pages * page_bytes <= free_bytes:
        return
    fitting = free_bytes // 2 // page_bytes * page_tokens
    if fitting:
        mend = f"set serve.context_tokens to {fitting} or less and leave serve.pages out"
    else:
        mend = "that is too little for any context: free some memory, set serve.tp higher, or serve a smaller model"
    raise ConfigError(
        f"serve.pages = {pages} take {pages * page_bytes / 2**30:.3g} GiB, and {free_bytes / 2**30:.3g} GiB are free; "
        f"{mend}."
    )


def usual_pages(least: int, requests: int, free_bytes: int, page_bytes: int) -> int:
    """The default number of pages: whole contexts of all requests, at most a quarter of the free memory.

    Args:
        least: pages of one context.
        requests: that run at once.
        free_bytes: of a rank, after its weights.
    """
    return max(least, min(least * requests, free_bytes // 4 // page_bytes))


def setting_model(run: Resolved, serve: ServeConfig) -> RankModelSize:
    """A rank's part of the model in numbers."""
    return model_of_rank(run.shape, tp=serve.tp, number_bytes=DTYPES[serve.compute].itemsize)


def way_name(serve: ServeConfig) -> str:
    """The name of a way of computing steps, in files of measured machines."""
    return serve.compute + ("-exact" if serve.exact else "") + (f"-{serve.quantize}" if serve.quantize else "")


def _setting(rank: Rank, serve: ServeConfig) -> LogSettings:
    way = ComputeMode(
        name=way_name(serve),
        tp=serve.tp,
        block_keys=BLOCK if serve.exact else FAST_BLOCK,
        is_paged=rank.is_paged,
        leaves_rows=rank.forward.leaves_rows,
    )
    return LogSettings(
        model=setting_model(rank.run, serve),
        page_tokens=serve.page_tokens,
        pages=rank.pages,
        budget=Budget(tokens=serve.step_tokens, requests=serve.requests),
        way=way,
    )


def share_cores(world: World, serve: ServeConfig) -> None:
    """A launched rank has one thread; a server's ranks share the cores."""
    if world.device.kind == "cpu":
        torch.set_num_threads(max(1, cores() // (world.size * serve.dp)))


def _small(run: Resolved, serve: ServeConfig, rank: int, tp: Group | None, device: Device) -> ServedUnits | None:
    """This rank's part of the draft model."""
    if serve.speculate in ("", NGRAM):
        return None
    folder = Path(serve.speculate)
    own = plan_of(folder, fast(serve))
    check_vocab(own, run, serve.speculate)
    served = build(own, rank, tp, device)
    fill(served, open_weights(folder))
    return served


def open_engine(
    folder: Path,
    serve: ServeConfig,
    *,
    tp: Group | None = None,
    device: Device | None = None,
    matchers: Matchers | None = None,
    known: KnownModel = NOTHING,
    watch: Watching | None = None,
) -> InferenceEngine:
    """The engine of a folder's model, on rank 0.

    Args:
        folder: a checkpoint, or a Hugging Face folder.
        tp: the ranks that share the model; the others ``follow``. None with one.
        device: None is the CPU.
        matchers: makes the matcher of a constraint.
        watch: makes the observer of its steps; None writes the log of ``serve.scheduling.step_log`` if requested.

    Raises:
        ConfigError: it cannot be served so, or not on this machine.
        StateError: the folder holds no model, or it or an adapter is damaged.
    """
    engine, _ = open_both(folder, serve, tp=tp, device=device, matchers=matchers, known=known, watch=watch)
    return engine


def open_both(
    folder: Path,
    serve: ServeConfig,
    *,
    tp: Group | None = None,
    device: Device | None = None,
    matchers: Matchers | None = None,
    known: KnownModel = NOTHING,
    watch: Watching | None = None,
) -> tuple[InferenceEngine, EngineController]:
    """``open_engine``, with the controller of its weights and sleep."""
    device = device or Device("cpu")
    rank = load_rank(folder, serve, 0, tp, device, known)
    grain = rank.run.plan.grain
    cells = None if grain is None else grain.cells
    model = ModelRunner(
        rank.forward,
        cells=cells,
        group=tp,
        device=device,
        party=rank.party,
        small=rank.small,
        read_timeout_s=serve.read_timeout_s,
    )
    info = ModelInfo(
        name=folder.name,
        vocab=rank.run.shape.vocab,
        context_tokens=rank.context_tokens,
        end_of_text=ends_of_text(folder),
        version=read_version(known.weights or folder) if known.version is None else known.version,
    )
    setting = _setting(rank, serve)
    if watch is None and serve.replay is not None:
        watch = partial(LogFile, serve.replay)
    seen_by = None if watch is None else watch(setting)
    pages = Pages(rank.pages, serve.page_tokens)
    guesser: Drafter | None = NgramDrafter() if serve.speculate == NGRAM else None
    if rank.small is not None:
        guesser = DraftModel(model.guessed, vocab=info.vocab, page_tokens=serve.page_tokens)
    speculation = Speculation(guesser, serve.draft_tokens)
    engine = InferenceEngine(model, info, pages, setting.budget, matchers, speculation, seen_by)
    for name, place in serve.adapters:
        engine.adapters.load(name, place)
    return engine, EngineController(engine, model)
