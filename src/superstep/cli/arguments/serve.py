"""Arguments of superstep serve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from superstep.cli.arguments.port import PortOptions
from superstep.cli.flags.options import Bounds, read_name
from superstep.plan.config import DeviceKind, Dtype
from superstep.serve.config import LEAST, MOST_READ_TIMEOUT_S, Quantize

DESCRIPTION = "Serve a model over HTTP with OpenAI's interface. MODEL is a run, a checkpoint or a Hugging Face folder."
COMMON = ("port", "host", "name", "plan.tp", "numerics.exact", "serve.context_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Options of a server's layout."""

    tp: Annotated[int, Bounds(least=LEAST["tp"])] = 1
    """Ranks that share the model."""
    dp: Annotated[int, Bounds(least=LEAST["dp"])] = 1
    """Replicas of the model, each on ranks of its own; a request goes to the least busy one."""
    device: DeviceKind | None = None
    """The device of the ranks; none uses GPUs if there are any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericsOptions:
    """Options of a server's numerics."""

    compute: Dtype | None = None
    """dtype of weights and keys; none uses the run's, and bf16 for a folder without one."""
    exact: bool | None = None
    """Whether answers have the bits of training, independent of the batch; none uses the run's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Options of the engine."""

    context_tokens: Annotated[int | None, Bounds(least=LEAST["context_tokens"])] = None
    """The most tokens of a prompt and its answer; none uses the run's sequence length, or the model's."""
    page_tokens: Annotated[int, Bounds(least=LEAST["page_tokens"])] = 16
    """Positions of one page of the KV cache."""
    pages: Annotated[int | None, Bounds(least=LEAST["pages"])] = None
    """Pages of the KV cache; none uses a quarter of the free memory, or less if that is enough."""
    step_tokens: Annotated[int, Bounds(least=LEAST["step_tokens"])] = 512
    """The most tokens that one step computes."""
    requests: Annotated[int, Bounds(least=LEAST["requests"])] = 64
    """The most requests that run at once."""
    quantize: Quantize | None = None
    """Quantization of weights: int8 and int4 of weights alone, w8a8 of activations as well; none keeps the weights."""
    calibration: str | None = None
    """A text file by which the codes of int4 are chosen (GPTQ, Frantar 2022); none rounds to the nearest."""
    adapters: str | None = None
    """Adapters in peft's format: a folder, NAME=FOLDER, or a folder of such folders, each with its own name; several
    separated by commas.
    """
    kernels: str | None = None
    """A folder for operations that are compiled on this CPU at the first start; none uses one in the user's cache,
    `off` uses torch.
    """
    admin_key: str | None = None
    """A key for the paths under /admin, or @FILE with the key, which `ps` does not show; none uses SUPERSTEP_ADMIN_KEY.
    Without a key those paths do not exist.
    """
    weights: tuple[str, ...] = ()
    """Folders from which new weights may be loaded, besides the run's or the model's own."""
    replay: str | None = None
    """Write each step of the engine as a line of this file, for superstep view."""
    speculate: str | None = None
    """Speculative decoding: `ngram` drafts tokens from the request's own text; a run or a folder is a draft model with
    the same vocabulary. It changes no token.
    """
    draft_tokens: Annotated[int, Bounds(least=LEAST["draft_tokens"])] = 4
    """The most draft tokens of a request in one step."""
    read_timeout_s: Annotated[float, Bounds(above=0, most=MOST_READ_TIMEOUT_S)] = 60.0
    """Seconds within which new weights must give the next tensor, or an adapter all of itself; else the update is
    refused.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions(PortOptions):
    """Options of a server."""

    name: str | None = None
    """The model's name for clients; none uses the folder's name."""
    plan: PlanOptions = field(default_factory=PlanOptions)
    numerics: NumericsOptions = field(default_factory=NumericsOptions)
    serve: ServeOptions = field(default_factory=ServeOptions)


def read(argv: Sequence[str]) -> tuple[Path, ServerOptions]:
    """The model, and the options.

    Raises:
        ConfigError: one of them is missing or wrong.
        SystemExit: after printing help.
    """
    missing = "no model is given; name a run, a checkpoint or a Hugging Face folder: superstep serve runs/demo."
    model, options = read_name(
        ServerOptions(), argv, missing, prog="superstep serve MODEL", description=DESCRIPTION, common=COMMON
    )
    return Path(model), options
