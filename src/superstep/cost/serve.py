"""The seconds of a server's engine step: a sum over kinds of work, each with its count.

    step      1, for each step                     row      rows: lists and places on the host
    layer     layers                               wide     rows · layers · width: norms, gates, sums
    request   requests with rows                   draw     tokens drawn
    vocab     wanted rows · vocabulary: totals     noise    draws by chance · vocabulary
    keys      bytes of keys and values, read in their pages by rows that are alone in their text
    group     layers · groups of rows that are computed together
    gather    bytes of their keys and values       places   positions of their texts
    pairs     FLOPs of their attention
    rows_N    weights that N rows are multiplied with; between two N the seconds of a weight are linear

A machine's seconds are fitted to measured steps (``serve_fit``) or taken from a chip's published peaks
(``rate_published``). A weight is read from memory once for any few rows; so one row's cost is memory traffic, and the
cost of more rows is compute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from superstep.hardware.cluster import Cluster
from superstep.hardware.serving_rate import ServingRate
from superstep.hardware.units import Array
from superstep.plan.model.shape import ModelShape

KNOTS = (1, 2, 4, 8, 9, 16, 32, 64, 128, 256, 512)
"""Numbers of rows with known seconds of a weight. Up to 8 rows some products use other kernels."""

TERMS = (
    "step", "layer", "request", "row", "wide", "draw", "vocab", "noise", "keys", "group", "gather", "places", "pairs",
    "powers", *(f"rows_{rows}" for rows in KNOTS),
)  # fmt: skip

BOUNDS: Mapping[str, str] = {
    "wide": "compute", "pairs": "compute", "powers": "compute", "keys": "memory traffic", "gather": "memory traffic",
    "draw": "draws", "vocab": "draws", "noise": "draws",
}  # fmt: skip
"""The limit of each kind of work; the rest is the host's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankModelSize:
    """A rank's part of a model.

    Attributes:
        width: of the residual stream.
        dense: weights of a layer's linears that every row uses.
        behind_keys: those after a layer's keys.
        expert: weights of one expert; 0 without experts.
        experts: of a layer.
        experts_per_token: that a row uses.
        head: weights of the product for the logits.
        embedding: other weights: the embedding and all that is no linear.
        vocab: columns of the logits.
        query_numbers: query heads of this rank times their width.
        key_numbers: key heads of this rank times their width.
        query_heads: of this rank.
        bytes: of a number.
        window: tokens that a row sees in every layer; None for all.
    """

    layers: int
    width: int
    dense: int
    behind_keys: int
    expert: int
    experts: int
    experts_per_token: int
    head: int
    embedding: int
    vocab: int
    query_numbers: int
    key_numbers: int
    query_heads: int = 1
    bytes: int
    window: int | None = None

    @property
    def linears(self) -> int:
        return self.layers * (self.dense + self.experts * self.expert) + self.head

    @property
    def key_bytes(self) -> int:
        """Bytes of the keys and values of one position, in all layers."""
        return 2 * self.layers * self.key_numbers * self.bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeMode:
    """How steps are computed, as far as their work depends on it.

    Attributes:
        name: number format and variant: bf16, bf16-exact, bf16-w8a8, ...
        tp: ranks that share the model.
        block_keys: texts whose keys fill the same number of blocks of this size are read together.
        is_paged: whether a row that is alone in its text is read in its pages.
        leaves_rows: whether in the last layer only rows with wanted logits go on after the keys.
    """

    name: str
    tp: int
    block_keys: int
    is_paged: bool
    leaves_rows: bool = False

    @property
    def is_exact(self) -> bool:
        return "exact" in self.name.split("-")


