"""Ablation: each mechanism taken away, the constants fitted again, and what that does to rows old, new and left out.

A mechanism that helps only the rows that it was fitted on does not belong in the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bench.published_fit import fit
from bench.published_left_out import seconds, unseen
from bench.published_rows import Reading, Row, number
from bench.published_score import Scored, is_judged, summary
from bench.published_steps import Steps
from superstep.cost.closed.decoder_size import array
from superstep.cost.closed.efficiency import FITTED

Change = Callable[[Row, Reading], Reading]


@dataclass(frozen=True, slots=True)
class Ablated:
    """One mechanism off: median errors on fitted rows of each table, and on rows of stacks left out.

    Attributes:
        tables: by table.
        left_out: all judged rows, each predicted without its stack.
        ninth: the 90th percentile of these.
    """

    tables: dict[str, float]
    left_out: float
    ninth: float


def _turned(_row: Row, reading: Reading) -> Reading:
    return replace(reading, decoder=replace(reading.decoder, rotates=array(1)))


def _free_sums(_row: Row, reading: Reading) -> Reading:
    # 2 bytes read, and less than none written: no bytes at all.
    return replace(reading, software=replace(reading.software, kept_gradient_bytes=-1.0))


def _early_kernel(row: Row, reading: Reading) -> Reading:
    is_early = reading.software.attention == "flash-2" and row["date"].startswith("2024") and not row["attn_kernel"]
    attention = "flash-3" if is_early else reading.software.attention
    return replace(reading, software=replace(reading.software, attention=attention))


def _accumulated(row: Row, reading: Reading) -> Reading:
    told, times = number(row, "mbs"), number(row, "num_microbatches")
    if not (told and times):
        return reading
    return replace(reading, layout=replace(reading.layout, microbatch=array(told), microbatches=array(times)))


def _whole_stream(row: Row, reading: Reading) -> Reading:
    split = array(row["sp"] == "1" and number(row, "tp") > 1)
    return replace(reading, layout=replace(reading.layout, sequence_parallel=split))


def _always_fused(_row: Row, reading: Reading) -> Reading:
    return replace(reading, software=replace(reading.software, has_fused_norms=True, has_fused_kernels=True))


def _switched(_row: Row, reading: Reading) -> Reading:
    return replace(reading, cluster=replace(reading.cluster, topology="switched"))


def _unwindowed(_row: Row, reading: Reading) -> Reading:
    return replace(reading, decoder=replace(reading.decoder, windowed_layers=array(0)))


MECHANISMS: dict[str, Change] = {
    "unfused kernels move more": _always_fused,
    "learned positions turn nothing": _turned,
    "gradients are summed over memory": _free_sums,
    "Hopper's own attention from July 2024": _early_kernel,
    "XLA's batch goes through at once": _accumulated,
    "XLA's tensor parallelism splits the stream": _whole_stream,
    "domains without a switch": _switched,
    "windows of attention": _unwindowed,
}


def ablate(rows: Sequence[Row], tables: Sequence[str], change: Change | None, *, is_named: bool = True) -> Ablated:
    """All rows priced with a change of every reading, the constants fitted again.

    Args:
        rows: that can be priced.
        tables: of each row, the table that it is from.
        change: what is taken away; nothing where it is not given.
        is_named: whether frameworks' names may be read.
    """
    steps = Steps(rows, lambda _: is_named, change)
    found, near = fit(steps)
    published = np.array([number(row, "step_time_s") for row in steps.rows])
    ours = steps.seconds(FITTED.changed({name: each.value for name, each in found.items()}))
    stacks = unseen(rows, near)
    if not is_named:
        stacks = [replace(stack, is_named=lambda _: False) for stack in stacks]
    scored = Scored(steps.rows, published, ours)
    out = scored.replaced(seconds(rows, stacks, change)).where(is_judged)
    table_of = {row["row_id"]: table for row, table in zip(rows, tables, strict=True)}
    medians = {
        table: summary(scored.where(lambda row, t=table: is_judged(row) and table_of[row["row_id"]] == t))[1]  # type: ignore[misc]
        for table in dict.fromkeys(tables)
    }
    return Ablated(medians, *summary(out)[1:])
