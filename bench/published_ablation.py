"""Ablation: each mechanism taken away, the constants fitted again, and what that does to rows old, new and left out.

A mechanism that helps only the rows that it was fitted on does not belong in the model. Many are of a few rows alone,
which no median of all rows tells; so each is judged by the rows that it moves too, each predicted without its stack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from bench.published_fit import fit
from bench.published_left_out import seconds, unseen
from bench.published_rows import Change, Reading, Row, number
from bench.published_score import Scored, is_judged, ranked, summary
from bench.published_steps import Steps
from superstep.cost.closed.efficiency import FITTED
from superstep.cost.closed.model_numbers import array

MOVED = 0.005
"""A mechanism is of the rows whose seconds change by so much without it, the constants as they are."""


@dataclass(frozen=True, slots=True)
class Taken:
    """All rows with one mechanism off.

    Attributes:
        plain: with the constants in use.
        fitted: with those that are fitted again.
        out: each row predicted without its stack.
    """

    plain: Scored
    fitted: Scored
    out: Scored


@dataclass(frozen=True, slots=True)
class Ablated:
    """What that does: median errors on fitted rows of each table, and on rows of stacks left out.

    Attributes:
        tables: by table.
        left_out: all judged rows, each predicted without its stack.
        ninth: the 90th percentile of these.
        regret: the mean over their sweeps.
        moved: rows whose seconds hang on the mechanism, plans with something unstated too.
        moved_with, moved_without: their median error, each predicted without its stack, with the mechanism and without.
    """

    tables: dict[str, float]
    left_out: float
    ninth: float
    regret: float
    moved: int
    moved_with: float | None
    moved_without: float | None


def _turned(_row: Row, reading: Reading) -> Reading:
    return replace(reading, decoder=replace(reading.decoder, rotates=array(1)))


def _free_sums(_row: Row, reading: Reading) -> Reading:
    # 2 bytes read, and less than none written: no bytes at all.
    return replace(reading, software=replace(reading.software, kept_gradient_bytes=-1.0))


def _early_kernel(row: Row, reading: Reading) -> Reading:
    is_early = reading.software.attention == "flash-2" and row["date"].startswith("2024") and not row["attn_kernel"]
    attention = "flash-3" if is_early else reading.software.attention
    return replace(reading, software=replace(reading.software, attention=attention))


def _whole_stream(row: Row, reading: Reading) -> Reading:
    split = array(row["sp"] == "1" and number(row, "tp") > 1)
    return replace(reading, layout=replace(reading.layout, sequence_parallel=split))


def _always_fused(_row: Row, reading: Reading) -> Reading:
    return replace(reading, software=replace(reading.software, has_fused_norms=True, has_fused_kernels=True))


def _switched(_row: Row, reading: Reading) -> Reading:
    return replace(reading, cluster=replace(reading.cluster, topology="switched"))


def _unwindowed(_row: Row, reading: Reading) -> Reading:
    return replace(reading, decoder=replace(reading.decoder, windowed_layers=array(0)))


def _many_sends(_row: Row, reading: Reading) -> Reading:
    return replace(reading, software=replace(reading.software, sends_once=False))


def _narrow_heads(_row: Row, reading: Reading) -> Reading:
    return replace(reading, decoder=replace(reading.decoder, query_rank=array(0), key_rank=array(0)))


MECHANISMS: dict[str, Change] = {
    "unfused kernels move more": _always_fused,
    "learned positions turn nothing": _turned,
    "gradients are summed over memory": _free_sums,
    "Hopper's own attention from July 2024": _early_kernel,
    "XLA's tensor parallelism splits the stream": _whole_stream,
    "a token goes once to a domain": _many_sends,
    "latent attention": _narrow_heads,
    "domains without a switch": _switched,
    "windows of attention": _unwindowed,
}


def taken(rows: Sequence[Row], change: Change | None, *, is_named: bool = True) -> Taken:
    """All rows priced with a change of every reading, the constants fitted again.

    Args:
        rows: that can be priced.
        change: what is taken away; nothing where it is not given.
        is_named: whether frameworks' names may be read.
    """
    steps = Steps(rows, lambda _: is_named, change)
    found, near = fit(steps)
    published = np.array([number(row, "step_time_s") for row in steps.rows])
    stacks = unseen(rows, near)
    if not is_named:
        stacks = [replace(stack, is_named=lambda _: False) for stack in stacks]
    plain = Scored(steps.rows, published, steps.seconds(FITTED))
    fitted = plain.replaced(steps.seconds(FITTED.with_changes({name: each.value for name, each in found.items()})))
    return Taken(plain, fitted, plain.replaced(seconds(rows, stacks, change)))


def ablated(off: Taken, whole: Taken, tables: Sequence[str]) -> Ablated:
    """What is worse, or better, than with all mechanisms; ``tables`` tells where each row is from."""
    table_of = {row["row_id"]: table for row, table in zip(off.out.rows, tables, strict=True)}
    medians = {
        table: summary(off.fitted.where(lambda row, t=table: is_judged(row) and table_of[row["row_id"]] == t))[1]  # type: ignore[misc]
        for table in dict.fromkeys(tables)
    }
    changed = np.abs(off.plain.predicted_s / whole.plain.predicted_s - 1) > MOVED
    names = {row["row_id"] for row, is_so in zip(off.out.rows, changed, strict=True) if is_so and row["trust"] != "C"}
    own = [summary(each.out.where(lambda row: row["row_id"] in names))[1] if names else None for each in (whole, off)]
    judged = off.out.where(is_judged)
    return Ablated(
        medians, *summary(judged)[1:], float(np.mean([each.loss for each in ranked(judged)])), len(names), *own
    )


def ablations(rows: Sequence[Row], tables: Sequence[str]) -> dict[str, Ablated]:
    """By what is taken away."""
    whole = taken(rows, None)
    found = {"nothing": whole, "frameworks' names": taken(rows, None, is_named=False)}
    found |= {name: taken(rows, change) for name, change in MECHANISMS.items()}
    return {name: ablated(each, whole, tables) for name, each in found.items()}