def model_of_rank(shape: ModelShape, *, tp: int, number_bytes: int) -> RankModelSize:
    """Each rank's part of a decoder over ``tp`` ranks."""
    D, N, K, H = shape.width, shape.heads // tp, shape.kv_heads // tp, shape.head_dim
    feed_forward = 3 * D * shape.ffn // tp
    moe = shape.moe
    shared = 0 if moe is None else moe.shared_experts * feed_forward + moe.logits * D
    beside_attention = feed_forward if moe is None else shared
    vocab = -(-shape.vocab // tp)
    return RankModelSize(
        layers=shape.layers,
        width=D,
        dense=2 * D * H * (N + K) + beside_attention,
        behind_keys=D * H * N + beside_attention,
        expert=0 if moe is None else feed_forward,
        experts=0 if moe is None else moe.experts,
        experts_per_token=0 if moe is None else moe.experts_per_token,
        head=vocab * D,
        embedding=(0 if shape.tied else vocab * D) + (shape.style.norm_count * shape.layers + 1) * D,
        vocab=shape.vocab,
        query_numbers=N * H,
        key_numbers=K * H,
        query_heads=N,
        bytes=number_bytes,
        window=None if shape.full_layers else shape.window,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionGroup:
    """Texts with one joint attention: ``texts`` of ``rows`` rows and ``keys`` keys each."""

    texts: int
    rows: int
    keys: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """An engine step in numbers.

    Attributes:
        rows: tokens.
        requests: with rows in it.
        wanted: rows with wanted logits.
        drawn: sampled tokens.
        chance: those that are not simply the likeliest.
        paged_keys: keys read in their pages, by rows that are alone in their text.
        powers: exponentials of a head.
        groups: of the other rows.
    """

    rows: int
    requests: int
    wanted: int
    drawn: int
    chance: int
    paged_keys: int
    powers: int = 0
    groups: tuple[AttentionGroup, ...] = ()


def counts(model: RankModelSize, work: StepWork, *, leaves_rows: bool = False) -> Array:
    """The count of each kind of work in a step, in the order of ``TERMS``."""
    kv_bytes = 2 * model.key_numbers * model.bytes * model.layers
    gone_on = min(1.0, work.wanted / work.rows) if leaves_rows and work.rows else 1.0
    layers = model.layers - 1 + gone_on
    gathered = sum(group.texts * group.keys for group in work.groups)
    pairs = sum(group.texts * group.rows * group.keys for group in work.groups)
    amounts = {
        "step": 1.0,
        "layer": model.layers,
        "request": work.requests,
        "row": work.rows,
        "wide": work.rows * model.layers * model.width,
        "draw": work.drawn,
        "vocab": work.wanted * model.vocab,
        "noise": work.chance * model.vocab,
        "keys": work.paged_keys * kv_bytes,
        "group": model.layers * len(work.groups),
        "gather": gathered * kv_bytes,
        "places": gathered,
        "pairs": 4.0 * pairs * model.query_numbers * layers,
        "powers": work.powers * model.query_heads * layers,
    }
    for rows, weights in _products(model, work, gone_on * work.rows):
        for knot, share in _knots(rows):
            amounts[f"rows_{knot}"] = amounts.get(f"rows_{knot}", 0.0) + share * weights
    return np.array([amounts.get(term, 0.0) for term in TERMS])


def _products(model: RankModelSize, work: StepWork, last_rows: float) -> list[tuple[float, float]]:
    """Numbers of rows, and the weights of products with these rows. ``last_rows``: rows after the last keys."""
    products: list[tuple[float, float]] = [
        (work.rows, model.layers * model.dense - model.behind_keys),
        (last_rows, model.behind_keys),
        (work.wanted, model.head),
    ]
    if model.experts and work.rows:
        chosen = work.rows * model.experts_per_token
        # Routers spread tokens: of E experts so many are met by k choices at random.
        met = model.experts * (1 - (1 - 1 / model.experts) ** chosen)
        products.append((chosen / met, model.layers * met * model.expert))
    return [(rows, weights) for rows, weights in products if rows]


def _knots(rows: float) -> list[tuple[int, float]]:
    """The neighbours of a number of rows among ``KNOTS``, and their weights."""
    if rows >= KNOTS[-1]:
        return [(KNOTS[-1], rows / KNOTS[-1])]
    for low, high in pairwise(KNOTS):
        if low <= rows <= high:
            share = (rows - low) / (high - low)
            return [(low, 1 - share), (high, share)]
    return [(KNOTS[0], 1.0)]


def way_of(rate: ServingRate) -> ComputeMode:
    """The way in which a rate's steps were computed."""
    return ComputeMode(
        name=rate.way, tp=rate.tp, block_keys=rate.block_keys, is_paged=rate.is_paged, leaves_rows=rate.leaves_rows
    )


def seconds(rate: ServingRate, model: RankModelSize, work: StepWork) -> float:
    return float(counts(model, work, leaves_rows=rate.leaves_rows) @ _term_s(rate))


def bounds(rate: ServingRate, model: RankModelSize, works: Sequence[StepWork]) -> dict[str, float]:
    """The shares of some steps' seconds by limit, the largest first."""
    term_s = _term_s(rate)
    total = sum((counts(model, work, leaves_rows=rate.leaves_rows) for work in works), np.zeros(len(TERMS)))
    spent = dict.fromkeys(("memory traffic", "compute", "draws", "host"), 0.0)
    for term, count, each_s in zip(TERMS, total, term_s, strict=True):
        if term.startswith("rows_"):
            read_s = min(each_s, term_s[TERMS.index("rows_1")])
            spent["memory traffic"] += count * read_s
            spent["compute"] += count * (each_s - read_s)
        else:
            spent[BOUNDS.get(term, "host")] += count * each_s
    whole = sum(spent.values()) or 1.0
    return {name: spent[name] / whole for name in sorted(spent, key=lambda name: -spent[name])}


def _term_s(rate: ServingRate) -> Array:
    known = dict(rate.term_s)
    return np.array([known.get(term, 0.0) for term in TERMS])


HOST_STEP_S = 1.5e-3
"""Our engine's host time in a step, and for each of its requests, unless measured."""
HOST_REQUEST_S = 1e-4
KERNELS_OF_A_LAYER = 24
"""Kernels that our blocks launch in sequence."""
DISPATCH_S = 6e-6
"""The least host time of torch for a launch."""
STREAMED = 0.8
"""Shares of the published rates that products and copies reach."""
MULTIPLIED = 0.6


def rate_published(cluster: Cluster, way: ComputeMode, *, number_bytes: int, weight_bytes: float) -> ServingRate:
    """Seconds from a chip's published peaks, and an assumed host: not measured."""
    chip, tp = cluster.chip, way.tp
    peak = chip.peak("bf16" if number_bytes == 2 else "fp32") or max(rate for _, rate in chip.flops_per_s)
    read_s, flop_s = 1 / (STREAMED * chip.memory_bytes_per_s), 1 / (MULTIPLIED * peak)
    link_s = 0.0 if tp == 1 else 2 * 2 * number_bytes * (tp - 1) / tp / cluster.link_bytes_per_s
    launch_s = KERNELS_OF_A_LAYER * max(chip.launch_s, DISPATCH_S)
    term_s = {
        "step": HOST_STEP_S,
        "layer": launch_s + (0.0 if tp == 1 else 2 * cluster.link_latency_s),
        "request": HOST_REQUEST_S,
        "wide": 40 * number_bytes * read_s + link_s,
        "vocab": 8 * read_s,
        "noise": 80 * read_s,
        "keys": read_s,
        "gather": 3 * read_s,
        "pairs": flop_s,
    } | {f"rows_{rows}": max(weight_bytes * read_s, 2 * rows * flop_s) for rows in KNOTS}
    return ServingRate(
        way=way.name,
        tp=tp,
        block_keys=way.block_keys,
        is_paged=way.is_paged,
        leaves_rows=way.leaves_rows,
        term_s=tuple(sorted(term_s.items())),
        held_bytes=weight_bytes,
        beside_bytes=0.0,
        spread=0.0,
    )
