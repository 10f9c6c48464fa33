"""A ``config.json`` of Qwen3-VL as a shape, and a shape as a ``config.json``: a Qwen3 in ``text_config``, whose rotary
embedding has three dims, and an encoder in ``vision_config``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from superstep.plan.model.hf_config import read_shape, to_hf_config
from superstep.plan.model.hf_families import HARMLESS
from superstep.plan.model.json_reader import JsonKeys
from superstep.plan.model.multimodal.vision_shape import VisionLanguageShape, VisionShape

TOKENS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
TOP = {"tie_word_embeddings": False} | dict(zip(TOKENS, (151655, 151656, 151652, 151653), strict=True))
TEXT: dict[str, Any] = {
    "num_key_value_heads": None,
    "head_dim": 128,
    "max_position_embeddings": 128000,
    "rope_theta": 500000.0,
}
VISION: dict[str, Any] = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
    "initializer_range": 0.02,
    "rope_parameters": None,
}
SECTIONS = [24, 20, 20]
"""Pairs of a head that are rotated by time, row and column, in a file that does not say so."""


def read_qwen3_vl(raw: Mapping[str, Any], place: str) -> VisionLanguageShape:
    """The shape in a file's object.

    Args:
        raw: the object.
        place: the file, for errors.

    Raises:
        ConfigError: names a key that is missing, or that the encoder or the decoder does not support.
    """
    keys = JsonKeys(raw, place, TOP)
    text_keys, vision_keys = keys.table("text_config"), keys.table("vision_config")
    text, sections = _read_sections(text_keys, f"{place}text_config.")
    tied = keys.flag("tie_word_embeddings")
    decoder = replace(read_shape(text, "qwen3", f"{place}text_config."), tied=tied)
    vision = _read_vision(JsonKeys(vision_keys, f"{place}vision_config.", VISION), decoder.width)
    if len(vision.deepstack) > decoder.layers:
        raise keys.refusal("vision_config", f"has more deepstack layers than the decoder's {decoder.layers}")
    image, *others = (keys.whole(name, least=0) for name in TOKENS)
    if not 0 < image < decoder.vocab:
        raise keys.refusal(TOKENS[0], f"must be a token from 1 to {decoder.vocab - 1}")
    keys.require_read({*HARMLESS, "model_type", "architectures", "bos_token_id", "eos_token_id", "pad_token_id"})
    video, start, end = others
    return VisionLanguageShape(
        vision=vision, decoder=decoder, image_token=image, sections=sections, other_tokens=(video, start, end)
    )


def _read_sections(text: Mapping[str, Any], place: str) -> tuple[dict[str, Any], tuple[int, int, int]]:
    """The keys of a Qwen3, without those of the three dims, and the sections."""
    plain, sections = TEXT | dict(text), list(SECTIONS)
    if "rope_theta" not in text and "rope_theta" in (text.get("rope_parameters") or {}):
        del plain["rope_theta"]
    for name in ("rope_parameters", "rope_scaling"):
        rope = plain.get(name)
        if not isinstance(rope, dict):
            continue
        part = JsonKeys(rope, f"{place}{name}.", {"mrope_section": SECTIONS})
        part.require({"mrope_interleaved": (True,)})
        sections = part.get("mrope_section")
        if not isinstance(sections, list) or len(sections) != 3 or not all(type(n) is int and n > 0 for n in sections):
            raise part.refusal("mrope_section", "must be three whole numbers of at least 1")
        plain[name] = {key: value for key, value in rope.items() if not key.startswith("mrope_")}
        if set(plain[name]) <= {"type", "rope_type"} and plain[name].get("rope_type") in (None, "default"):
            plain[name] = None
    for key in ("model_type", "tie_word_embeddings"):  # the whole file's counts
        plain.pop(key, None)
    time, row, column = sections
    return plain, (time, row, column)


def _read_vision(keys: JsonKeys, width: int) -> VisionShape:
    keys.require({"hidden_act": ("gelu_pytorch_tanh",), "out_hidden_size": (width,)})
    rope, theta = keys.get("rope_parameters"), 10000.0
    if rope is not None:
        part = JsonKeys(rope, "rope_parameters.", {"rope_theta": theta})
        part.require({"rope_type": ("axial",)})
        theta = part.positive("rope_theta")
        part.require_read(())
    places, deepstack = keys.whole("num_position_embeddings"), keys.get("deepstack_visual_indexes")
    shape = VisionShape(
        layers=keys.whole("depth"),
        width=keys.whole("hidden_size"),
        heads=keys.whole("num_heads"),
        ffn=keys.whole("intermediate_size"),
        patch=keys.whole("patch_size"),
        merge=keys.whole("spatial_merge_size"),
        side=math.isqrt(places),
        outputs=width,
        frames=keys.whole("temporal_patch_size"),
        channels=keys.whole("in_channels"),
        deepstack=tuple(deepstack or ()),
        theta=theta,
        init_std=keys.positive("initializer_range"),
    )
    if shape.side**2 != places:
        raise keys.refusal("num_position_embeddings", "must be a square number")
    if shape.width % (4 * shape.heads):
        raise keys.refusal("hidden_size", f"must be a multiple of 4 · num_heads = {4 * shape.heads}")
    if list(shape.deepstack) != sorted({layer for layer in shape.deepstack if layer in range(shape.layers)}):
        raise keys.refusal("deepstack_visual_indexes", f"must be growing numbers of layers, below {shape.layers}")
    keys.require_read({*HARMLESS, "model_type"})
    return shape


def write_qwen3_vl(shape: VisionLanguageShape) -> dict[str, Any]:
    """The ``config.json`` that Hugging Face's loader and ``read_qwen3_vl`` read back as this shape."""
    text, vision = to_hf_config(shape.decoder), shape.vision
    dropped = ("architectures", "tie_word_embeddings", "use_sliding_window", "sliding_window", "max_window_layers")
    text = {key: value for key, value in text.items() if key not in (*dropped, "layer_types", "mlp_bias")}
    text["rope_parameters"] = {
        **text["rope_parameters"],
        "mrope_section": list(shape.sections),
        "mrope_interleaved": True,
    }
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "tie_word_embeddings": shape.decoder.tied,
        **dict(zip(TOKENS, (shape.image_token, *shape.other_tokens), strict=True)),
        "torch_dtype": "float32",
        "text_config": {**text, "model_type": "qwen3_vl_text"},
        "vision_config": {
            "model_type": "qwen3_vl_vision",
            "depth": vision.layers,
            "hidden_size": vision.width,
            "hidden_act": "gelu_pytorch_tanh",
            "intermediate_size": vision.ffn,
            "num_heads": vision.heads,
            "in_channels": vision.channels,
            "patch_size": vision.patch,
            "spatial_merge_size": vision.merge,
            "temporal_patch_size": vision.frames,
            "out_hidden_size": vision.outputs,
            "num_position_embeddings": vision.side**2,
            "deepstack_visual_indexes": list(vision.deepstack),
            "initializer_range": vision.init_std,
            "rope_parameters": {"rope_type": "axial", "rope_theta": vision.theta},
        },
    }
