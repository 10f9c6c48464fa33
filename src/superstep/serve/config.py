"""How a model is served, as a value, and the plan by which it is cut for that. Without torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from superstep.errors import ConfigError, StateError, did_you_mean
from superstep.plan.config import DataConfig, Dtype, ModelConfig, NumericsConfig, PlanConfig, RunConfig
from superstep.plan.model.lookup import shape_of
from superstep.plan.resolution.resolve import Resolved, resolve

NGRAM = "ngram"
"""``ServeConfig.speculate`` where a request's own text says what to guess."""

Quantize = Literal["int8", "w8a8", "int4"]

MOST_READ_TIMEOUT_S = 240.0
"""Ranks that share a model wait for each other no longer than five minutes."""

LEAST = {
    "context_tokens": 2,
    "page_tokens": 1,
    "pages": 1,
    "step_tokens": 1,
    "requests": 1,
    "tp": 1,
    "dp": 1,
    "draft_tokens": 1,
}
"""The least value of each number of a ``ServeConfig``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """How a model is served.

    Attributes:
        context_tokens: the most tokens of a prompt and its answer; None takes what the model was made for.
        page_tokens: positions of a page.
        pages: of keys; None takes as many as ``requests`` whole contexts need, at most a quarter of the free memory.
        step_tokens: the most rows of one step.
        requests: the most requests that run at once.
        compute: dtype of weights and keys.
        exact: whether answers have the trainer's bits, whatever they are computed beside.
        tp: ranks that share the model.
        dp: replicas of it on this host, each with ranks of its own, which share the cores and the memory.
        quantize: how weights are held, a name of ``compute.quantize``; empty keeps them as they are.
        kernels: the folder for the decoder that is compiled here; None computes without.
        adapters: names and folders of the adapters that are there from the start.
        replay: a file for the steps of the engine, a line for each; None writes none.
        speculate: who guesses tokens, which the model then judges: ``ngram``, or the folder of a small model; empty for
            nobody.
        draft_tokens: the most tokens guessed for a request in one step.
        read_timeout_s: how long new weights may give no tensor, or an adapter nothing, before they are refused.
    """

    context_tokens: int | None = None
    page_tokens: int = 16
    pages: int | None = None
    step_tokens: int = 512
    requests: int = 64
    compute: Dtype = "bf16"
    exact: bool = False
    tp: int = 1
    dp: int = 1
    quantize: str = ""
    kernels: Path | None = None
    adapters: tuple[tuple[str, Path], ...] = ()
    replay: Path | None = None
    speculate: str = ""
    draft_tokens: int = 4
    read_timeout_s: float = 60.0


def usual_config(run: RunConfig | None) -> ServeConfig:
    """How a model is served where nothing else is said: as it was trained. None is a folder that no run has written."""
    if run is None:
        return ServeConfig()
    return ServeConfig(context_tokens=run.data.sequence_tokens, compute=run.numerics.compute, exact=run.numerics.exact)


def check_ranges(serve: ServeConfig) -> None:
    """Check every value by itself.

    Raises:
        ConfigError: one is out of its range.
    """
    for name, least in LEAST.items():
        value = getattr(serve, name)
        if value is not None and value < least:
            raise ConfigError(f"serve.{name} = {value} must be at least {least}.")
    if not 0 < serve.read_timeout_s <= MOST_READ_TIMEOUT_S:
        raise ConfigError(
            f"serve.read_timeout_s = {serve.read_timeout_s:g} must be above 0, and at most {MOST_READ_TIMEOUT_S:g}."
        )
    for name, choices in (("compute", get_args(Dtype)), ("quantize", get_args(Quantize))):
        value = getattr(serve, name)
        if value and value not in choices:
            raise ConfigError(f"serve.{name} = '{value}' is not known{did_you_mean(value, choices)}")


def plan_of(folder: Path, serve: ServeConfig) -> Resolved:
    """The plan by which a folder's model is cut for serving.

    Raises:
        ConfigError: the model cannot be served so.
        StateError: the folder holds no model.
    """
    config = folder / "config.json"
    if not config.is_file():
        raise StateError(f"'{folder}' holds no config.json; name a run, a checkpoint or a Hugging Face folder.")
    return plan_named(str(config), serve)


def plan_named(model: str, serve: ServeConfig) -> Resolved:
    """The plan by which a model is cut for serving: a named size, or the path of a config.json.

    Raises:
        ConfigError: there is no such model, or it cannot be served so.
    """
    shape = shape_of(ModelConfig(name=model))
    if serve.exact and shape.moe is not None and shape.moe.router != "dropless":
        raise ConfigError(
            f"serve.exact = true with model.router = '{shape.moe.router}': which tokens it drops depends on the whole "
            "sequence; set serve.exact = false."
        )
    return resolve(
        RunConfig(
            model=ModelConfig(name=model),
            data=DataConfig(sequence_tokens=min(shape.max_tokens, DataConfig().sequence_tokens)),
            plan=PlanConfig(tp=serve.tp, dp=1, microbatch=1),
            numerics=NumericsConfig(compute=serve.compute, exact=serve.exact),
        )
    )


def check_served(run: Resolved, serve: ServeConfig) -> None:
    """See that a model can be served as it is asked for.

    Raises:
        ConfigError: contexts are longer than the model or than all pages, or exact answers are asked of quantized
            weights.
    """
    most_tokens = run.shape.max_tokens
    context_tokens = serve.context_tokens or most_tokens
    if context_tokens > most_tokens:
        raise ConfigError(
            f"serve.context_tokens = {context_tokens} is more than the {most_tokens} tokens that the model was made "
            f"for; set serve.context_tokens to {most_tokens} or less."
        )
    if serve.pages is not None and serve.pages * serve.page_tokens < context_tokens:
        least = -(-context_tokens // serve.page_tokens)
        raise ConfigError(
            f"serve.pages = {serve.pages} of {serve.page_tokens} tokens do not hold one context of {context_tokens} "
            f"tokens; set serve.pages to {least} or more, or serve.context_tokens to "
            f"{serve.pages * serve.page_tokens} or less."
        )
    if serve.exact and serve.quantize:
        raise ConfigError(
            f"serve.quantize = '{serve.quantize}' with serve.exact = true: weights of few bits are not the trainer's; "
            "leave one of them out."
        )


def fast(serve: ServeConfig) -> ServeConfig:
    """How a model that guesses is served: its bits decide nothing."""
    return replace(serve, exact=False)


def check_vocab(small: Resolved, run: Resolved, name: str) -> None:
    """Refuse a model that guesses tokens of another vocabulary.

    Raises:
        ConfigError: it does.
    """
    if small.shape.vocab != run.shape.vocab:
        raise ConfigError(
            f"serve.speculate = '{name}' is a model of {small.shape.vocab} tokens, and the served one has "
            f"{run.shape.vocab}; name one of the same vocabulary, or ngram."
        )
