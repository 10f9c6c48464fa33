"""From a folder of weights to an engine: rank 0's part of the model, the scheduler's pages and the drafts."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

from superstep.comm.device import Device
from superstep.comm.mesh import Group
from superstep.cost.serve import ComputeMode
from superstep.numerics.attention.invariant_attention import BLOCK
from superstep.serve.compute.draft_model import DraftModel
from superstep.serve.compute.paged_attention import FAST_BLOCK
from superstep.serve.compute.runner.model_runner import ModelRunner
from superstep.serve.config import NGRAM, ServeConfig
from superstep.serve.drafting.grammar_protocol import Matchers
from superstep.serve.drafting.speculate import Drafter, NgramDrafter, Speculation
from superstep.serve.engine import InferenceEngine, StepObserver
from superstep.serve.engine_control import EngineController
from superstep.serve.files.weights import read_version
from superstep.serve.load_rank import NOTHING, KnownModel, Rank, load_rank, setting_model
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
    observer = None if watch is None else watch(setting)
    pages = Pages(rank.pages, serve.page_tokens)
    guesser: Drafter | None = NgramDrafter() if serve.speculate == NGRAM else None
    if rank.small is not None:
        guesser = DraftModel(model.guess_logits, vocab=info.vocab, page_tokens=serve.page_tokens)
    speculation = Speculation(guesser, serve.draft_tokens)
    engine = InferenceEngine(model, info, pages, setting.budget, matchers, speculation, observer)
    for name, place in serve.adapters:
        engine.adapters.load(name, place)
    return engine, EngineController(engine, model)
