"""JsonKeys: a JSON object that is read key by key, so that unread keys are known."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from typing import Any

from superstep.errors import ConfigError
from superstep.plan.model.shape import MOST_LAYERS


class JsonKeys:
    """The keys of one object.

    Args:
        model_type: the prefix of a key in errors: the file, and the keys that lead to the object.
        defaults: of keys that are left out.
    """

    def __init__(self, raw: Mapping[str, Any], model_type: str, defaults: Mapping[str, Any]) -> None:
        self._raw, self._model_type, self._defaults = raw, model_type, defaults
        self._read: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return key in self._raw

    def get(self, key: str) -> Any:  # noqa: ANN401
        """A value as it is, or its default. Raises ConfigError where it is left out and has no default."""
        self._read.add(key)
        if key not in self._raw and key not in self._defaults:
            raise ConfigError(f"{self._model_type}{key} is missing.")
        return self._raw.get(key, self._defaults.get(key))

    def table(self, key: str) -> dict[str, Any]:
        """An object inside of this one."""
        value = self.get(key)
        if not isinstance(value, dict):
            raise self.refusal(key, "must be an object")
        return value

    def whole(self, key: str, *, least: int = 1) -> int:
        value = self.get(key)
        if not _is_number(value) or value != int(value) or value < least:
            raise self.refusal(key, f"must be a whole number of at least {least}")
        return int(value)

    def layers(self) -> int:
        """``num_hidden_layers``, checked before anything is made for each layer."""
        layers = self.whole("num_hidden_layers")
        if layers > MOST_LAYERS:
            raise self.refusal("num_hidden_layers", f"is beyond what is planned here, {MOST_LAYERS} layers")
        return layers

    def number(self, key: str) -> float:
        value = self.get(key)
        if not _is_number(value) or value < 0:
            raise self.refusal(key, "must be a number of at least 0")
        return float(value)

    def positive(self, key: str) -> float:
        value = self.number(key)
        if value == 0:
            raise self.refusal(key, "must be above 0")
        return value

    def flag(self, key: str) -> bool:
        value = self.get(key)
        if not isinstance(value, bool):
            raise self.refusal(key, "must be true or false")
        return value

    def require_ids(self, key: str) -> None:
        """Check that a key names a token, some tokens or none; raises ConfigError otherwise."""
        value = self.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(each, int) and not _is_flag(each) for each in ids):
            raise self.refusal(key, "must be a whole number, a list of them, or null")

    def require(self, only: Mapping[str, tuple[Any, ...]]) -> None:
        """Check that keys, where present, have an allowed value; raises ConfigError otherwise."""
        for key, values in only.items():
            self._read.add(key)
            value = self._raw.get(key)
            # To Python 0 is False, and 1 is True.
            if value is not None and not any(value == each and _is_flag(value) == _is_flag(each) for each in values):
                choices = " or ".join(map(json.dumps, values or (None,)))
                raise self.refusal(key, f"is not supported; it must be {choices}")

    def require_read(self, harmless: Collection[str]) -> None:
        """Check that every key was read, is harmless or null; raises ConfigError for others."""
        for key, value in self._raw.items():
            if key not in self._read and key not in harmless and value is not None:
                raise self.refusal(key, "is not known and may change the model; remove it if it does not")

    def refusal(self, key: str, rule: str) -> ConfigError:
        written = json.dumps(self._raw.get(key, self._defaults.get(key)))
        return ConfigError(f"{self._model_type}{key} = {written} {rule}.")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)
