"""What is planned for: a model, a cluster, and what is settled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from superstep.cost.closed.memory import COMMUNICATOR_BYTES, CONTEXT_BYTES, USABLE
from superstep.cost.closed.uncertainty import FULL
from superstep.errors import ConfigError, did_you_mean
from superstep.hardware.cluster import Cluster
from superstep.hardware.cluster_file import cluster as cluster_of
from superstep.plan.config import ZERO_BUBBLE, Dtype, ModelConfig, PlanConfig, RunConfig, StateConfig
from superstep.plan.config_io import build, read_config
from superstep.plan.model.sizes.lookup import shape_of
from superstep.plan.resolution.resolve import resolve
from superstep.planner.search_problem import FIELDS, Rule, SearchProblem

USUAL_TOKENS = 2**22
"""Of a step, where nobody says: what Llama 3 begins with (Dubey 2024, sec. 3.4.1)."""
USUAL_SEQUENCE = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """The model's work, the cluster, and the fixed fields of the plan."""

    cluster: str = ""
    """Number and name of chips, for example 128xH100, or the path of a cluster's TOML file."""
    tokens: float | None = None
    """Tokens of the whole run; prints its days, energy and price."""
    global_batch: int | None = None
    """Sequences in a step; none takes the value of the run.toml, or about four million tokens."""
    sequence: int | None = None
    """Tokens of a sequence; none takes the value of the run.toml, or the model's context, at most 8,192."""
    memory: float | None = None
    """GiB of a chip that a plan may fill; none takes all but the device's context and the communicators' buffers."""
    top: int = 5
    """The number of plans to show; each splits other axes."""
    fix: tuple[str, ...] = ()
    """Fields with a fixed value: plan.tp=4 plan.schedule=1f1b, or numerics.compute=bf16."""
    fallback: int = 0
    """Also show plans after the loss of one node, of two nodes, and so on, up to this number."""
    mtbf: float | None = None
    """Hours between failures of one chip with its share of the host; none takes the published figure of the chip."""
    price: float | None = None
    """Price of a chip for an hour; none takes the value of the cluster file."""


def check_request(request: PlanRequest) -> None:
    """See that its numbers can be used. Raises ConfigError where one cannot."""
    if not request.cluster:
        raise ConfigError(
            "--cluster is missing; set it to a number and a name of chips, for example 64xH100, or to a TOML file."
        )
    above = {"--top": request.top, "--global-batch": request.global_batch, "--sequence": request.sequence}
    for name, value in above.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name} = {value} must be at least 1.")
    positive = {
        "--tokens": request.tokens,
        "--memory": request.memory,
        "--mtbf": request.mtbf,
        "--price": request.price,
    }
    for name, number in positive.items():
        if number is not None and not 0 < number < float("inf"):
            raise ConfigError(f"{name} = {number} must be above 0.")
    if request.fallback < 0:
        raise ConfigError(f"--fallback = {request.fallback} must be at least 0.")


def problems(model: str, request: PlanRequest) -> list[SearchProblem]:
    """The problem in each format that the chip multiplies in, the faster first. Raises ConfigError where the model, the
    cluster or a number cannot be used.
    """
    known_cluster = cluster_of(request.cluster)
    base = _base(model, known_cluster, request)
    rules, only = _read_fixed(request.fix)
    if base.numerics.compile:
        rules = (*rules, *(Rule("schedule", name, is_wanted=False) for name in ZERO_BUBBLE))
    halves: tuple[Dtype, ...] = ("bf16", "fp16") if only == "fp16" or not known_cluster.chip.peak("bf16") else ("bf16",)
    formats: list[Dtype] = [
        each for each in (*halves, "fp32") if known_cluster.chip.peak(each) and only in (None, each)
    ]
    if not formats:
        known = ", ".join(each for each, _ in known_cluster.chip.flops_per_s)
        raise ConfigError(
            f"{known_cluster.chip.name} multiplies in {known}, and a plan in {only or 'bf16, fp16 or fp32'}; choose "
            f"another chip{'' if only is None else ', or leave numerics.compute open'}."
        )
    memory = memory_of(known_cluster, request.memory)
    return [
        SearchProblem(base=base, cluster=known_cluster, compute=each, memory_bytes=memory, rules=rules)
        for each in formats
    ]


