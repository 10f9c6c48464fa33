"""AttentionRule: what a layer's attention does beyond causal attention to all tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRule:
    """The rule of one layer, which travels with each call of attention.

    Attributes:
        window: tokens that a token sees, itself and those before it (Mistral, Jiang 2023); None for all.
        soft_cap: a score s becomes soft_cap · tanh(s / soft_cap) (Gemma 2, sec. 2); None leaves it.
    """

    window: int | None = None
    soft_cap: float | None = None

    def window_in(self, tokens: int) -> int | None:
        """The window in a sequence of ``tokens``; None where it hides nothing."""
        return None if self.window is None or self.window >= tokens else self.window


PLAIN = AttentionRule()
"""Causal attention to all tokens."""
