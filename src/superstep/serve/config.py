"""How a model is served, as a value, and the plan by which it is cut for that. Without torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from superstep.errors import ConfigError, StateError
from superstep.plan.config import DataConfig, Dtype, ModelConfig, NumericsConfig, PlanConfig, RunConfig
from superstep.plan.model.lookup import shape_of
from superstep.plan.resolution.resolve import Resolved, resolve

NGRAM = "ngram"
"""``ServeConfig.speculate`` where a request's own text says what to guess."""


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
