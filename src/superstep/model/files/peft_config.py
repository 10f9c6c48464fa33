"""An adapter's peft configuration: supported fields are applied, others are refused by name."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

from superstep.errors import ConfigError, StateError
from superstep.plan.resolution.lora import ALL_LINEAR, is_named

CONFIG = "adapter_config.json"
"""The name of the file."""

T = TypeVar("T")

FOLLOWED = frozenset(
    {
        "peft_type",
        "r",
        "lora_alpha",
        "use_rslora",
        "rank_pattern",
        "alpha_pattern",
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "init_lora_weights",
        "bias",
    }
)
WITHOUT_EFFECT = frozenset(
    {
        "task_type",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "auto_mapping",
        "peft_version",
        "lora_dropout",
        "runtime_config",
        "megatron_core",
        "qalora_group_size",
        "loftq_config",
        "eva_config",
        "ensure_weight_tying",
    }
)
"""Fields without an effect on a trained adapter. A field in neither list is accepted if null, false or empty."""

INITS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Initialisations that keep the model's own weights; the others subtract a part from them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """The linears of an adapter, and their strengths.

    Attributes:
        r: the rank.
        lora_alpha: the strength.
        is_stabilized: whether the strength is divided by the root of the rank.
        rank_pattern: other ranks, by a linear's name or an expression for its end.
        alpha_pattern: other strengths.
        target_modules: the ends of linears' names, an expression for whole names, or ``all-linear``.
        exclude_modules: exceptions to it.
        layers: the numbers of the layers; None means all.
        layers_pattern: names of layer lists; empty means any name before a number.
    """

    r: int
    lora_alpha: float
    is_stabilized: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    target_modules: str | tuple[str, ...]
    exclude_modules: str | tuple[str, ...]
    layers: tuple[int, ...] | None
    layers_pattern: tuple[str, ...]

    def rank(self, name: str) -> int:
        """The rank of a linear."""
        return next(_of_pattern(self.rank_pattern, name), self.r)

    def alpha(self, name: str) -> float:
        """The strength of a linear."""
        return next(_of_pattern(self.alpha_pattern, name), self.lora_alpha)

    def targets(self, name: str) -> bool:
        """Whether a linear of the blocks has an adapter."""
        if self.exclude_modules and _matches(self.exclude_modules, name):
            return False
        if self.target_modules == ALL_LINEAR:
            return True
        return _matches(self.target_modules, name) and (self.layers is None or self._layer(name) in self.layers)

    def _layer(self, name: str) -> int | None:
        for pattern in self.layers_pattern or (r"[^.]*",):
            match = re.match(rf".*\.{pattern}\.(\d+)\.", name)
            if match:
                return int(match[1])
        return None


def _of_pattern(patterns: Mapping[str, T], name: str) -> Iterator[T]:
    return (value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", name))


def _matches(named: str | Sequence[str], name: str) -> bool:
    if isinstance(named, str):
        return re.fullmatch(named, name) is not None
    return is_named(named, name)


def read_config(text: bytes, file: Path) -> AdapterConfig:
    """Parse an ``adapter_config.json``.

    Raises:
        ConfigError: a field is not supported; names it.
        StateError: it is no JSON object.
    """
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StateError(f"{file} is damaged: {error}; save the adapter again.") from error
    if not isinstance(config, dict):
        raise StateError(f"{file} is no JSON object; save the adapter again.")
    _refuse_others(config, file)
    try:
        checked = AdapterConfig(
            r=_check_value(config.get("r"), "r", _is_rank, file),
            lora_alpha=_check_value(config.get("lora_alpha"), "lora_alpha", _is_number, file),
            is_stabilized=bool(config.get("use_rslora")),
            rank_pattern=_table(config, "rank_pattern", _is_rank, file),
            alpha_pattern=_table(config, "alpha_pattern", _is_number, file),
            target_modules=_names(config, "target_modules", file),
            exclude_modules=_names(config, "exclude_modules", file),
            layers=_layers(config.get("layers_to_transform"), file),
            layers_pattern=_pattern(_names(config, "layers_pattern", file)),
        )
        checked.targets("model.layers.0.x")
        checked.rank("x")
        checked.alpha("x")
    except re.error as error:
        raise ConfigError(f"{file}: '{error.pattern!s}' is no expression that can be matched: {error}.") from error
    if not checked.target_modules:
        raise ConfigError(f"{file}: target_modules is empty; name the linears, such as q_proj, or {ALL_LINEAR}.")
    return checked


def _refuse_others(config: Mapping[str, Any], file: Path) -> None:
    """Refuse fields that would give other results than are computed here."""
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ConfigError(f"{file}: peft_type = {json.dumps(kind)} is not served; LORA is.")
    if config.get("bias", "none") != "none":
        raise ConfigError(f'{file}: bias = {json.dumps(config["bias"])} is not served; train with bias = "none".')
    if config.get("init_lora_weights") not in INITS:
        raise ConfigError(
            f"{file}: init_lora_weights = {json.dumps(config['init_lora_weights'])} is not served, because it changes "
            "the model's own weights; save it as an ordinary adapter (peft: path_initial_model_for_weight_conversion)."
        )
    for field, value in config.items():
        if value and field not in FOLLOWED | WITHOUT_EFFECT:
            raise ConfigError(
                f"{file}: {field} = {json.dumps(value)[:60]} is not served; leave it out, or merge the adapter into "
                "the model's weights."
            )


def _is_rank(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check_value(value: Any, field: str, is_sound: Any, file: Path) -> Any:  # noqa: ANN401
    if not is_sound(value):
        rule = "a whole number of at least 1" if is_sound is _is_rank else "a finite number"
        raise ConfigError(f"{file}: {field} = {json.dumps(value)} must be {rule}.")
    return value


def _table(config: Mapping[str, Any], field: str, is_sound: Any, file: Path) -> dict[str, Any]:  # noqa: ANN401
    table = config.get(field) or {}
    if not isinstance(table, dict):
        raise ConfigError(f"{file}: {field} = {json.dumps(table)[:60]} must be an object.")
    return {key: _check_value(value, f"{field}['{key}']", is_sound, file) for key, value in table.items()}


def _names(config: Mapping[str, Any], field: str, file: Path) -> str | tuple[str, ...]:
    named = config.get(field) or ()
    if isinstance(named, str):
        return named
    if not isinstance(named, list | tuple) or not all(isinstance(name, str) for name in named):
        raise ConfigError(f"{file}: {field} = {json.dumps(named)[:60]} must be a list of names, or an expression.")
    return tuple(named)


def _pattern(named: str | tuple[str, ...]) -> tuple[str, ...]:
    return (named,) if isinstance(named, str) else named


def _layers(layers: object, file: Path) -> tuple[int, ...] | None:
    if layers is None:
        return None
    numbers = layers if isinstance(layers, list) else [layers]
    if not all(isinstance(number, int) for number in numbers):
        raise ConfigError(f"{file}: layers_to_transform = {json.dumps(layers)[:60]} must be numbers of layers.")
    return tuple(numbers)
