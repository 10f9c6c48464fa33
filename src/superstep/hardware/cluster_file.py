"""Clusters as people write them: ``128xH100``, or a TOML file.

The keys of a file are the fields of Cluster, with those of its chip in ``[chip]``. A chip of the catalogue is named
(``chip = "H100-SXM"``) or is the base of another (``base = "H100-SXM"`` in ``[chip]``); keys left out then have the
values of the chip's usual system.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from superstep.errors import ConfigError
from superstep.hardware.catalogue import chip
from superstep.hardware.chip import Chip
from superstep.hardware.cluster import Cluster
from superstep.hardware.network import usual_cluster
from superstep.hardware.plausibility import check_cluster
from superstep.plan.config_io import build, read_tables, write_fields


def cluster(text: str) -> Cluster:
    """The cluster for ``128xH100`` or the path of a TOML file.

    Raises:
        ConfigError: neither of the two, an unknown chip, or a file with a missing, unknown, wrong or absurd value.
    """
    if text.endswith(".toml"):
        return read_cluster(Path(text))
    match = re.fullmatch(r"\s*([0-9]+)\s*[xX*]\s*(\S.*?)\s*", text)
    if match is None:
        raise ConfigError(
            f"cluster = {text!r} is neither a number of chips, '128xH100' say, nor the path of a .toml file."
        )
    chips = int(match[1])
    usual = usual_cluster(chip(match[2]), chips)
    try:
        return check_cluster(replace(usual, domain=_whole_domains(usual.domain, chips)))
    except ConfigError as error:
        raise ConfigError(f"cluster = {text!r}: {error}") from error


def _whole_domains(domain: int, chips: int) -> int:
    """A rack or a pod is rented in whole trays of four: 256 chips of racks of 72 are four times 64."""
    if chips <= domain or chips % domain == 0 or domain <= 16:
        return domain
    return max((size for size in range(4, domain, 4) if chips % size == 0), default=domain)


def read_cluster(path: Path) -> Cluster:
    """The cluster of a TOML file; raises ConfigError like ``cluster``."""
    raw = read_tables(path)
    try:
        return check_cluster(_build_cluster(raw))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _build_cluster(raw: Mapping[str, Any]) -> Cluster:
    own = raw.get("chip")
    if isinstance(own, dict) and "base" not in own:
        return build(Cluster, _with_links(raw, own))
    if own is None:
        raise ConfigError('chip is missing; name one of the catalogue, chip = "H100-SXM" say, or write a table [chip].')
    field, name = ("chip.base", own["base"]) if isinstance(own, dict) else ("chip", own)
    if not isinstance(name, str):
        raise ConfigError(f"{field} = {name!r} is not valid; it must be the name of a chip.")
    if "chips" not in raw:
        raise ConfigError("chips is missing; it must be a whole number.")
    base = chip(name, field=field)
    changes = {key: value for key, value in own.items() if key != "base"} if isinstance(own, dict) else {}
    changed = build(Chip, changes, "chip.", base)
    usual = usual_cluster(changed, 1, like=base.name)
    return build(Cluster, {key: value for key, value in raw.items() if key != "chip"}, "", usual)


def _with_links(raw: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """A cluster's table, with its chip's links where it has none."""
    return dict(raw) | {key: own[key] for key in ("domain", "link_bytes_per_s") if key in own and key not in raw}


def write_cluster(cluster: Cluster) -> str:
    """The TOML text that ``read_cluster`` reads back as an equal value; raises ConfigError for a refused one."""
    check_cluster(cluster)
    return "\n".join([*write_fields(cluster), "", "[chip]", *write_fields(cluster.chip), ""])
