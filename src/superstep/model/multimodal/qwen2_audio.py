"""Qwen2-Audio (Chu 2024) as units: its encoder of sounds, and a Qwen2 that reads their rows at the places of tokens."""

from __future__ import annotations

from superstep.model.axes import units as decoder_units
from superstep.model.multimodal.audio import audio_units
from superstep.model.multimodal.place_rows import join_decoder, rename_parameters
from superstep.model.unit import UnitSpec
from superstep.plan.model.multimodal.audio_shape import AudioLanguageShape


def audio_language_units(shape: AudioLanguageShape) -> tuple[UnitSpec, ...]:
    """The units of encoder and decoder."""
    decoder = [rename_parameters(unit, "", "language_model.") for unit in decoder_units(shape.decoder)]
    return join_decoder({shape.audio_token: audio_units(shape.audio)}, shape.decoder, decoder)
