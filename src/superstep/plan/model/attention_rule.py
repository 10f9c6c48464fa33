"""AttentionRule: what a layer's attention does beyond causal attention to all tokens."""

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