def memory_of(cluster: Cluster, gib: float | None) -> float:
    """Bytes of a chip that a plan may fill.

    By default so many that it fits with a probability of ``SURE``, less the device's context and the communicators'
    buffers.
    """
    if gib is None:
        return own_bytes(cluster, FULL)
    if gib * 2**30 > own_bytes(cluster):
        has = math.floor(100 * own_bytes(cluster) / 2**30) / 100
        raise ConfigError(
            f"--memory = {gib:g} GiB is more than a chip has beside its context and communicators; set it to {has:.4g} "
            "or less."
        )
    return gib * 2**30


def own_bytes(cluster: Cluster, share: float = USABLE) -> float:
    """Of such a share of a chip's memory, what is left beside the device's context and the communicators' buffers."""
    beside = CONTEXT_BYTES + (COMMUNICATOR_BYTES if cluster.chips > 1 else 0.0)
    return share * cluster.chip.memory_bytes - beside


def _base(model: str, cluster: Cluster, request: PlanRequest) -> RunConfig:
    """The run without its layout."""
    is_run = model.endswith(".toml")
    config = read_config(Path(model)) if is_run else RunConfig(model=ModelConfig(name=model))
    if config.model.source is not None:
        raise ConfigError(f"model.source = '{config.model.source}': its steps are not predicted; leave it out.")
    if config.numerics.exact:
        raise ConfigError("numerics.exact = true: steps of exact mode are not predicted; set it to false.")
    if config.lora is not None:
        raise ConfigError(
            "lora: layouts are ranked for training every weight; leave [lora] out, or price one layout: superstep view "
            f"{model}."
        )
    if config.freeze is not None:
        raise ConfigError(
            "freeze: layouts are ranked for training every weight; leave [freeze] out, or price one layout: superstep "
            f"view {model}."
        )
    if config.plan.rules:
        raise ConfigError(f"plan.rules = {dict(config.plan.rules)}: other cuts are not predicted; leave them out.")
    shape = shape_of(config.model, is_priced=True)
    sequence = request.sequence or (config.data.sequence_tokens if is_run else min(shape.max_tokens, USUAL_SEQUENCE))
    batch = request.global_batch or (config.train.batch_sequences if is_run else _usual_batch(cluster.chips, sequence))
    state = config.state if is_run else StateConfig(dir=f"runs/{Path(model).stem}")
    base = replace(
        config,
        data=replace(config.data, sequence_tokens=sequence),
        train=replace(config.train, batch_sequences=batch),
        plan=PlanConfig(prefetch=config.plan.prefetch),
        state=state,
    )
    resolve(base, is_priced=True)
    return base


def _usual_batch(chips: int, sequence_tokens: int) -> int:
    """About ``USUAL_TOKENS``, in a number of sequences that has the odd factors of the chips."""
    odd = chips // (chips & -chips)
    return odd * int(2 ** max(round(math.log2(USUAL_TOKENS / sequence_tokens / odd)), 0))


def _read_fixed(fix: Sequence[str]) -> tuple[tuple[Rule, ...], Dtype | None]:
    """The rules, and the one format if one is asked for."""
    rules: list[Rule] = []
    compute: Dtype | None = None
    for word in fix:
        name, has_value, text = word.partition("=")
        section, _, field = name.partition(".")
        if not has_value:
            raise ConfigError(f"--fix {word}: a field and its value belong there, plan.tp=4 say.")
        if name == "numerics.compute":
            known: dict[str, Dtype] = {each: each for each in get_args(Dtype)}
            if text not in known:
                raise ConfigError(f"--fix {word}: no such format{did_you_mean(text, known)}")
            compute = known[text]
            continue
        if section != "plan" or field not in FIELDS:
            choices = [*(f"plan.{each}" for each in FIELDS), "numerics.compute"]
            raise ConfigError(f"--fix {word}: a plan has no such field{did_you_mean(name, choices)}")
        rules.append(Rule(field, _value(field, text)))
    return tuple(rules), compute


def _value(field: str, text: str) -> object:
    """A value as ``[plan]`` has it; raises ConfigError where it may not have it."""
    raw: object = text
    if text.isdigit():
        raw = int(text)
    elif text in ("true", "false"):
        raw = text == "true"
    elif text == "none" and field == "microbatch_group":
        return None
    return getattr(build(PlanConfig, {field: raw}, "plan."), field)
