"""Keys: a JSON object that is read key by key, so that what nobody has read is known."""

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
        raw: the object.
        model_type: what an error says before a key: the file, and the keys that lead to the object.
        defaults: what a key means that is left out.
    """

    def __init__(self, raw: Mapping[str, Any], model_type: str, defaults: Mapping[str, Any]) -> None:
        self._raw, self._told, self._defaults = raw, model_type, defaults
        self._read: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return key in self._raw

    def get(self, key: str) -> Any:  # noqa: ANN401
        """A value as it is, or its default.

        Raises:
            ConfigError: it is left out and has none.
        """
        self._read.add(key)
        if key not in self._raw and key not in self._defaults:
            raise ConfigError(f"{self._told}{key} is missing.")
        return self._raw.get(key, self._defaults.get(key))

    def whole(self, key: str, *, least: int = 1) -> int:
        """A whole number."""
        value = self.get(key)
        if not _is_number(value) or value != int(value) or value < least:
            raise self.refusal(key, f"must be a whole number of at least {least}")
        return int(value)

    def layers(self) -> int:
        """``num_hidden_layers``; refused before anything is made for each of them."""
        layers = self.whole("num_hidden_layers")
        if layers > MOST_LAYERS:
            raise self.refusal("num_hidden_layers", f"is beyond what is planned here, {MOST_LAYERS} layers")
        return layers

    def number(self, key: str) -> float:
        """A number."""
        value = self.get(key)
        if not _is_number(value) or value < 0:
            raise self.refusal(key, "must be a number of at least 0")
        return float(value)

    def positive(self, key: str) -> float:
        """A number above 0."""
        value = self.number(key)
        if value == 0:
            raise self.refusal(key, "must be above 0")
        return value

    def flag(self, key: str) -> bool:
        """True or false."""
        value = self.get(key)
        if not isinstance(value, bool):
            raise self.refusal(key, "must be true or false")
        return value

    def require_ids(self, key: str) -> None:
        """See that a key names a token, some tokens or none.

        Raises:
            ConfigError: it says something else.
        """
        value = self.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(each, int) and not _is_flag(each) for each in ids):
            raise self.refusal(key, "must be a whole number, a list of them, or null")

    def require(self, only: Mapping[str, tuple[Any, ...]]) -> None:
        """See that keys, where they say anything, say one of the values that they may.

        Raises:
            ConfigError: one of them does not.
        """
        for key, values in only.items():
            self._read.add(key)
            value = self._raw.get(key)
            # To Python 0 is False, and 1 is True.
            if value is not None and not any(value == each and _is_flag(value) == _is_flag(each) for each in values):
                choices = " or ".join(map(json.dumps, values or (None,)))
                raise self.refusal(key, f"is not supported; it must be {choices}")

    def require_read(self, harmless: Collection[str]) -> None:
        """See that every key was read, or is of no matter, or null and so asks for nothing.

        Raises:
            ConfigError: one was not: it may change the model.
        """
        for key, value in self._raw.items():
            if key not in self._read and key not in harmless and value is not None:
                raise self.refusal(key, "is not known and may change the model; take it out if it does not")

    def refusal(self, key: str, rule: str) -> ConfigError:
        """An error about one key's value."""
        written = json.dumps(self._raw.get(key, self._defaults.get(key)))
        return ConfigError(f"{self._told}{key} = {written} {rule}.")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)
