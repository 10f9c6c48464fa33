"""list_units: the units of a model that are not those of a built-in decoder of text."""

from __future__ import annotations

from collections.abc import Sequence

from superstep.model.custom.user_model import load_units
from superstep.model.multimodal.qwen3_vl import vision_language_units
from superstep.model.unit import UnitSpec
from superstep.plan.config import RunConfig
from superstep.plan.model.multimodal.families import read_multimodal


def list_units(config: RunConfig) -> Sequence[UnitSpec]:
    """The units of ``model.source``, or of a family that reads more than text.

    Raises:
        ConfigError: the file cannot be used.
    """
    shape = read_multimodal(config)
    return load_units(config) if shape is None else vision_language_units(shape)
