"""Settings of a server, from its options and its run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

from superstep.cli.arguments.serve import NumericsOptions, PlanOptions, ServeOptions
from superstep.plan.config import RunConfig
from superstep.run.serving.served_model import guesser_folder
from superstep.serve.config import ServeConfig, usual_config
from superstep.serve.scheduling.lora_registry import folders_of


class ServeSettings(Protocol):
    """Options of a server's settings."""

    @property
    def plan(self) -> PlanOptions: ...
    @property
    def numerics(self) -> NumericsOptions: ...
    @property
    def serve(self) -> ServeOptions: ...


def serve_config(run: RunConfig | None, options: ServeSettings) -> ServeConfig:
    """Settings of a server; missing options come from its run, if any."""
    settings, usual, exact = options.serve, usual_config(run), options.numerics.exact
    return ServeConfig(
        context_tokens=settings.context_tokens or usual.context_tokens,
        page_tokens=settings.page_tokens,
        pages=settings.pages,
        step_tokens=settings.step_tokens,
        requests=settings.requests,
        compute=options.numerics.compute or usual.compute,
        exact=usual.exact if exact is None else exact,
        tp=options.plan.tp,
        dp=options.plan.dp,
        quantize=settings.quantize or "",
        calibration=None if settings.calibration is None else Path(settings.calibration),
        kernels=kernels_folder(settings.kernels),
        adapters=folders_of(settings.adapters or ""),
        speculate=guesser_folder(settings.speculate or ""),
        draft_tokens=settings.draft_tokens,
        read_timeout_s=settings.read_timeout_s,
        replay=None if settings.replay is None else Path(settings.replay),
    )


def kernels_folder(folder: str | None) -> Path | None:
    """The folder for compiled operations."""
    if folder is None:
        cache = os.environ.get("XDG_CACHE_HOME")
        return (Path(cache) if cache else Path.home() / ".cache") / "superstep" / "kernels"
    return None if folder == "off" else Path(folder)
