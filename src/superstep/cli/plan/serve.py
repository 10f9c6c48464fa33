"""superstep plan --serve: the forecast of a server, before it starts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from superstep.cli.arguments.plan_serve import ForecastOptions, read
from superstep.cli.plan.serve_prices import StepPrices, price_steps
from superstep.cli.plan.serve_text import serve_text
from superstep.cli.serve.serve_settings import serve_config
from superstep.comm.device import choose, pick
from superstep.errors import ConfigError, StateError
from superstep.hardware.cluster import Cluster
from superstep.hardware.cluster_file import cluster as cluster_of
from superstep.plan.config import RunConfig
from superstep.plan.model.sizes.named_sizes import SHAPES
from superstep.plan.resolution.resolve import Resolved
from superstep.planner.ranking.plan_request import own_bytes
from superstep.run.serving.served_model import find_model
from superstep.serve.config import NGRAM, ServeConfig, check_vocab, fast, plan_named
from superstep.serve.drafting.speculation_forecast import DraftForecast, guesses
from superstep.serve.load_rank import setting_model, usual_pages
from superstep.serve.scheduling.capacity_forecast import (
    ConcurrentRequests,
    FirstPrompt,
    PageCapacity,
    ServerSetup,
    crowds,
    firsts,
    rooms,
    weight_bytes,
)
from superstep.serve.scheduling.step import Budget


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeForecast:
    """The forecast of a server.

    Attributes:
        model: its name.
        parameters: of the whole model.
        where: the machine.
        way: how steps are computed.
        tp, dp: ranks that share the model, and replicas.
        spread: of the measured steps; None without a measurement.
        weight_bytes, key_bytes, beside_bytes: of a rank.
        page_bytes: of a rank's page.
        pages, page_tokens: number of pages, and positions of one.
        rooms: contexts x streams.
        firsts: single prompts.
        prompt_tokens, answer_tokens: of requests that arrive together.
        crowds: those requests.
        speculate: the drafter; empty without one.
        small_weight_bytes: of a rank, of the draft model. Its keys are part of each page.
        guesses: forecasts of speculative decoding.
    """

    model: str
    parameters: int
    where: str
    way: str
    tp: int
    dp: int
    spread: float | None
    weight_bytes: float
    key_bytes: float
    beside_bytes: float
    page_bytes: float
    pages: int
    page_tokens: int
    rooms: tuple[PageCapacity, ...]
    firsts: tuple[FirstPrompt, ...]
    prompt_tokens: int
    answer_tokens: int
    crowds: tuple[ConcurrentRequests, ...]
    speculate: str
    small_weight_bytes: float
    guesses: tuple[DraftForecast, ...]


def main(argv: Sequence[str]) -> int:
    """Print the forecast."""
    name, options = read(argv)
    model, trained = _model(name)
    guesser = options.serve.speculate or ""
    # The drafter is resolved here, as it may be a named size without a folder.
    config = serve_config(trained, replace(options, serve=replace(options.serve, speculate=None)))
    run = plan_named(model, config)
    small_run = _small_run(run, config, guesser)
    _check(run, config, options)
    cluster = None if options.cluster is None else cluster_of(options.cluster)
    if cluster is None:
        print("Measuring this machine, for about half a minute.", flush=True)
    priced = price_steps(run, small_run, config, cluster, options)
    free = _free_bytes(cluster, priced, run, config, options)
    forecast = foresee(name, run, config, priced, free, options)
    print(serve_text(forecast))
    if options.json is not None:
        Path(options.json).write_text(json.dumps(asdict(forecast), indent=1) + "\n", encoding="utf-8")
    return 0


def _model(name: str) -> tuple[str, RunConfig | None]:
    """The value of ``model.name``, and the run that trained it."""
    if name in SHAPES or name.endswith(".json"):
        return name, None
    try:
        model = find_model(Path(name))
    except StateError as error:
        raise StateError(f"{str(error).removesuffix('.')}; or a named size: llama3-8b, say.") from error
    config = model.folder / "config.json"
    if not config.is_file():
        raise StateError(f"'{model.folder}' holds no config.json; name a run, a checkpoint or a Hugging Face folder.")
    return str(config), model.run


def _small_run(run: Resolved, config: ServeConfig, guesser: str) -> Resolved | None:
    """The plan of the draft model; None without one."""
    if guesser in ("", NGRAM):
        return None
    model, _ = _model(guesser)
    small = plan_named(model, fast(config))
    check_vocab(small, run, guesser)
    return small


def _check(run: Resolved, config: ServeConfig, options: ForecastOptions) -> None:
    context = config.context_tokens or run.shape.max_tokens
    if context > run.shape.max_tokens:
        raise ConfigError(
            f"serve.context_tokens = {context} is more than the {run.shape.max_tokens} tokens that the model was made "
            f"for; set serve.context_tokens to {run.shape.max_tokens} or less."
        )
    if options.prompt + options.answer > context:
        raise ConfigError(
            f"--prompt {options.prompt} and --answer {options.answer} are more than a context of {context} tokens; "
            "make one of them smaller."
        )
    if options.cluster is None and options.plan.dp > 1:
        raise ConfigError(
            f"plan.dp = {options.plan.dp} without --cluster: replicas would share this machine; predict one replica, "
            "or name a cluster."
        )


def _free_bytes(
    cluster: Cluster | None, priced: StepPrices, run: Resolved, config: ServeConfig, options: ForecastOptions
) -> float:
    """Free memory of a rank after its weights."""
    own, beside = weight_bytes(setting_model(run, config), priced.rate), priced.rate.beside_bytes
    weights = own + priced.small_bytes
    if options.memory is not None:
        free = options.memory * 2**30 - weights
    elif cluster is None:
        device = choose(options.plan.device, config.tp)
        free = pick(0, device).free_bytes(config.tp) - weights - beside
    else:
        free = own_bytes(cluster) - weights - beside
    if free <= 0:
        small = f", with {priced.small_bytes / 2**30:.3g} GiB of serve.speculate" if priced.small else ""
        raise ConfigError(
            f"the weights of a rank take {weights / 2**30:.3g} GiB{small}, and no memory is left for the KV cache; "
            "raise plan.tp, or set serve.quantize."
        )
    return free


def foresee(
    name: str,
    run: Resolved,
    config: ServeConfig,
    priced: StepPrices,
    free_bytes: float,
    options: ForecastOptions,
) -> ServeForecast:
    """The forecast of a server.

    Raises:
        ConfigError: a context does not fit.
    """
    server, rate = _server_setup(run, config, priced, free_bytes), priced.rate
    speculate = options.serve.speculate or ""
    known = options.prompt + options.answer // 2
    return ServeForecast(
        model=name,
        parameters=run.outline.numel,
        where="this machine" if options.cluster is None else options.cluster,
        way=rate.way,
        tp=config.tp,
        dp=options.plan.dp,
        spread=rate.spread if priced.is_measured else None,
        weight_bytes=server.weight_bytes,
        key_bytes=server.key_bytes,
        beside_bytes=rate.beside_bytes,
        page_bytes=server.page_bytes,
        pages=server.pages,
        page_tokens=config.page_tokens,
        rooms=tuple(rooms(server)),
        firsts=tuple(firsts(server)),
        prompt_tokens=options.prompt,
        answer_tokens=options.answer,
        crowds=tuple(
            crowds(server, prompt_tokens=options.prompt, answer_tokens=options.answer, replicas=options.plan.dp)
        ),
        speculate=speculate,
        small_weight_bytes=priced.small_bytes,
        guesses=tuple(
            guesses(server, draft_tokens=config.draft_tokens, known=known, replicas=options.plan.dp)
            if speculate
            else ()
        ),
    )


def _server_setup(run: Resolved, config: ServeConfig, priced: StepPrices, free_bytes: float) -> ServerSetup:
    """The server's configuration, with as many pages as it would have."""
    model, small = setting_model(run, config), priced.small
    context = config.context_tokens or run.shape.max_tokens
    page_bytes = config.page_tokens * (model.key_bytes + (0 if small is None else small.model.key_bytes))
    least = -(-context // config.page_tokens)
    pages = config.pages or usual_pages(least, config.requests, int(free_bytes), page_bytes)
    if pages < least or pages * page_bytes > free_bytes:
        raise ConfigError(
            f"serve.pages = {pages} of {config.page_tokens} tokens: a context of {context} tokens takes {least} pages, "
            f"and there is room for {int(free_bytes // page_bytes)}; set serve.context_tokens or serve.pages."
        )
    return ServerSetup(
        model=model,
        rate=priced.rate,
        pages=pages,
        page_tokens=config.page_tokens,
        budget=Budget(tokens=config.step_tokens, requests=config.requests),
        context_tokens=context,
        small=small,
    )
