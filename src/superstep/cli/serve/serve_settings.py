"""How a model is served, from what was asked for and how it was trained."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

from superstep.cli.arguments.serve import NumericsOptions, PlanOptions, ServeOptions
from superstep.cli.resolve_model import find_model
from superstep.plan.config import RunConfig
from superstep.serve.config import NGRAM, ServeConfig
from superstep.serve.scheduling.lora_registry import folders_of


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
    settings = options.serve
    context = (
        run.data.sequence_tokens if run is not None and settings.context_tokens is None else settings.context_tokens
    )
    exact = run.numerics.exact if run is not None and options.numerics.exact is None else options.numerics.exact
    return ServeConfig(
        context_tokens=context,
        page_tokens=settings.page_tokens,
        pages=settings.pages,
        step_tokens=settings.step_tokens,
        requests=settings.requests,
        compute=options.numerics.compute or ("bf16" if run is None else run.numerics.compute),
        exact=bool(exact),
        tp=options.plan.tp,
        dp=options.plan.dp,
        quantize=settings.quantize or "",
        kernels=kernels_folder(settings.kernels),
        adapters=folders_of(settings.adapters or ""),
        speculate=_guesser(settings.speculate),
        draft_tokens=settings.draft_tokens,
        read_timeout_s=settings.read_timeout_s,
        replay=None if settings.replay is None else Path(settings.replay),
    )


def _guesser(guesser: str | None) -> str:
    """Who guesses: ``ngram``, the folder of a small model's weights, or nobody."""
    return guesser if guesser == NGRAM else str(find_model(Path(guesser)).folder) if guesser else ""


def kernels_folder(folder: str | None) -> Path | None:
    """The folder for compiled operations."""
    if folder is None:
        cache = os.environ.get("XDG_CACHE_HOME")
        return (Path(cache) if cache else Path.home() / ".cache") / "superstep" / "kernels"
    return None if folder == "off" else Path(folder)
