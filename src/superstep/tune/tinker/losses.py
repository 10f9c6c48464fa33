"""Tinker's losses by name, and their input streams.

    name                 inputs beside target_tokens   loss, summed over tokens               in numerics/policy.py
    cross_entropy        weights (else 1)              -w · logp                              CrossEntropy
    importance_sampling  logprobs, advantages          -exp(logp - logprobs) · A              ratio
    ppo                  logprobs, advantages          -min(r A, clip(r, low, high) A)        clip

https://tinker-docs.thinkingmachines.ai/losses
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from superstep.errors import DataError, did_you_mean
from superstep.numerics.objective import CROSS_ENTROPY, Objective
from superstep.numerics.policy import PolicyLoss, Surrogate
from superstep.tune.tinker.proto_messages import Datum, Numbers

TARGETS = "target_tokens"
LOW, HIGH = "clip_low_threshold", "clip_high_threshold"

Settings = Mapping[str, float | str]


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedLoss:
    """A loss under Tinker's name.

    Attributes:
        make: makes the objective from the settings.
        streams: our name of each input.
        optional: inputs that may be left out: they default to 1 for each token.
        settings: with their defaults.
    """

    make: Callable[[Mapping[str, float]], Objective]
    streams: Mapping[str, str]
    optional: tuple[str, ...] = ()
    settings: Mapping[str, float]


def _clip(bounds: Mapping[str, float], surrogate: Surrogate = "clip") -> Objective:
    low, high = bounds[LOW], bounds[HIGH]
    if not 0 <= low <= 1 <= high:
        raise DataError(
            f"loss_fn_config has {LOW} = {low:g} and {HIGH} = {high:g}; give one of 0 to 1, one of 1 or more."
        )
    return PolicyLoss(surrogate=surrogate, clip_low=1 - low, clip_high=high - 1)


POLICY = {"logprobs": "old", "advantages": "advantages"}

LOSSES: Mapping[str, NamedLoss] = {
    "cross_entropy": NamedLoss(
        make=lambda _: CROSS_ENTROPY, streams={"weights": "weights"}, optional=("weights",), settings={}
    ),
    "importance_sampling": NamedLoss(make=lambda _: PolicyLoss(surrogate="ratio"), streams=POLICY, settings={}),
    "ppo": NamedLoss(make=_clip, streams=POLICY, settings={LOW: 0.8, HIGH: 1.2}),
}


def find_loss(name: str, settings: Settings) -> tuple[NamedLoss, Objective]:
    """A loss by its name.

    Raises:
        DataError: it is unknown, or has no such setting.
    """
    loss = LOSSES.get(name)
    if loss is None:
        raise DataError(f"loss_fn = '{name}' is not here{did_you_mean(name, LOSSES)}")
    for key, value in settings.items():
        if key not in loss.settings:
            takes = ", ".join(loss.settings) or "nothing"
            raise DataError(f"loss_fn_config has '{key}', and loss_fn = '{name}' takes {takes}.")
        if not isinstance(value, float):
            raise DataError(f"loss_fn_config has {key} = '{value}'; give a number.")
    numbers = dict(loss.settings) | {key: float(value) for key, value in settings.items()}
    return loss, loss.make(numbers)


@dataclass(frozen=True, slots=True)
class TrainingSequence:
    """A training sequence: numpy rows of one length.

    Attributes:
        tokens: of the input.
        targets: the token after each.
        streams: of the targets.
    """

    tokens: Numbers
    targets: Numbers
    streams: Mapping[str, Numbers]


def make_sequence(datum: Datum, at: int, name: str, *, vocab: int, most_tokens: int) -> TrainingSequence:
    """A sequence, checked against the loss and the model.

    Args:
        datum: from the request.
        at: its index.
        name: of the loss.
        vocab: token ids are below this.
        most_tokens: of a sequence.

    Raises:
        DataError: the message names the sequence, the field and the rule.
    """
    loss, where = LOSSES[name], f"data[{at}]"
    length = len(datum.tokens)
    if not 1 <= length <= most_tokens:
        raise DataError(f"{where}.model_input has {length} tokens; give 1 to {most_tokens}.")
    _check_inputs(datum, loss, where, name)
    tokens, targets = np.asarray(datum.tokens), datum.inputs[TARGETS]
    _check_ids(tokens, f"{where}.model_input", vocab)
    _check_ids(targets, f"{where}.loss_fn_inputs['{TARGETS}']", vocab)
    streams = {}
    for key, stream in loss.streams.items():
        numbers = datum.inputs.get(key, np.ones(length)).astype(np.float32)
        if not np.isfinite(numbers).all():
            raise DataError(f"{where}.loss_fn_inputs['{key}'] holds NaN or infinity.")
        streams[stream] = numbers
    return TrainingSequence(tokens, targets, streams)


def _check_inputs(datum: Datum, loss: NamedLoss, where: str, name: str) -> None:
    length = len(datum.tokens)
    known = {TARGETS, *loss.streams}
    for key in datum.inputs:
        if key not in known:
            raise DataError(f"{where}.loss_fn_inputs has '{key}', which {name} does not read{did_you_mean(key, known)}")
    for key in (TARGETS, *loss.streams):
        if key not in datum.inputs:
            if key in loss.optional:
                continue
            raise DataError(f"{where}.loss_fn_inputs lacks '{key}', which {name} reads; add it.")
        shape = datum.inputs[key].shape
        if shape != (length,):
            raise DataError(
                f"{where}.loss_fn_inputs['{key}'] has shape {list(shape)}, and the input {length} tokens; give one "
                "number for each token."
            )


def _check_ids(ids: Numbers, what: str, vocab: int) -> None:
    if ids.dtype.kind != "i":
        raise DataError(f"{what} is of {ids.dtype}; token ids are integers.")
    if ids.min() < 0 or ids.max() >= vocab:
        strange = next(int(token) for token in ids if not 0 <= token < vocab)
        raise DataError(f"{what} holds token {strange}; token ids of this model are 0 to {vocab - 1}.")


def join_measures(
    objective: Objective, earlier: Mapping[str, float], tokens: int, measures: Mapping[str, float], counted: int
) -> dict[str, float]:
    """Means and maxima over ``tokens`` of earlier passes joined with those over ``counted`` tokens of another."""
    if not earlier:
        return dict(measures)
    both = max(1, tokens + counted)
    joined = {}
    for name, value in measures.items():
        if name in objective.maxima:
            joined[name] = max(earlier[name], value)
        else:
            joined[name] = (earlier[name] * tokens + value * counted) / both
    return joined


def metric_names(objective: Objective, measures: Mapping[str, float]) -> dict[str, float]:
    """Metrics with the suffix by which Tinker's client joins several requests."""
    return {f"{name}:{'max' if name in objective.maxima else 'mean'}": value for name, value in measures.items()}
