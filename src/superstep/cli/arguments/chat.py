"""Arguments of superstep chat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from superstep.cli.arguments.serve import NumericsOptions, PlanOptions, ServeOptions
from superstep.cli.flags.options import Bounds, read_name
from superstep.errors import ConfigError

DESCRIPTION = (
    "Chat with a model in the terminal. MODEL is a run, a checkpoint or a Hugging Face folder, which is loaded on this "
    "machine, or the URL of a server. Ctrl-C stops an answer, Ctrl-D ends the chat, /help lists the other commands."
)
COMMON = ("system", "temperature", "max_tokens", "model", "key", "numerics.compute", "serve.quantize")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """Options of a chat."""

    system: str | None = None
    """The system message of the conversation."""
    max_tokens: Annotated[int | None, Bounds(least=1)] = None
    """The most tokens of an answer; none uses the room of the context."""
    temperature: Annotated[float, Bounds(least=0, most=100)] = 0.8
    """Randomness of sampling; 0 takes the likeliest token each time."""
    top_p: Annotated[float, Bounds(above=0, most=1)] = 1.0
    """Draw among the likeliest tokens with this total probability."""
    seed: int | None = None
    """Of the draws; none uses another one for each answer."""
    model: str | None = None
    """Of a server: the model's name; none uses the first."""
    key: str | None = None
    """Of a server: its API key."""
    plan: PlanOptions = field(default_factory=PlanOptions)
    numerics: NumericsOptions = field(default_factory=NumericsOptions)
    serve: ServeOptions = field(default_factory=ServeOptions)


def read(argv: Sequence[str]) -> tuple[str, ChatOptions]:
    """The model or the URL, and the options.

    Raises:
        ConfigError: one of them is missing or wrong.
        SystemExit: after printing help.
    """
    missing = "no model is given; name a model or the URL of a server: superstep chat runs/demo."
    model, options = read_name(
        ChatOptions(), argv, missing, prog="superstep chat MODEL|URL", description=DESCRIPTION, common=COMMON
    )
    is_url = model.startswith(("http://", "https://"))
    if not is_url and (options.plan.tp, options.plan.dp) != (1, 1):
        raise ConfigError(
            f"plan.tp = {options.plan.tp}, plan.dp = {options.plan.dp}: a model that chat loads itself has one rank; "
            "start superstep serve with these flags, and chat with its URL."
        )
    if not is_url and (options.model or options.key):
        raise ConfigError("--model and --key are for the URL of a server; leave them out.")
    return model, options
