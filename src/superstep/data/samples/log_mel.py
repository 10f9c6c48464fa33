"""The log-mel spectrogram of Whisper (Radford 2022, section 2.2): 80 bands, windows of 25 ms, one each 10 ms.

Bands are triangles, even on Slaney's mel scale and of equal area: linear below 1 kHz, logarithmic above.
"""

from __future__ import annotations

from functools import cache
from math import log

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

RATE = 16000
"""Samples in a second."""
HOP = 160
"""Samples from frame to frame."""
WINDOW = 400
"""Samples of a window."""
BANDS = 80


def count_frames(samples: int) -> int:
    """The frames of a sound."""
    return samples // HOP


def log_mel(sound: Tensor) -> Tensor:
    """The frames of a sound [samples] at 16 kHz: fp32 [samples // 160, 80], from about -1 to 1.

    The window of frame f has its middle at sample 160 · f; the sound is mirrored at its ends, so it must have more than
    200 samples. Powers below the largest by more than a factor of 10^8 are raised to that.
    """
    wide, window = sound.double(), torch.hann_window(WINDOW, dtype=torch.float64)
    spectrum = torch.stft(wide, WINDOW, HOP, window=window, return_complex=True)[:, : count_frames(len(sound))]
    bands = (_filters() @ spectrum.abs().square()).clamp(min=1e-10).log10()
    bands = torch.maximum(bands, bands.max() - 8.0)
    return ((bands + 4.0) / 4.0).t().float().contiguous()


def hide_parts(mel_FM: Tensor, noise: np.random.Generator, *, bands: int = 16, frames: int = 40) -> Tensor:
    """A spectrogram with zeros in some neighbouring bands and in some frames (SpecAugment, Park 2019).

    Args:
        mel_FM: [frames, bands].
        noise: of the sample.
        bands: the most that are hidden.
        frames: likewise, and at most a quarter of them.
    """
    part = mel_FM.clone()
    for values, most in ((part.t(), bands), (part, min(frames, len(part) // 4))):
        count = int(noise.integers(most + 1))
        first = int(noise.integers(len(values) - count + 1))
        values[first : first + count] = 0
    return part


@cache
def _filters() -> Tensor:
    """The weight of each frequency in each band: fp64 [80, 201]."""
    edges = _hertz(np.linspace(0, _mel(RATE / 2), BANDS + 2))
    frequencies = np.linspace(0, RATE / 2, WINDOW // 2 + 1)
    low, middle, high = (edges[k : k + BANDS, None] for k in range(3))
    rising, falling = (frequencies - low) / (middle - low), (high - frequencies) / (high - middle)
    return torch.from_numpy(np.maximum(0.0, np.minimum(rising, falling)) * 2 / (high - low))


BEND_HZ, BEND_MEL, SLOPE = 1000.0, 15.0, 27 / log(6.4)
"""Where the scale becomes logarithmic, in hertz and in mel, and its slope there in mel for each e-fold."""


def _mel(hertz: float) -> float:
    return hertz * BEND_MEL / BEND_HZ if hertz < BEND_HZ else BEND_MEL + SLOPE * log(hertz / BEND_HZ)


def _hertz(mel: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(mel < BEND_MEL, mel * BEND_HZ / BEND_MEL, BEND_HZ * np.exp((mel - BEND_MEL) / SLOPE))
