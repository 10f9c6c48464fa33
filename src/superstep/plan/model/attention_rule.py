"""AttentionRule: what attention does beyond causal attention to all tokens; and DeltaShape: linear attention."""

from __future__ import annotations

from dataclasses import dataclass

from superstep.plan.config import Positions


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRule:
    """The rule of one layer, which travels with each call of attention.

    Attributes:
        window: tokens that a token sees, itself and those before it (Mistral, Jiang 2023); None for all.
        soft_cap: a score s becomes soft_cap · tanh(s / soft_cap) (Gemma 2, sec. 2); None leaves it.
        positions: other than rope, a bias by distance is added to scores, before the cap; it travels beside the rule.
    """

    window: int | None = None
    soft_cap: float | None = None
    positions: Positions = "rope"

    @property
    def is_blockwise(self) -> bool:
        """Whether a CPU's kernels lack the rule, and torch computes a block of queries at a time."""
        return self.soft_cap is not None or self.positions != "rope"

    def window_in(self, tokens: int) -> int | None:
        """The window in a sequence of ``tokens``; None where it hides nothing."""
        return None if self.window is None or self.window >= tokens else self.window


PLAIN = AttentionRule()
"""Causal attention to all tokens."""


DELTA_CHUNK = 64
"""Tokens that linear attention takes at once (Yang 2024, sec. 3.3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaShape:
    """Linear attention by the gated delta rule (Yang 2024), in the place of attention.

    Attributes:
        key_heads: heads of queries and keys, of ``key_dim`` numbers; each serves value_heads / key_heads neighbours.
        value_heads: heads of values, of ``value_dim`` numbers.
        taps: tokens that the convolution before it reads, the own one and those before it.
        is_grouped: whether one projection has queries, keys, values and gates, by key head (Qwen3-Next).
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int = 4
    is_grouped: bool = False

    @property
    def sections(self) -> tuple[int, int, int]:
        """Rows of all queries, keys and values."""
        keys = self.key_heads * self.key_dim
        return keys, keys, self.value_heads * self.value_dim
