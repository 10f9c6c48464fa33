"""Divisibility: what must divide what, so that sequences, experts and replicas can be spread over ranks."""

from __future__ import annotations

from superstep.errors import ConfigError
from superstep.plan.config import PlanConfig, RunConfig, setting_text
from superstep.plan.model.attention_rule import DeltaShape
from superstep.plan.model.outline import Outline
from superstep.plan.model.shape import ModelShape
from superstep.plan.sharding.sequence import cp_of_heads, cp_of_tokens, multiple


def check_context(config: RunConfig, shape: ModelShape | None, plan: PlanConfig, outline: Outline) -> None:
    """Whether context-parallel ranks can share a sequence. Raises ConfigError where the sequence's length or the heads
    do not divide, or where samples have no tokens that the model knows.
    """
    _check_shared_tokens(config, outline)
    tp = plan.tp if plan.sequence_parallel or (shape and shape.moe) else 1
    tokens, shape = outline.tokens or config.data.sequence_tokens, shape or outline.decoder
    if plan.cp > 1 and tokens % multiple(plan.cp, tp):
        setting = setting_text("data.sequence_tokens", tokens) if outline.tokens is None else f"CAPACITY = {tokens}"
        raise ConfigError(
            f"{setting} must be a multiple of {multiple(plan.cp, tp)}: "
            f"plan.cp = {plan.cp} cuts it into {2 * plan.cp} chunks"
            f"{f', and plan.tp = {tp} splits two of them' if tp > 1 else ''}; "
            f"set plan.cp to one of {cp_of_tokens(tokens, tp)}."
        )
    if plan.cp == 1 or plan.context == "ring":
        return
    if shape is None:
        raise ConfigError(
            f"plan.cp = {plan.cp} with plan.context = 'ulysses' gives whole heads to each rank, and a model of one's "
            "own does not say how many it has; set plan.context to 'ring'."
        )
    choices = cp_of_heads(shape.heads, shape.kv_heads, plan.tp)
    mode = " and numerics.exact = true" if config.numerics.exact else ""
    if config.numerics.exact:
        # A key head on several ranks would have its gradient summed in an order that depends on cp.
        choices = [n for n in choices if shape.kv_heads // plan.tp % n == 0]
    if plan.cp not in choices:
        raise ConfigError(
            f"plan.cp = {plan.cp} with plan.context = 'ulysses'{mode} gives whole heads to each rank, and plan.tp = "
            f"{plan.tp} leaves {shape.heads // plan.tp} query and {shape.kv_heads // plan.tp} key heads; "
            f"set plan.cp to one of {choices}, or plan.context to 'ring'."
        )


def _check_shared_tokens(config: RunConfig, outline: Outline) -> None:
    """Check that samples have tokens where the run cuts them.

    Raises:
        ConfigError: it does, and the model has no decoder behind encoders.
    """
    if config.data.source is None or outline.decoder is not None:
        return
    about = f"and the samples of data.source = '{config.data.source}' are no text; "
    if config.plan.cp > 1:
        raise ConfigError(f"plan.cp = {config.plan.cp} shares each sequence of tokens, {about}set plan.cp to 1.")
    if config.numerics.exact_chunks is not None:
        raise ConfigError(
            f"numerics.exact_chunks = {config.numerics.exact_chunks} are parts of a sequence of tokens, {about}leave "
            "it out."
        )


def check_rules(config: RunConfig, shape: ModelShape, plan: PlanConfig) -> None:
    """Check that the plan can compute every layer's mixer. Raises ConfigError where ranks would share too short a
    sequence of linear attention.
    """
    if plan.cp > 1 and shape.delta is not None:
        _check_runs(config, shape.delta, plan)


def _check_runs(config: RunConfig, delta: DeltaShape, plan: PlanConfig) -> None:
    """Whether a run has the tokens before the next one that its convolution reads."""
    tokens, least = config.data.sequence_tokens, delta.taps - 1
    if tokens // (2 * plan.cp) < least:
        raise ConfigError(
            f"plan.cp = {plan.cp} cuts data.sequence_tokens = {tokens} into {2 * plan.cp} runs of "
            f"{tokens // (2 * plan.cp)}, and the convolution before linear attention reads {least} tokens beside each; "
            f"set data.sequence_tokens to {2 * plan.cp * least} or more."
        )


def check_experts(config: RunConfig, shape: ModelShape | None, plan: PlanConfig) -> None:
    """Whether expert-parallel ranks can share the experts, and tp ranks the tokens. Raises ConfigError where there are
    no experts, or they do not divide.
    """
    assert plan.dp is not None
    if shape is None or shape.moe is None:
        if plan.ep > 1:
            model, mend = f"model.name = '{config.model.name}'", ", or model.experts to the number of experts"
            if shape is None:
                model, mend = config.model.label, ""
            raise ConfigError(f"plan.ep = {plan.ep} needs experts, but {model} has none; set plan.ep to 1{mend}.")
        return
    ranks = plan.dp * plan.cp * plan.tp
    choices = [n for n in range(1, ranks + 1) if ranks % n == 0 and shape.moe.experts % n == 0]
    if plan.ep not in choices:
        raise ConfigError(
            f"plan.ep = {plan.ep} must divide the model.experts = {shape.moe.experts} and the plan.dp · plan.cp · "
            f"plan.tp = {ranks} ranks; set plan.ep to one of {choices}."
        )


def check_replicas(shape: ModelShape | None, plan: PlanConfig) -> None:
    """Whether the ranks with the same parameters, and those with the same experts, divide into the replicas. Raises
    ConfigError where they do not, or nothing is sharded that could be replicated.
    """
    if plan.replicas == 1:
        return
    assert plan.dp is not None
    sharers = plan.dp * plan.cp
    choices = [n for n in range(1, sharers) if sharers % n == 0] or [1]
    if plan.replicas not in choices:
        raise ConfigError(
            f"plan.replicas = {plan.replicas} must leave two or more of the plan.dp · plan.cp = {sharers} ranks to "
            f"each copy, and divide them; set plan.replicas to one of {choices}."
        )
    alike = sharers * plan.tp // plan.ep
    if shape is not None and shape.moe is not None and alike % plan.replicas:
        raise ConfigError(
            f"plan.replicas = {plan.replicas} must divide the {alike} ranks that hold the same experts with "
            f"plan.ep = {plan.ep}; set plan.replicas to one of {[n for n in choices if alike % n == 0]}."
        )
    if plan.zero == 0:
        raise ConfigError(
            f"plan.replicas = {plan.replicas} with plan.zero = 0: every rank is a replica then; "
            "set plan.replicas to 1, or plan.zero to one of [1, 2, 3]."
        )
