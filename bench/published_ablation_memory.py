"""Ablation of memory: each thing that softwares keep taken away from all of them, and what that does to fits and peaks.

Nothing is fitted again: what a software keeps is stated, not fitted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from bench.published_memory import as_it_is
from bench.published_rows import Change, IsNamed, Reading, Row, everyone
from bench.published_stated import Stated, judged


@dataclass(frozen=True, slots=True)
class Without:
    """Fits and peaks without one thing: where softwares' names are known, and where a stack's own is not."""

    named: Stated
    unknown: Stated


def _keeping(**values: float | bool) -> Change:
    """A change of what a software holds."""

    def change(_row: Row, reading: Reading) -> Reading:
        holds = replace(reading.software.holds, **values)  # type: ignore[arg-type]
        return replace(reading, software=replace(reading.software, holds=holds))

    return change


def _wide_gradients(_row: Row, reading: Reading) -> Reading:
    return replace(reading, software=replace(reading.software, kept_gradient_bytes=4.0))


MECHANISMS: Mapping[str, Change] = {
    "nothing": as_it_is,
    "what an update makes": _keeping(update_bytes=0.0, listed_bytes=0.0),
    "copies of the logits (4 bytes for all)": _keeping(logit_bytes=4.0),
    "logits that are gathered": _keeping(gathers_logits=False),
    "gradients in 16 bits": _wide_gradients,
    "buckets of gradients": _keeping(bucket_bytes=0.0),
    "what norms of several kernels keep": _keeping(norm_bytes=0.0),
    "products that selective recomputation keeps": _keeping(selects_products=0.0),
    "masters alone, without 16-bit weights": _keeping(weight_shard_bytes=2.0),
    "inputs kept in 8 bits": _keeping(input_bytes=2.0),
    "tensors placed by a compiler": _keeping(places_tensors=False),
}


def memory_ablations(rows: Sequence[Row], is_named: IsNamed) -> dict[str, Without]:
    """By what is taken away."""
    return {
        words: Without(judged(rows, everyone, change), judged(rows, is_named, change))
        for words, change in MECHANISMS.items()
    }
