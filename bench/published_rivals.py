"""Rivals on the same rows: a constant fraction of the peak, learned from other stacks, and Calculon."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.published_rows import Row, number
from superstep.errors import DataError
from superstep.hardware.catalogue import chip
from superstep.hardware.units import Array


def constant_fraction(rows: Sequence[Row], published_s: Array) -> Array:
    """Each row at the median share of the peak that other stacks' rows of its chip and format reach.

    What a step computes again counts as work, so that recomputing plans are not slow by definition. Where no other
    stack has the chip, rows of its format on all chips are asked; where none has the format, all rows.
    """
    flops = np.array([_step_flops(row) for row in rows])
    peaks = np.array([_peak(row) for row in rows])
    share = flops / published_s / peaks
    formats, chips = np.array([_format(row) for row in rows]), np.array([row["gpu"] for row in rows])
    stacks = np.array([row["leak_group"] for row in rows])
    found = np.zeros(len(rows))
    for place in range(len(rows)):
        other = stacks != stacks[place]
        alike = other & (formats == formats[place])
        asked = next(mask for mask in (alike & (chips == chips[place]), alike, other, stacks != "") if mask.any())
        found[place] = flops[place] / peaks[place] / np.median(share[asked])
    return found


def _format(row: Row) -> str:
    return "4" if "4" in row["precision"] else "8" if "8" in row["precision"] else "16"


def _peak(row: Row) -> float:
    """FLOP/s of the chip in 16 bits, doubled with each halving of the format."""

    found = chip(row["gpu"])
    half = found.peak("bf16") or found.peak("fp16") or found.peak("fp32") or 1.0
    return half * {"16": 1.0, "8": 2.0, "4": 4.0}[_format(row)]


def _step_flops(row: Row) -> float:
    """Operations of a chip's share of a step: 3 forward passes, 4 with full recomputation."""
    width, layers, tokens = number(row, "hidden"), number(row, "n_layers"), number(row, "seq_len")
    heads = number(row, "n_heads", 1) * number(row, "head_dim", width / number(row, "n_heads", 1))
    matrices = 2 if row["gated_mlp"] == "0" else 3
    active = number(row, "top_k") + number(row, "n_shared_experts")
    inner = number(row, "moe_ffn") * active if number(row, "n_experts") else number(row, "ffn")
    grouped = number(row, "n_kv_heads", number(row, "n_heads", 1)) / number(row, "n_heads", 1)
    layer = 2 * (2 + 2 * grouped) * width * heads + 2 * matrices * width * inner + 4 * tokens * heads
    passes = 4 if row["recompute"].startswith("full") else 3
    whole = passes * (layers * layer) + 6 * width * number(row, "vocab")
    return whole * number(row, "gbs", 1) * tokens / number(row, "n_gpus", 1)


def calculon(path: Path, rows: Sequence[Row]) -> dict[str, float]:
    """Calculon's seconds by row, as a run of it beside this one has left them: {"row_id": seconds, ...}.

    Raises:
        DataError: the file cannot be read, or names none of the rows.
    """
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as JSON: {error}.") from error
    names = {row["row_id"] for row in rows}
    found = {name: float(seconds) for name, seconds in told.items() if name in names}
    if not found:
        raise DataError(f"{path} names none of the rows; its keys are row_id, its values seconds.")
    return found
