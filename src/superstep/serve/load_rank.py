"""One rank of a server: its part of a folder's model, and the pages of the KV cache that fit beside it."""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from superstep.comm.device import Device
from superstep.comm.mesh import Group
from superstep.cost.serve import RankModelSize, model_of_rank
from superstep.data.tokenizer import load_tokenizer
from superstep.engine.exact.machine_check import require_exact
from superstep.errors import ConfigError
from superstep.hardware.host import cores
from superstep.launch.ranks import World
from superstep.model.files.hf import open_weights
from superstep.numerics.dtypes import DTYPES
from superstep.plan.resolution.resolve import Resolved
from superstep.serve.compute.runner.choose_backend import ComputeSettings, choose
from superstep.serve.compute.runner.model_runner import Compute
from superstep.serve.compute.runner.rank_commands import CommandChannel
from superstep.serve.compute.serving_model import ServedUnits, build, fill
from superstep.serve.config import NGRAM, ServeConfig, check_served, check_vocab, fast, plan_of


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
WINDOWS, WINDOW_TOKENS = 128, 512
"""The most windows of a calibration text, and the most tokens of one."""


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
        require_exact(serve.compute, device)
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
        calibration=read_windows(serve.calibration, folder, min(context_tokens, WINDOW_TOKENS)),
    )
    forward, memory = choose(served, settings, tp, device)
    guessing = None
    if small is not None:
        guessing, beside = choose(small, replace(settings, calibration=()), tp, device)
        memory.sleep_with(beside)
    give_back()
    party, is_paged = CommandChannel(memory, weights, tp, device, serve.read_timeout_s), memory.is_paged
    return Rank(run, forward, party, pages, context_tokens, is_paged, guessing)


def read_windows(text: Path | None, folder: Path, tokens: int) -> tuple[tuple[int, ...], ...]:
    """Windows of a calibration text, spread evenly over it; () without a text.

    Args:
        text: the file.
        folder: of the model and its tokenizer.
        tokens: of a window.

    Raises:
        ConfigError: there is no such text, or it is shorter than a window.
        StateError: the folder has no tokenizer.
    """
    if text is None:
        return ()
    if not text.is_file():
        raise ConfigError(f"serve.calibration = '{text}' is no file; name a text file.")
    ids = load_tokenizer(folder / "tokenizer.json").encode(text.read_text(encoding="utf-8", errors="replace"))
    if len(ids) < tokens:
        raise ConfigError(
            f"serve.calibration = '{text}' has {len(ids)} tokens; name a text of at least {tokens}, better "
            f"{WINDOWS * tokens}."
        )
    count = min(WINDOWS, len(ids) // tokens)
    step = (len(ids) - tokens) // max(count - 1, 1)
    return tuple(tuple(map(int, ids[number * step : number * step + tokens])) for number in range(count))


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


def share_cores(world: World, serve: ServeConfig) -> None:
    """A launched rank has one thread; a server's ranks share the cores."""
    if world.device.kind == "cpu":
        torch.set_num_threads(max(1, cores() // (world.size * serve.dp)))
