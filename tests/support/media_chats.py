"""Small models of pictures and of sounds as Hugging Face's folders, and conversations about such files."""

import base64
import json
import wave
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from transformers.models.qwen2_audio import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration
from transformers.models.qwen3_vl import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from beside_transformers import save_randomly
from model_folder import LINES
from superstep.data.tokenizer import load_tokenizer, train_tokenizer
from tuned import RECIPE, write_records

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|begin|>", "<|end|>", "<|pad|>")
"""Of these the last one stands for a picture or a sound, between the two before it."""
TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}"
    "{% if 'image' in part or 'audio' in part %}<|begin|><|pad|><|end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PICTURES = {"do_resize": True, "image_mean": [0.5] * 3, "image_std": [0.25] * 3, "min_pixels": 16, "max_pixels": 96}
COLOURS = {"red": (250, 10, 10), "green": (10, 250, 10), "blue": (10, 10, 250)}
PITCHES = {"low": 200, "high": 3000}


def write_tokenizer(folder):
    """A tokenizer with the special tokens; returns the id of the last one."""
    tokenizer = train_tokenizer(LINES * 20, 300)
    tokenizer.core.add_special_tokens(list(SPECIAL))
    folder.mkdir(exist_ok=True)
    tokenizer.save(folder / "tokenizer.json")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    loaded = load_tokenizer(folder / "tokenizer.json")
    return loaded.core.token_to_id(SPECIAL[-1]), loaded.vocab


def write_picture_model(folder, deepstack=()):
    """The folder of a small Qwen3-VL."""
    torch.manual_seed(0)
    token, vocab = write_tokenizer(folder)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    text = {
        "vocab_size": vocab, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
        "rope_parameters": rope,
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 2, "out_hidden_size": 32,
        "temporal_patch_size": 1, "num_position_embeddings": 16, "deepstack_visual_indexes": list(deepstack),
    }  # fmt: skip
    config = Qwen3VLConfig(
        text_config=text, vision_config=vision, image_token_id=token, video_token_id=1, vision_start_token_id=2,
        vision_end_token_id=3, tie_word_embeddings=False,
    )  # fmt: skip
    save_randomly(Qwen3VLForConditionalGeneration(config), folder)
    sizes = {"patch_size": 2, "merge_size": 2, "temporal_patch_size": 1}
    (folder / "preprocessor_config.json").write_text(json.dumps(PICTURES | sizes))
    return folder


def write_sound_model(folder):
    """The folder of a small Qwen2-Audio."""
    torch.manual_seed(0)
    token, vocab = write_tokenizer(folder)
    text = {
        "model_type": "qwen2", "vocab_size": vocab, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "rope_theta": 1e4,
    }  # fmt: skip
    audio = {
        "model_type": "qwen2_audio_encoder", "num_mel_bins": 8, "encoder_layers": 2, "encoder_attention_heads": 2,
        "encoder_ffn_dim": 24, "d_model": 16, "max_source_positions": 24,
    }  # fmt: skip
    config = Qwen2AudioConfig(text_config=text, audio_config=audio, audio_token_index=token)
    save_randomly(Qwen2AudioForConditionalGeneration(config), folder)
    return folder


def write_picture(path, colour, size=(8, 6)):
    Image.new("RGB", size, COLOURS[colour]).save(path)
    return path


def write_sound(path, pitch, seconds=0.2):
    times = np.arange(int(seconds * 16000)) / 16000
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16000)
        file.writeframes((np.sin(2 * np.pi * PITCHES[pitch] * times) * 20000).astype("<i2").tobytes())
    return path


def ask(parts, answer):
    return {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]}


def picture_chats(folder, count):
    """A colour that is asked for: as a path, as a data: URL, two of them, and text alone."""
    for number in range(count):
        colour, other = list(COLOURS)[number % 3], list(COLOURS)[(number + 1) % 3]
        text = {"type": "text", "text": "colour?"}
        one = write_picture(folder / f"{number}.png", colour, (6 + number % 5, 4 + number % 3))
        two = write_picture(folder / f"{number}b.png", other)
        held = "data:image/png;base64," + base64.b64encode(one.read_bytes()).decode()
        yield [
            ask([{"type": "image", "image": one.name}, text], colour),
            ask([text, {"type": "image_url", "image_url": {"url": held}}], colour),
            ask([{"type": "image", "path": one.name}, {"type": "image", "url": two.name}, text], f"{colour} {other}"),
            ask("to be", "or not"),
        ][number % 4]


def sound_chats(folder, count):
    """A pitch that is asked for: as a path, as base64, and text alone."""
    for number in range(count):
        pitch = list(PITCHES)[number % 2]
        text = {"type": "text", "text": "pitch?"}
        one = write_sound(folder / f"{number}.wav", pitch, 0.1 + number % 3 * 0.06)
        held = {"data": base64.b64encode(one.read_bytes()).decode(), "format": "wav"}
        yield [
            ask([{"type": "audio", "audio": one.name}, text], pitch),
            ask([{"type": "audio", "audio_url": one.name}, text, {"type": "input_audio", "input_audio": held}], pitch),
            ask("to be", "or not"),
        ][number % 3]


def make_media_files(folder: Path, kind: str, *, count=40, deepstack=()):
    """``base``, ``chats.jsonl`` and ``recipe.toml`` of pictures or of sounds."""
    if kind == "pictures":
        write_picture_model(folder / "base", deepstack)
    else:
        write_sound_model(folder / "base")
    chats = picture_chats if kind == "pictures" else sound_chats
    write_records(folder / "chats.jsonl", chats(folder, count))
    recipe = RECIPE.replace("sequence_tokens = 96", "sequence_tokens = 64\nmedia_tokens = 32")
    (folder / "recipe.toml").write_text(recipe, encoding="utf-8")
    return folder
