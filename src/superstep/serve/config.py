"""Settings of a server, as a value, and the plan that cuts its model. Without torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from superstep.errors import ConfigError, StateError, did_you_mean
from superstep.plan.config import DataConfig, Dtype, ModelConfig, NumericsConfig, PlanConfig, RunConfig
from superstep.plan.model.shape import ModelShape
from superstep.plan.model.sizes.lookup import shape_of
from superstep.plan.resolution.resolve import Resolved, resolve

NGRAM = "ngram"
"""Value of ``ServeConfig.speculate`` for drafts from a request's own text."""

SERVED: tuple[Dtype, ...] = ("fp32", "bf16")
"""Formats of a server's weights and keys."""

Quantize = Literal["int8", "w8a8", "int4"]

MOST_READ_TIMEOUT_S = 240.0
"""Ranks that share a model wait for each other for at most five minutes."""

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
    """Settings of a server.

    Attributes:
        context_tokens: the most tokens of a prompt and its answer; None uses the model's length.
        page_tokens: positions of a page.
        pages: of the KV cache; None uses as many as ``requests`` whole contexts need, at most a quarter of the free
            memory.
        step_tokens: the most rows of one step.
        requests: the most requests that run at once.
        compute: dtype of weights and keys.
        exact: whether answers have the trainer's bits, independent of the batch.
        tp: ranks that share the model.
        dp: replicas of it on this host, each with ranks of its own, which share the cores and the memory.
        quantize: a format of ``compute.quantize``; empty keeps the weights.
        calibration: a text file by which codes of 4 bits are chosen; None rounds to the nearest.
        kernels: the folder of the compiled decoder; None uses torch.
        adapters: names and folders of the adapters from the start.
        replay: a file for the log of the engine's steps; None writes none.
        speculate: drafter of speculative decoding: ``ngram``, or the folder of a draft model; empty for none.
        draft_tokens: the most draft tokens of a request in one step.
        read_timeout_s: the longest time without a tensor of new weights, or for a whole adapter, before an update is
            refused.
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
    calibration: Path | None = None
    kernels: Path | None = None
    adapters: tuple[tuple[str, Path], ...] = ()
    replay: Path | None = None
    speculate: str = ""
    draft_tokens: int = 4
    read_timeout_s: float = 60.0


def usual_config(run: RunConfig | None) -> ServeConfig:
    """The default settings of a server: those of its training, but fp32 for fp16. None is a folder without a run."""
    if run is None:
        return ServeConfig()
    compute = run.numerics.compute if run.numerics.compute in SERVED else "fp32"
    return ServeConfig(context_tokens=run.data.sequence_tokens, compute=compute, exact=run.numerics.exact)


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
    for name, choices in (("compute", SERVED), ("quantize", get_args(Quantize))):
        value = getattr(serve, name)
        if value and value not in choices:
            raise ConfigError(f"serve.{name} = '{value}' is not known{did_you_mean(value, choices)}")
    _check_calibration(serve)


def _check_calibration(serve: ServeConfig) -> None:
    if serve.calibration is not None and serve.quantize != "int4":
        raise ConfigError(
            f"serve.calibration = '{serve.calibration}': a text chooses codes of 4 bits alone; set serve.quantize to "
            "int4, or leave serve.calibration out."
        )


def plan_of(folder: Path, serve: ServeConfig) -> Resolved:
    """The plan that cuts a folder's model for serving.

    Raises:
        ConfigError: the model cannot be served with these settings.
        StateError: the folder holds no model.
    """
    config = folder / "config.json"
    if not config.is_file():
        raise StateError(f"'{folder}' holds no config.json; name a run, a checkpoint or a Hugging Face folder.")
    return plan_named(str(config), serve)


def plan_named(model: str, serve: ServeConfig) -> Resolved:
    """The plan that cuts a model for serving: a named size, or the path of a config.json.

    Raises:
        ConfigError: there is no such model, or it cannot be served with these settings.
    """
    shape = shape_of(ModelConfig(name=model))
    _require_attention(shape, model)
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


def _require_attention(shape: ModelShape, name: str) -> None:
    if shape.delta is not None:
        raise ConfigError(
            f"model.name = '{name}' has linear attention, and a server keeps keys and values but no state; train it "
            "here, and serve its Hugging Face folder with transformers."
        )
    if shape.latent is not None:
        raise ConfigError(
            f"model.name = '{name}' has latent attention, and a server's pages hold keys and values of heads; train it "
            "here, and serve its Hugging Face folder with transformers."
        )


def check_served(run: Resolved, serve: ServeConfig) -> None:
    """Check that a model supports the settings.

    Raises:
        ConfigError: it has linear or latent attention, contexts are longer than the model's or than all pages, or exact
            answers are combined with quantized weights.
    """
    _require_attention(run.shape, run.config.model.name)
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
            f"tokens; set serve.pages to {least} or more, or serve.context_tokens to {serve.pages * serve.page_tokens} "
            "or less."
        )
    if serve.exact and serve.quantize:
        raise ConfigError(
            f"serve.quantize = '{serve.quantize}' with serve.exact = true: weights of few bits are not the trainer's; "
            "leave one of them out."
        )


def fast(serve: ServeConfig) -> ServeConfig:
    """Settings of a draft model: its bits decide nothing."""
    return replace(serve, exact=False)


def check_vocab(small: Resolved, run: Resolved, name: str) -> None:
    """Check that a draft model has the same vocabulary.

    Raises:
        ConfigError: it has not.
    """
    if small.shape.vocab != run.shape.vocab:
        raise ConfigError(
            f"serve.speculate = '{name}' is a model of {small.shape.vocab} tokens, and the served one has "
            f"{run.shape.vocab}; name one of the same vocabulary, or ngram."
        )
