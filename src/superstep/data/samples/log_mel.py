"""The log-mel spectrogram of Whisper (Radford 2022, section 2.2): 80 or 128 bands, windows of 25 ms, one each 10 ms.

Bands are triangles, even on Slaney's mel scale and of equal area: linear below 1 kHz, logarithmic above.
"""

from __future__ import annotations

from functools import cache
from math import log

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from superstep.errors import DataError
from superstep.plan.model.multimodal.audio_shape import FRAMES, AudioShape

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


def log_mel(sound: Tensor, bands: int = BANDS) -> Tensor:
    """The frames of a sound [samples] at 16 kHz: fp32 [samples // 160, bands], from about -1 to 1.

    The window of frame f has its middle at sample 160 · f; the sound is mirrored at its ends, so it must have more than
    200 samples. Powers below the largest by more than a factor of 10^8 are raised to that.
    """
    wide, window = sound.double(), torch.hann_window(WINDOW, dtype=torch.float64)
    spectrum = torch.stft(wide, WINDOW, HOP, window=window, return_complex=True)[:, : count_frames(len(sound))]
    powers = (_filters(bands) @ spectrum.abs().square()).clamp(min=1e-10).log10()
    powers = torch.maximum(powers, powers.max() - 8.0)
    return ((powers + 4.0) / 4.0).t().float().contiguous()


def cut_frames(sound: Tensor, shape: AudioShape) -> tuple[Tensor, Tensor]:
    """The frames of a sound for Qwen2-Audio's encoder, [F, bands], and the number of each, int64 [F].

    F is a multiple of the 4 frames that one token stands for; what is left behind them, less than 40 ms, is cut.

    Raises:
        DataError: the sound has no whole token, or is longer than the encoder's table of positions.
    """
    frames, most = count_frames(len(sound)) // FRAMES * FRAMES, 2 * shape.places
    if not 0 < frames <= most:
        raise DataError(
            f"a sound of {len(sound)} samples has {count_frames(len(sound))} frames of {HOP}, and the encoder takes "
            f"{FRAMES} to {most}; cut it into parts of such a length."
        )
    return log_mel(sound, shape.bands)[:frames], torch.arange(frames)


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
def _filters(bands: int) -> Tensor:
    """The weight of each frequency in each band: fp64 [bands, 201]."""
    edges = _hertz(np.linspace(0, _mel(RATE / 2), bands + 2))
    frequencies = np.linspace(0, RATE / 2, WINDOW // 2 + 1)
    low, middle, high = (edges[k : k + bands, None] for k in range(3))
    rising, falling = (frequencies - low) / (middle - low), (high - frequencies) / (high - middle)
    return torch.from_numpy(np.maximum(0.0, np.minimum(rising, falling)) * 2 / (high - low))


BEND_HZ, BEND_MEL, SLOPE = 1000.0, 15.0, 27 / log(6.4)
"""Where the scale becomes logarithmic, in hertz and in mel, and its slope there in mel for each e-fold."""


def _mel(hertz: float) -> float:
    return hertz * BEND_MEL / BEND_HZ if hertz < BEND_HZ else BEND_MEL + SLOPE * log(hertz / BEND_HZ)


def _hertz(mel: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(mel < BEND_MEL, mel * BEND_HZ / BEND_MEL, BEND_HZ * np.exp((mel - BEND_MEL) / SLOPE))
