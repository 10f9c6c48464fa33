"""A file of samples of text, of sounds, and of both, with a small Qwen2-Audio, as a user would write it."""

from pathlib import Path

from ragged import TOML

SAMPLES = '''
import torch

from superstep.data.samples.log_mel import HOP, cut_frames
from superstep.model.multimodal.qwen2_audio import audio_language_units
from superstep.plan.model.multimodal.audio_shape import AudioLanguageShape, AudioShape
from superstep.plan.model.shape import ModelShape

SOUND = 30
CAPACITY = {"tokens": 24, "target": 24, "mel": 48, "frames": 48}
PLACEHOLDERS = {"mel": (SOUND, 4)}
INPUT = "tokens"
AUDIO = AudioShape(layers=2, width=16, heads=2, ffn=24, bands=8, places=12, outputs=16)
DECODER = ModelShape(
    family="llama", layers=2, width=16, heads=2, kv_heads=2, head_dim=8, ffn=32, vocab=32, tied=False, qk_norm=False,
    qkv_bias=True, norm_eps=1e-6, rope_theta=1e4, rope_scaling=None, max_tokens=24,
)
SHAPE = AudioLanguageShape(audio=AUDIO, decoder=DECODER, audio_token=SOUND)


def length(split):
    return 60 if split == "train" else 12


def parts(index):
    """Tokens of text, and frames of each sound."""
    sounds = [[], [8], [12, 4], [16]][index % 4]
    return (0 if index % 4 == 3 else 3 + index * 7 % 9), sounds


def size(split, index):
    text, sounds = parts(index)
    tokens, frames = text + sum(sounds) // 4, sum(sounds)
    return {"tokens": tokens, "target": tokens, "mel": frames, "frames": frames}


def sample(split, index, noise):
    """Numbers that grow by a step; sounds stand in front of them, and all targets follow from their number."""
    text, sounds = parts(index)
    start, step = int(noise.integers(29)), 1 + index % 3
    tokens = torch.cat([torch.full((sum(sounds) // 4,), SOUND), (start + step * torch.arange(text)) % 29 + 1])
    drawn = [torch.from_numpy(noise.normal(size=frames * HOP)).float() for frames in sounds]
    cut = [cut_frames(sound, AUDIO) for sound in drawn]
    return {
        "tokens": tokens,
        "mel": torch.cat([torch.zeros(0, AUDIO.bands), *(mel for mel, _ in cut)]),
        "frames": torch.cat([torch.zeros(0, dtype=torch.long), *(frames for _, frames in cut)]),
        "target": (tokens + len(sounds)) % 29,
    }


def units(config):
    return audio_language_units(SHAPE)
'''


def write_sounds(folder: Path, text: str = SAMPLES) -> Path:
    """``sounds.py`` and ``run.toml``; returns the file of samples."""
    path = folder / "sounds.py"
    path.write_text(text, encoding="utf-8")
    (folder / "run.toml").write_text(TOML.format(name="sounds", batch=8), encoding="utf-8")
    return path
