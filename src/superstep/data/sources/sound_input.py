"""Sounds as Qwen2-Audio reads them: log-mel frames, of which a token stands for four."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from superstep.data.samples.log_mel import HOP, RATE, WINDOW, cut_frames
from superstep.data.samples.sounds import read_sound
from superstep.data.sources.media_input import Medium
from superstep.errors import DataError
from superstep.plan.model.json_reader import JsonKeys
from superstep.plan.model.multimodal.audio_shape import FRAMES, AudioLanguageShape, AudioShape
from superstep.plan.sample_fields import Field


@dataclass(frozen=True, slots=True, kw_only=True)
class SoundInput:
    """How sounds become frames.

    Attributes:
        shape: the encoder's.
        token: stands for four frames.
    """

    shape: AudioShape
    token: int
    kind: str = "audio"

    @property
    def rows(self) -> int:
        """Frames of a token."""
        return FRAMES

    def measure(self, path: Path) -> Medium:
        """The frames of a sound, which is decoded."""
        return Medium(str(path), (len(self._cut(path)[1]),))

    def list_fields(self, rows: int) -> tuple[Field, ...]:
        return Field("mel", (rows, self.shape.bands), "float32"), Field("frames", (rows,), "int64")

    def list_positions(self, tokens: int) -> tuple[Field, ...]:
        return ()

    def lay_out(self, tokens_S: Tensor, media: Sequence[Medium], folder: Path) -> dict[str, Tensor]:
        cut = [self._cut(folder / medium.path) for medium in media]
        mel = [torch.zeros(0, self.shape.bands), *(mel for mel, _ in cut)]
        frames = [torch.zeros(0, dtype=torch.long), *(frames for _, frames in cut)]
        return {"mel": torch.cat(mel), "frames": torch.cat(frames)}

    def _cut(self, path: Path) -> tuple[Tensor, Tensor]:
        try:
            return cut_frames(read_sound(path), self.shape)
        except DataError as error:
            raise DataError(f"'{path}': {error}") from None


def read_sound_input(shape: AudioLanguageShape, raw: Mapping[str, Any], place: str) -> SoundInput:
    """How a model reads sounds.

    Args:
        shape: of the model.
        raw: the object of its ``preprocessor_config.json``; it may be empty.
        place: the file, for errors.

    Raises:
        ConfigError: names a key with other frames.
    """
    JsonKeys(raw, place, {}).require(
        {
            "feature_size": (shape.audio.bands,),
            "sampling_rate": (RATE,),
            "hop_length": (HOP,),
            "n_fft": (WINDOW,),
        }
    )
    return SoundInput(shape=shape.audio, token=shape.audio_token)
