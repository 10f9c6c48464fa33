"""Blocks of the page on hardware: the catalogue, and the keys of a cluster file."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields
from typing import Any

from layout_blocks import table
from superstep.hardware.catalogue import ALIASES, CHIPS
from superstep.hardware.chip import Chip, Rate
from superstep.hardware.cluster import Cluster
from superstep.hardware.network import NETWORKS
from superstep.plan.config_io import describe_type, literal

GIB = 2**30


def _number(value: float | None, unit: float = 1.0) -> str:
    return "" if value is None else f"{value / unit:,.6g}"


def _compute() -> str:
    formats = typing.get_args(Rate)
    rows = [
        (
            f"`{chip.name}`",
            str(chip.year),
            *(_number(chip.peak(rate), 1e12) for rate in formats),
            "" if chip.measured_share is None else f"{chip.measured_share:.0%}",
            _number(chip.memory_bytes, GIB),
            _number(chip.memory_bytes_per_s, 1e9),
            str(chip.cores),
        )
        for chip in CHIPS.values()
    ]
    return table(("chip", "year", *formats, "measured", "memory, GiB", "GB/s", "cores"), rows)


def _links() -> str:
    rows = [
        (
            f"`{chip.name}`",
            _number(chip.link_bytes_per_s, 1e9),
            f"{chip.domain}{', torus' if NETWORKS[chip.name].topology == 'torus' else ''}",
            _number(NETWORKS[chip.name].bytes_per_s, 1e9),
            NETWORKS[chip.name].source,
            _number(chip.host_bytes_per_s, 1e9),
            _number(chip.power_w),
            "" if chip.failures_per_hour is None else f"{chip.failures_per_hour * 24 * 1000:.2f}",
        )
        for chip in CHIPS.values()
    ]
    head = ("chip", "link, GB/s", "domain", "network, GB/s", "system", "host, GB/s", "W", "failures of 1,000 in a day")
    return table(head, rows)


def _sources() -> str:
    rows = [(f"`{c.name}`", ", ".join(f"`{name}`" for name in ALIASES[c.name]), c.source) for c in CHIPS.values()]
    return table(("chip", "other names", "source"), rows)


def _meanings(cls: type[Any]) -> dict[str, str]:
    """What the docstring says of each attribute; one line may speak of several."""
    _, _, text = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")
    found = {}
    for entry in re.split(r"\n(?=    \S)", "\n" + text):
        names, _, words = entry.strip().partition(": ")
        found |= {name: " ".join(words.split()) for name in names.split(", ")}
    return found


def _sentence(words: str) -> str:
    return words[0].upper() + words[1:].removesuffix(".") + "."


def _keys(cls: type[Any]) -> Iterator[tuple[str, ...]]:
    hints, words = typing.get_type_hints(cls), _meanings(cls)
    for field in fields(cls):
        if field.name == "chip":
            yield "`chip`", "the name of a chip, or a table", "", _sentence(words["chip"])
            continue
        must = field.default is MISSING
        default = "" if must else "left out" if field.default in (None, ()) else f"`{literal(field.default)}`"
        yield f"`{field.name}`", describe_type(hints[field.name]), default, _sentence(words[field.name])


def _cluster_keys() -> str:
    return table(("key", "values", "default", "meaning"), _keys(Cluster))


def _chip_keys() -> str:
    return table(("key", "values", "default", "meaning"), _keys(Chip))


HARDWARE_BLOCKS: dict[str, Callable[[], str]] = {
    "chips": _compute,
    "chip links": _links,
    "chip sources": _sources,
    "cluster keys": _cluster_keys,
    "chip keys": _chip_keys,
}
