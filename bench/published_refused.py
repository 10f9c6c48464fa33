"""Rows that nothing can be predicted from: those that contradict themselves, and those that lack what a price needs.

Each is refused by name, with the reason, and counted. A refused row is neither scored nor fitted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bench.published_rows import Row, is_layer, number

DIMS = ("n_layers", "hidden", "n_heads", "seq_len", "n_gpus", "gpu")
SLACK = 0.1
"""Of tokens each second against the step's seconds: both are rounded, and some sources count other tokens."""


def refusal(row: Row) -> str:
    """Why nothing is predicted of a row; empty where something can be."""
    return "; ".join(_reasons(row))


def kept(rows: Sequence[Row]) -> tuple[list[Row], list[tuple[Row, str]]]:
    """Rows that can be predicted, and the refused ones with their reasons."""
    told = [(row, refusal(row)) for row in rows]
    return [row for row, why in told if not why], [(row, why) for row, why in told if why]


def _reasons(row: Row) -> Iterator[str]:
    lacks = [name for name in DIMS if not row[name]]
    if not (row["ffn"] or row["moe_ffn"]):
        lacks.append("ffn")
    if not is_layer(row) and not row["vocab"]:
        lacks.append("vocab")
    is_step = row["kind"].endswith("_step")
    if is_step and not row["gbs"]:
        lacks.append("gbs")
    if lacks:
        yield f"lacks {', '.join(lacks)}"
    dp, tp, pp, cp, ep = (number(row, axis, 1.0) or 1.0 for axis in ("dp", "tp", "pp", "cp", "ep"))
    ranks, chips = dp * tp * pp * cp, number(row, "n_gpus")
    if row["dp"] and chips and ranks != chips:
        yield f"dp·tp·pp·cp = {ranks:g}, n_gpus = {chips:g}"
    if row["dp"] and (dp * tp * cp) % ep:
        yield f"ep = {ep:g} does not divide dp·tp·cp = {dp * tp * cp:g}"
    sequences = number(row, "mbs") * number(row, "num_microbatches") * dp
    if sequences and row["gbs"] and sequences != number(row, "gbs"):
        yield f"mbs·num_microbatches·dp = {sequences:g}, gbs = {number(row, 'gbs'):g}"
    yield from _seconds(row, chips)


def _seconds(row: Row, chips: float) -> Iterator[str]:
    seconds, rate = number(row, "step_time_s"), number(row, "tokens_per_s_per_gpu")
    tokens = number(row, "gbs") * number(row, "seq_len")
    if seconds and rate and tokens and chips and abs(tokens / (seconds * chips * rate) - 1) > SLACK:
        yield f"{seconds:g} s a step are {tokens / (seconds * chips):.4g} tokens/s a chip, not {rate:g}"
