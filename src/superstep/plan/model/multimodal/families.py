"""Families of Hugging Face that read more than text, by the ``model_type`` of a ``config.json``.

Their models are units like those of a user's file: they take fields of the samples of ``data.source``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from superstep.errors import ConfigError
from superstep.plan.config import ModelConfig, RunConfig
from superstep.plan.model.hf_config import read_json
from superstep.plan.model.multimodal.audio_shape import AudioLanguageShape
from superstep.plan.model.multimodal.hf_qwen2_audio import read_qwen2_audio, write_qwen2_audio
from superstep.plan.model.multimodal.hf_qwen3_vl import read_qwen3_vl, write_qwen3_vl
from superstep.plan.model.multimodal.vision_shape import VisionLanguageShape

MultimodalShape = VisionLanguageShape | AudioLanguageShape


@dataclass(frozen=True, slots=True)
class MultimodalFamily:
    """How a family's ``config.json`` is read, as which shape, and written."""

    shape: type[MultimodalShape]
    read: Callable[[Mapping[str, Any], str], MultimodalShape]
    write: Callable[[Any], dict[str, Any]]


FAMILIES = {
    "qwen2_audio": MultimodalFamily(AudioLanguageShape, read_qwen2_audio, write_qwen2_audio),
    "qwen3_vl": MultimodalFamily(VisionLanguageShape, read_qwen3_vl, write_qwen3_vl),
}


def find_family(model: ModelConfig) -> MultimodalFamily | None:
    """The family of a ``[model]`` section; None for a decoder of text or a user's file.

    Raises:
        ConfigError: its config.json cannot be read.
    """
    family, _ = _read_family(model)
    return family


def _read_family(model: ModelConfig) -> tuple[MultimodalFamily | None, Mapping[str, Any]]:
    """The family, and the content of its file."""
    if model.source is not None or not model.name.endswith(".json"):
        return None, {}
    raw = read_json(Path(model.name))
    return FAMILIES.get(str(raw.get("model_type"))), raw


def has_own_units(model: ModelConfig) -> bool:
    """Whether a model's units are listed by a user's file, or by a family that reads more than text."""
    return model.source is not None or find_family(model) is not None


def find_shape(model: ModelConfig) -> MultimodalShape | None:
    """The shape of a ``[model]`` section that reads more than text; None for others. Raises as ``find_family``."""
    family, raw = _read_family(model)
    return None if family is None else family.read(raw, f"{model.name}: ")


def shape_in(raw: Mapping[str, Any], place: str) -> MultimodalShape:
    """The shape in the object of a ``config.json``.

    Args:
        raw: the object.
        place: the file, for errors.

    Raises:
        ConfigError: it is of no such family, or does not fit.
    """
    family = FAMILIES.get(str(raw.get("model_type")))
    if family is None:
        raise ConfigError(f"{place}model_type = {raw.get('model_type')!r} must be one of {', '.join(FAMILIES)}.")
    return family.read(raw, place)


def read_multimodal(config: RunConfig) -> MultimodalShape | None:
    """The shape of a run's model, if it reads more than text.

    Raises:
        ConfigError: its config.json does not fit, the run reads text alone, or another field of [model] is set.
    """
    model = config.model
    family, raw = _read_family(model)
    if family is None:
        return None
    if config.data.source is None:
        raise ConfigError(
            f"model.name = '{model.name}' reads more than text; set data.source to a Python file of samples, as in "
            "docs/howto/pictures-in-text.md, or learn conversations by superstep tune sft."
        )
    default = ModelConfig()
    for field in fields(ModelConfig):
        value = getattr(model, field.name)
        if field.name not in ("name", "weights") and value != getattr(default, field.name):
            raise ConfigError(
                f"model.{field.name} = {value!r} with model.name = '{model.name}': a model that reads more than text "
                "has the numbers of its file; change them there, and leave this out."
            )
    return family.read(raw, f"{model.name}: ")


def write_multimodal(shape: MultimodalShape) -> dict[str, Any]:
    """The ``config.json`` of a shape."""
    (family,) = (family for family in FAMILIES.values() if isinstance(shape, family.shape))
    return family.write(shape)
