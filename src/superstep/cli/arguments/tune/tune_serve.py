"""Arguments of superstep tune serve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from superstep.cli.arguments.port import PortOptions
from superstep.cli.arguments.serve import NumericsOptions
from superstep.cli.flags.options import Bounds, read_name
from superstep.plan.config import DeviceKind

DESCRIPTION = (
    "Serve Tinker's client, which trains adapters of a model over HTTP. MODEL is a run, a checkpoint or a Hugging Face "
    "folder. For the client, set TINKER_BASE_URL to the printed address, and TINKER_API_KEY to the key, or to tml-any "
    "if there is no key."
)
COMMON = ("port", "host", "name", "key", "state", "numerics.compute", "numerics.exact")


@dataclass(frozen=True, slots=True, kw_only=True)
class TinkerOptions(PortOptions):
    """Options of the Tinker server."""

    name: str | None = None
    """The model's name for clients, besides its folder's path; none uses the folder's name."""
    key: str | None = None
    """A key that clients must send, which begins with tml-, or @FILE with the key, which `ps` does not show; none uses
    TINKER_API_KEY, and without one needs none.
    """
    state: str = "runs/tinker"
    """The folder of clients' saved weights."""
    device: DeviceKind | None = None
    """The device; none uses a GPU if there is one."""
    context_tokens: Annotated[int | None, Bounds(least=2)] = None
    """The most tokens of a sequence, and of a prompt and its answer; none uses the model's length."""
    alpha: Annotated[float, Bounds(above=0, is_finite=True)] = 32.0
    """The strength of adapters: the product of the factors is multiplied by alpha / rank."""
    most_rank: Annotated[int, Bounds(least=1)] = 128
    """The largest rank of an adapter."""
    models: Annotated[int, Bounds(least=1)] = 8
    """The most models that exist at once; they share the base weights."""
    adapters: Annotated[int, Bounds(least=1)] = 16
    """The most saved weights in memory for sampling at once; others are read again on request."""
    batch_tokens: Annotated[int, Bounds(least=1)] = 8192
    """The most tokens of one pass through the model, padding included."""
    kernels: str | None = None
    """A folder for operations that are compiled on this CPU at the first start; none uses one in the user's cache,
    `off` uses torch.
    """
    numerics: NumericsOptions = field(default_factory=NumericsOptions)


def read(argv: Sequence[str]) -> tuple[Path, TinkerOptions]:
    """The model, and the options.

    Raises:
        ConfigError: one of them is missing or wrong.
        SystemExit: after printing help.
    """
    missing = "no model is given; name a run, a checkpoint or a Hugging Face folder: superstep tune serve runs/demo."
    model, options = read_name(
        TinkerOptions(), argv, missing, prog="superstep tune serve MODEL", description=DESCRIPTION, common=COMMON
    )
    return Path(model), options
