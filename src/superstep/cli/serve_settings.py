"""How a model is served, from what was asked for and how it was trained."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

from superstep.cli.arguments.serve import NumericsOptions, PlanOptions, ServeOptions
from superstep.cli.resolve_model import find_model
from superstep.plan.config import RunConfig
from superstep.serve.config import NGRAM, ServeConfig
from superstep.serve.lora_registry import folders_of


class ServeSettings(Protocol):
    """The options that say how a model is served."""

    @property
    def plan(self) -> PlanOptions: ...
    @property
    def numerics(self) -> NumericsOptions: ...
    @property
    def serve(self) -> ServeOptions: ...


def serve_config(run: RunConfig | None, options: ServeSettings) -> ServeConfig:
    """How a model is served, what was not asked for taken from its run, if it has one."""
    asked = options.serve
    context = run.data.sequence_tokens if run is not None and asked.context_tokens is None else asked.context_tokens
    exact = run.numerics.exact if run is not None and options.numerics.exact is None else options.numerics.exact
    return ServeConfig(
        context_tokens=context,
        page_tokens=asked.page_tokens,
        pages=asked.pages,
        step_tokens=asked.step_tokens,
        requests=asked.requests,
        compute=options.numerics.compute or ("bf16" if run is None else run.numerics.compute),
        exact=bool(exact),
        tp=options.plan.tp,
        dp=options.plan.dp,
        quantize=asked.quantize or "",
        kernels=kernels_folder(asked.kernels),
        adapters=folders_of(asked.adapters or ""),
        speculate=_guesser(asked.speculate),
        draft_tokens=asked.draft_tokens,
        read_timeout_s=asked.read_timeout_s,
        replay=None if asked.replay is None else Path(asked.replay),
    )


def _guesser(asked: str | None) -> str:
    """Who guesses: ``ngram``, the folder of a small model's weights, or nobody."""
    return asked if asked == NGRAM else str(find_model(Path(asked)).folder) if asked else ""


def kernels_folder(asked: str | None) -> Path | None:
    """The folder for compiled operations."""
    if asked is None:
        cache = os.environ.get("XDG_CACHE_HOME")
        return (Path(cache) if cache else Path.home() / ".cache") / "superstep" / "kernels"
    return None if asked == "off" else Path(asked)
