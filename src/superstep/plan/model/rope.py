"""Stretches of the rotary wavelengths, for sequences longer than those a model was first trained on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearRope:
    """Every wavelength is ``factor`` times as long (Chen 2023)."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Rope:
    """Llama 3.1's: long wavelengths are stretched, short ones stay, between them is a ramp over turns."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnRope:
    """YaRN (Peng 2023): as Llama 3.1's with a ramp over pairs of a head, and sharper scores.

    Attributes:
        beta_fast: pairs that turn as often within the original tokens stay as they are.
        beta_slow: pairs that turn less often are stretched whole.
        truncate: whether the ends of the ramp are rounded outwards to whole pairs.
        attention_factor: of cosine and sine, so that its square is of the scores.
    """

    factor: float
    original_tokens: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    attention_factor: float


RopeScaling = LinearRope | Llama3Rope | YarnRope
