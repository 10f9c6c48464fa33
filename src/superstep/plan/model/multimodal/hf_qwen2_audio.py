"""A ``config.json`` of Qwen2-Audio as a shape, and a shape as a ``config.json``: a Qwen2 in ``text_config``, and an
encoder in ``audio_config``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from superstep.plan.model.hf_config import read_shape, to_hf_config
from superstep.plan.model.hf_families import HARMLESS
from superstep.plan.model.json_reader import JsonKeys
from superstep.plan.model.multimodal.audio_shape import FRAMES, AudioLanguageShape, AudioShape

TOKEN = "audio_token_index"
TEXT: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "vocab_size": 151936,
}
AUDIO: dict[str, Any] = {
    "encoder_layers": 32,
    "d_model": 1280,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "num_mel_bins": 128,
    "max_source_positions": 1500,
    "initializer_range": 0.02,
}
UNUSED = ("ignore_index", "vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
"""Keys of the whole file that change nothing: the decoder's own count."""


def read_qwen2_audio(raw: Mapping[str, Any], place: str) -> AudioLanguageShape:
    """The shape in a file's object.

    Args:
        raw: the object.
        place: the file, for errors.

    Raises:
        ConfigError: names a key that is missing, or that the encoder or the decoder does not support.
    """
    keys = JsonKeys(raw, place, {TOKEN: 151646})
    text_keys, audio_keys = keys.table("text_config"), keys.table("audio_config")
    keys.require({"tie_word_embeddings": (False,), "architectures": (["Qwen2AudioForConditionalGeneration"],)})
    where = f"{place}text_config."
    text = JsonKeys(text_keys, where, {})
    text.require({"model_type": ("qwen2",), "tie_word_embeddings": (False,)})
    decoder = replace(read_shape(TEXT | text_keys, "qwen2", where), tied=False)
    audio = _read_audio(JsonKeys(audio_keys, f"{place}audio_config.", AUDIO), decoder.width)
    token = keys.whole(TOKEN)
    if token >= decoder.vocab:
        raise keys.refusal(TOKEN, f"must be a token from 1 to {decoder.vocab - 1}")
    keys.require_read({*HARMLESS, *UNUSED})
    return AudioLanguageShape(audio=audio, decoder=decoder, audio_token=token)


def _read_audio(keys: JsonKeys, width: int) -> AudioShape:
    noise = ("dropout", "attention_dropout", "activation_dropout", "encoder_layerdrop")
    keys.require(
        {"activation_function": ("gelu",), "scale_embedding": (False,), **dict.fromkeys(noise, (0.0,))},
    )
    shape = AudioShape(
        layers=keys.whole("encoder_layers"),
        width=keys.whole("d_model"),
        heads=keys.whole("encoder_attention_heads"),
        ffn=keys.whole("encoder_ffn_dim"),
        bands=keys.whole("num_mel_bins"),
        places=keys.whole("max_source_positions"),
        outputs=width,
        init_std=keys.positive("initializer_range"),
    )
    if shape.width % shape.heads:
        raise keys.refusal("d_model", f"must be a multiple of encoder_attention_heads = {shape.heads}")
    if shape.places % (FRAMES // 2):
        raise keys.refusal("max_source_positions", "must be an even number: two places become one token")
    keys.require_read({*HARMLESS, "model_type", "init_std"})
    return shape


def write_qwen2_audio(shape: AudioLanguageShape) -> dict[str, Any]:
    """The ``config.json`` that Hugging Face's loader and ``read_qwen2_audio`` read back as this shape."""
    text, audio = to_hf_config(shape.decoder), shape.audio
    return {
        "architectures": ["Qwen2AudioForConditionalGeneration"],
        "model_type": "qwen2_audio",
        TOKEN: shape.audio_token,
        "torch_dtype": "float32",
        "text_config": {key: value for key, value in text.items() if key != "architectures"},
        "audio_config": {
            "model_type": "qwen2_audio_encoder",
            "encoder_layers": audio.layers,
            "d_model": audio.width,
            "encoder_attention_heads": audio.heads,
            "encoder_ffn_dim": audio.ffn,
            "num_mel_bins": audio.bands,
            "max_source_positions": audio.places,
            "activation_function": "gelu",
            "initializer_range": audio.init_std,
        },
    }
