"""AudioShape and AudioLanguageShape: the numbers of a sound encoder, and of a decoder that reads its rows."""

from __future__ import annotations

from dataclasses import dataclass

from superstep.plan.model.shape import ModelShape

FRAMES = 4
"""Frames of a token: the second convolution takes every other one, and two places become one row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioShape:
    """An encoder of log-mel frames of Whisper's shape, whose places are averaged in pairs (Qwen2-Audio, Chu 2024).

    Attributes:
        bands: numbers of a frame.
        places: rows of the table of positions, each of two frames: the longest sound.
        outputs: width of the decoder's stream.
    """

    layers: int
    width: int
    heads: int
    ffn: int
    bands: int
    places: int
    outputs: int
    init_std: float = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioLanguageShape:
    """A decoder that reads sounds.

    Attributes:
        audio_token: stands for 4 frames of 10 ms.
    """

    audio: AudioShape
    decoder: ModelShape
    audio_token: int
