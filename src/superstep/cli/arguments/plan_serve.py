"""Arguments of superstep plan --serve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from superstep.cli.arguments.serve import NumericsOptions, PlanOptions, ServeOptions
from superstep.cli.flags.new_file import require_new_file
from superstep.cli.flags.options import Bounds, read_name

DESCRIPTION = (
    "Predict a server of a model before it starts: bytes, pages of the KV cache, contexts x streams, time to the first "
    "token, tokens/s. MODEL is a run, a checkpoint, a Hugging Face folder or config.json, or a named size."
)
COMMON = ("cluster", "prompt", "answer", "plan.tp", "numerics.compute", "serve.context_tokens", "serve.quantize")


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastOptions:
    """Options of a forecast."""

    cluster: str | None = None
    """Chips and their number, such as 1xH100, or a cluster file; none measures this machine."""
    memory: Annotated[float | None, Bounds(above=0, is_finite=True)] = None
    """GiB of a rank for weights and keys; none uses the free memory here, or the chip's own."""
    prompt: Annotated[int, Bounds(least=1)] = 256
    """Tokens of each prompt, for requests that arrive together."""
    answer: Annotated[int, Bounds(least=1)] = 128
    """Tokens of each answer, likewise."""
    json: str | None = None
    """Write the forecast as JSON."""
    plan: PlanOptions = field(default_factory=PlanOptions)
    numerics: NumericsOptions = field(default_factory=NumericsOptions)
    serve: ServeOptions = field(default_factory=ServeOptions)


def read(argv: Sequence[str]) -> tuple[str, ForecastOptions]:
    """The model, and the options.

    Raises:
        ConfigError: one of them is missing or wrong.
        SystemExit: after printing help.
    """
    flags = [word for word in argv if word not in ("--serve", "--serve=true")]
    missing = "no model is given; name a model, then any flags: superstep plan runs/demo --serve."
    model, options = read_name(
        ForecastOptions(), flags, missing, prog="superstep plan MODEL --serve", description=DESCRIPTION, common=COMMON
    )
    if options.json is not None:
        require_new_file("--json", Path(options.json))
    return model, options
