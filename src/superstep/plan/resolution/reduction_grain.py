"""Grain: the pieces of exact mode's sums, the same for every layout of a model."""

from __future__ import annotations

from dataclasses import dataclass

from superstep.errors import ConfigError
from superstep.plan.config import PlanConfig, RunConfig
from superstep.plan.model.outline import Outline
from superstep.plan.model.shape import ModelShape
from superstep.plan.rules import DEFAULT, Rules
from superstep.plan.sharding.parameters import has_cut_output

MOST_CELLS = 8
MOST_CHUNKS = 8
LEAST_CHUNK_TOKENS = 16
"""Smaller chunks make many small products."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grain:
    """The pieces that are never cut further, so that any layout sums the same pieces in the same order.

    Attributes:
        cells: parts of every dim that may be cut over tp; the largest tp.
        chunks: parts of a sequence; twice the largest cp.
        parts: parts of a sequence where tp shares its tokens too, before experts: for each chunk as many as there are
        cells, or as its tokens allow.
        microbatches: of the whole batch: how often a chunk's gradient is added to that of other sequences.
        sequences: of the whole batch.
        tokens: of the whole batch.
    """

    cells: int
    chunks: int
    parts: int
    microbatches: int
    sequences: int
    tokens: int


def find_grain(config: RunConfig, shape: ModelShape | None, plan: PlanConfig, outline: Outline) -> Grain | None:
    """The grain of a run in exact mode; None in fast mode. Raises ConfigError where the layout cuts finer than the
    grain, or needs what exact mode does not have.
    """
    if not config.numerics.exact:
        return None
    if config.numerics.compile:
        raise ConfigError(
            "numerics.exact = true with numerics.compile = true: a compiler does not keep the order of sums; "
            "set numerics.compile to false."
        )
    if shape is None:
        return _user_grain(config, plan, outline)
    if any(rule != dict(DEFAULT.cuts).get(axis, "none") for axis, rule in plan.rules):
        raise ConfigError(
            f"numerics.exact = true with plan.rules = {dict(plan.rules)}: exact mode sums in the pieces of the default "
            "rules; leave plan.rules out, or set numerics.exact = false."
        )
    tokens, cells = config.data.sequence_tokens, _cells(shape)
    chunks = _choose_chunks(config, plan, tokens)
    parts = max(chunks * n for n in _powers(cells) if tokens % (chunks * n) == 0 or n == 1)
    sequences = config.train.batch_sequences
    assert plan.microbatch is not None
    grain = Grain(
        cells=cells,
        chunks=chunks,
        parts=parts,
        microbatches=sequences // plan.microbatch,
        sequences=sequences,
        tokens=sequences * tokens,
    )
    if grain.cells % plan.tp:
        raise ConfigError(
            f"plan.tp = {plan.tp} with numerics.exact = true: sums over a tensor-parallel dim have {grain.cells} parts "
            f"in this model; set plan.tp to one of {_powers(grain.cells)}."
        )
    # All four are powers of two, and check_context saw that cp · tp divides the tokens.
    assert not shape.moe or grain.parts % (plan.cp * plan.tp) == 0
    return grain


def _user_grain(config: RunConfig, plan: PlanConfig, outline: Outline) -> Grain:
    """The grain of a user's model: a microbatch, whose sums are those of torch's own layers, in cells where tp cuts."""
    rules, cells = DEFAULT.over(plan.rules), 1
    if has_cut_output(outline, rules):
        what = "exact mode has no loss over a vocabulary that tp cuts, but for its own decoder" if plan.tp > 1 else ""
    else:
        cells = _user_cells(outline, rules)
        what = f"what tp cuts splits into {cells} cells" if cells % plan.tp else ""
    if plan.tp > 1 and plan.sequence_parallel:
        raise ConfigError(
            f"plan.sequence_parallel = true with numerics.exact = true and {config.model.label}: "
            "exact mode splits sequences of its own layers only, not of a user's; set plan.sequence_parallel to false."
        )
    if plan.cp > 1 and outline.decoder is None:
        what = "exact mode cuts sequences of its own layers only, not of a user's"
    if what:
        name, ways = ("plan.cp", plan.cp) if plan.cp > 1 else ("plan.tp", plan.tp)
        raise ConfigError(
            f"{name} = {ways} with numerics.exact = true and {config.model.label}: {what}; set "
            f"{name} to {1 if plan.cp > 1 else cells}, or numerics.exact to false."
        )
    if config.numerics.exact_chunks is not None and outline.decoder is None:
        raise ConfigError(
            f"numerics.exact_chunks = {config.numerics.exact_chunks} with {config.model.label}: the "
            "sums of a user's layers are not cut into chunks; leave it out."
        )
    assert plan.microbatch is not None
    sequences = config.train.batch_sequences
    tokens = outline.tokens or (1 if config.data.source is not None else config.data.sequence_tokens)
    chunks = 1 if outline.decoder is None else _choose_chunks(config, plan, tokens)
    return Grain(
        cells=cells,
        chunks=chunks,
        parts=chunks,
        microbatches=sequences // plan.microbatch,
        sequences=sequences,
        tokens=sequences * tokens,
    )


def _user_cells(outline: Outline, rules: Rules) -> int:
    """The most cells of every dim that the rules cut, and of the groups of cut convolutions."""
    cut = [p for unit in outline.units for p in unit.parameters if rules.cuts_any(p.axes)]
    sizes = [size for p in cut for size, axis in zip(p.dims, p.axes, strict=True) if rules.cut(axis) == "tp"]
    sizes += [p.groups for p in cut if p.groups > 1]
    return max(n for n in _powers(MOST_CELLS) if all(size % n == 0 for size in sizes)) if sizes else 1


def _cells(shape: ModelShape) -> int:
    # The vocabulary is padded until it has as many.
    sizes = (shape.heads, shape.kv_heads, *(() if shape.moe else (shape.ffn,)))
    sizes += () if shape.delta is None else (shape.delta.key_heads,)
    return max(n for n in _powers(MOST_CELLS) if all(size % n == 0 for size in sizes))


def _choose_chunks(config: RunConfig, plan: PlanConfig, tokens: int) -> int:
    """The parts of a sequence. Raises ConfigError where they or the context-parallel ranks do not divide."""
    chunks = config.numerics.exact_chunks or _chunks(tokens)
    if tokens % chunks or chunks & (chunks - 1):
        choices = [n for n in _powers(MOST_CHUNKS * 8) if tokens % n == 0]
        raise ConfigError(
            f"numerics.exact_chunks = {chunks} must be a power of two that divides the {tokens} tokens of a "
            f"sequence; set numerics.exact_chunks to one of {choices}."
        )
    if plan.cp > 1 and chunks % (2 * plan.cp):
        raise ConfigError(
            f"plan.cp = {plan.cp} with numerics.exact = true: a sequence has {chunks} parts, as many for each "
            f"context-parallel rank and at least two; set plan.cp to one of {_powers(max(1, chunks // 2))}, or "
            "to a larger power of two with numerics.exact_chunks of twice that, for every layout that is compared."
        )
    return chunks


def _chunks(tokens: int) -> int:
    return max(n for n in _powers(MOST_CHUNKS) if tokens % n == 0 and (n == 1 or tokens // n >= LEAST_CHUNK_TOKENS))


def _powers(largest: int) -> list[int]:
    return [1 << n for n in range(largest.bit_length()) if 1 << n <= largest]
