"""list_units: the units of a model that are not those of a built-in decoder of text."""

from __future__ import annotations

from collections.abc import Sequence

from superstep.model.custom.user_model import load_units
from superstep.model.multimodal.qwen2_audio import audio_language_units
from superstep.model.multimodal.qwen3_vl import vision_language_units
from superstep.model.unit import UnitSpec
from superstep.plan.config import RunConfig
from superstep.plan.model.multimodal.audio_shape import AudioLanguageShape
from superstep.plan.model.multimodal.families import read_multimodal
from superstep.plan.model.multimodal.vision_shape import VisionLanguageShape


def list_units(config: RunConfig) -> Sequence[UnitSpec]:
    """The units of ``model.source``, or of a family that reads more than text.

    Raises:
        ConfigError: the file cannot be used.
    """
    match read_multimodal(config):
        case None:
            return load_units(config)
        case VisionLanguageShape() as shape:
            return vision_language_units(shape)
        case AudioLanguageShape() as shape:
            return audio_language_units(shape)
