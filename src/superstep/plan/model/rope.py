"""Scalings of the rotary wavelengths, for longer sequences than in a model's first training."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearRope:
    """Every wavelength is ``factor`` times as long (Chen 2023)."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Rope:
    """Llama 3.1's: long wavelengths are scaled, short ones are not, with a ramp over turns between them."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnRope:
    """YaRN (Peng 2023): like Llama 3.1's with a ramp over pairs of a head, and sharper scores.

    Attributes:
        beta_fast: pairs with at least this many turns within the original tokens stay.
        beta_slow: pairs with fewer turns are scaled fully.
        truncate: whether the ends of the ramp are rounded outwards to whole pairs.
        attention_factor: multiplies cosine and sine, so its square multiplies the scores.
        score_scale: of the logarithm whose factor multiplies all scores twice (DeepSeek's mscale_all_dim); 0 for none.
    """

    factor: float
    original_tokens: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    attention_factor: float
    score_scale: float = 0.0

    @property
    def score_factor(self) -> float:
        """What ``score_scale`` multiplies the scores by."""
        sharper = 0.1 * self.score_scale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0
        return sharper * sharper


RopeScaling = LinearRope | Llama3Rope | YarnRope


GPT_OSS_YARN = YarnRope(
    factor=32.0,
    original_tokens=4096,
    beta_fast=32.0,
    beta_slow=1.0,
    truncate=False,
    attention_factor=1.3465735902799727,
)
"""Of gpt-oss's ``config.json`` files."""
