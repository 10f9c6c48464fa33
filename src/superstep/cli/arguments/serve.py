"""What superstep serve is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, TypeVar

from superstep.cli.arguments.port import PortOptions
from superstep.cli.flags.options import Bounds, read_flags
from superstep.errors import ConfigError
from superstep.plan.config import DeviceKind, Dtype
from superstep.serve.config import MOST_READ_TIMEOUT_S, Quantize

DESCRIPTION = (
    "Answer prompts over HTTP, as OpenAI's interface has it: MODEL is a run, a checkpoint or a Hugging Face folder."
)
COMMON = ("port", "host", "name", "plan.tp", "numerics.exact", "serve.context_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """How the model is cut."""

    tp: Annotated[int, Bounds(least=1)] = 1
    """Ranks that share the model."""
    dp: Annotated[int, Bounds(least=1)] = 1
    """Replicas of the model, each on ranks of its own; a request is answered by the one with the least to do."""
    device: DeviceKind | None = None
    """Where they compute; none takes GPUs where there are any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericsOptions:
    """How it computes."""

    compute: Dtype | None = None
    """dtype of weights and keys; none takes the run's, and bf16 for a folder without one."""
    exact: bool | None = None
    """Whether answers have the bits of training, whatever they are computed beside; none takes the run's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What a step of the engine holds."""

    context_tokens: Annotated[int | None, Bounds(least=2)] = None
    """The most tokens of a prompt and its answer; none takes the run's sequence, or what the model was made for."""
    page_tokens: Annotated[int, Bounds(least=1)] = 16
    """Positions of one page of keys."""
    pages: Annotated[int | None, Bounds(least=1)] = None
    """Pages of keys; none takes a quarter of the free memory, if as much is of use."""
    step_tokens: Annotated[int, Bounds(least=1)] = 512
    """The most tokens that one step computes."""
    requests: Annotated[int, Bounds(least=1)] = 64
    """The most requests that are computed at once."""
    quantize: Quantize | None = None
    """How weights are held: int8 and int4 for the weights alone, w8a8 for what they are multiplied with as well; none
    keeps them as they are."""
    adapters: str | None = None
    """Adapters as peft writes them: a folder, NAME=FOLDER, or a folder of such folders, each called by its own name;
    several with commas between."""
    kernels: str | None = None
    """A folder for operations that are compiled on this CPU at the first start; none takes one in the user's cache,
    `off` computes without."""
    admin_key: str | None = None
    """A key for the paths under /admin, or @FILE that holds it, which `ps` does not show; none takes it from
    SUPERSTEP_ADMIN_KEY. Without one those paths are not there."""
    weights: tuple[str, ...] = ()
    """Folders that new weights may be taken from, beside the run's or the model's own."""
    replay: str | None = None
    """Write each step of the engine as a line of this file, for superstep view."""
    speculate: str | None = None
    """Who guesses tokens, of which the model judges several at once: `ngram` takes them from the request's own text; a
    run or a folder is a small model of the same vocabulary. It changes no token."""
    draft_tokens: Annotated[int, Bounds(least=1)] = 4
    """The most tokens guessed for a request in one step."""
    read_timeout_s: Annotated[float, Bounds(above=0, most=MOST_READ_TIMEOUT_S)] = 60.0
    """Seconds in which new weights must give a tensor, or an adapter all of itself; else the change is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions(PortOptions):
    """Where to answer, and how."""

    name: str | None = None
    """What clients call the model; none takes the folder's name."""
    plan: PlanOptions = field(default_factory=PlanOptions)
    numerics: NumericsOptions = field(default_factory=NumericsOptions)
    serve: ServeOptions = field(default_factory=ServeOptions)


def read(argv: Sequence[str]) -> tuple[Path, ServerOptions]:
    """The model, and the rest.

    Raises:
        ConfigError: one of them is missing or wrong.
        SystemExit: help was asked for, and has been given.
    """
    missing = "name what to serve: a run, a checkpoint or a Hugging Face folder: superstep serve runs/demo."
    model, options = read_model(
        ServerOptions(), argv, missing, prog="superstep serve MODEL", description=DESCRIPTION, common=COMMON
    )
    return Path(model), options


Flags = TypeVar("Flags")


def read_model(
    defaults: Flags, argv: Sequence[str], missing: str, *, prog: str, description: str, common: Sequence[str]
) -> tuple[str, Flags]:
    """The word that names a model, and the flags behind it.

    Args:
        defaults: the options as they are without flags.
        argv: of the verb.
        missing: what is said where no model is named.
        prog, description, common: of its help, as ``read_flags`` takes them.

    Raises:
        ConfigError: the model is missing, or a flag is wrong.
        SystemExit: help was asked for, and has been given.
    """
    words = [word for word in argv[:1] if not word.startswith("-")]
    options = read_flags(defaults, argv[len(words) :], prog=prog, description=description, common=common)
    if not words:
        raise ConfigError(missing)
    return words[0], options
