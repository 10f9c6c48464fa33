"""The sound encoder of Qwen2-Audio (Chu 2024), of Whisper's shape (Radford 2022): several sounds in a row of the batch,
of any length up to that of the table of positions.

Fields of the batch:

    mel           [B, F, bands]    log-mel frames, 10 ms each, of all sounds of a row
    frames        [B, F]           the number of each frame in its sound, from 0 on
    mel.sample    [B, F]           number of the sample, -1 in the padding

    B  rows of the batch    F  frames of a row    S  places: every other frame    D  width    N  heads
    H  width of one head    M  tokens of a row: two places each
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from superstep.model.custom.within_samples import attend_within, neighbours_within
from superstep.model.unit import ParamSpec, UnitSpec
from superstep.plan.model.multimodal.audio_shape import AudioShape

MEL, FRAMES, NUMBERS = "mel", "frames", "mel.sample"


def number_sounds(frames_BF: Tensor, numbers_BF: Tensor) -> Tensor:
    """The number of each frame's sound in its row of the batch, [B, F]; -1 in the padding."""
    return ((frames_BF == 0).cumsum(1) - 1).masked_fill(numbers_BF < 0, -1)


class FrameConvolution(nn.Conv1d):
    """A convolution of three frames with zeros at both ends of each sound, as one product."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, 3)

    def forward(self, x_BFC: Tensor, sounds_BF: Tensor, stride: int = 1) -> Tensor:  # type: ignore[override]
        near_BSX = neighbours_within(x_BFC, sounds_BF)[:, ::stride]
        return F.linear(near_BSX, self.weight.transpose(1, 2).flatten(1), self.bias)


class AudioStem(nn.Module):
    """Two convolutions, the second of every other frame, and a table of positions."""

    def __init__(self, shape: AudioShape) -> None:
        super().__init__()
        self.conv1 = FrameConvolution(shape.bands, shape.width)
        self.conv2 = FrameConvolution(shape.width, shape.width)
        self.embed_positions = nn.Embedding(shape.places, shape.width)

    def forward(self, mel_BFC: Tensor, frames_BF: Tensor, numbers_BF: Tensor) -> Tensor:
        """The stream, [B, S, D]."""
        sounds_BF = number_sounds(frames_BF, numbers_BF)
        x_BFD = F.gelu(self.conv1(mel_BFC, sounds_BF))
        x_BSD: Tensor = F.gelu(self.conv2(x_BFD, sounds_BF, 2))
        place_BSD: Tensor = self.embed_positions(frames_BF[:, ::2] // 2)
        return x_BSD + place_BSD


class AudioAttention(nn.Module):
    """Attention of the places of one sound, in both directions."""

    def __init__(self, shape: AudioShape) -> None:
        super().__init__()
        self.head_dim = shape.width // shape.heads
        self.q_proj, self.v_proj, self.out_proj = (nn.Linear(shape.width, shape.width) for _ in range(3))
        self.k_proj = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x_BSD: Tensor, sounds_BS: Tensor) -> Tensor:
        read = self.q_proj(x_BSD), self.k_proj(x_BSD), self.v_proj(x_BSD)
        q_BSNH, k_BSNH, v_BSNH = (each.unflatten(-1, (-1, self.head_dim)) for each in read)
        out_BSD: Tensor = self.out_proj(attend_within(q_BSNH, k_BSNH, v_BSNH, numbers_BS=sounds_BS).flatten(2))
        return out_BSD


class AudioBlock(nn.Module):
    """One layer of the encoder."""

    def __init__(self, shape: AudioShape) -> None:
        super().__init__()
        self.self_attn_layer_norm, self.final_layer_norm = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.self_attn = AudioAttention(shape)
        self.fc1, self.fc2 = nn.Linear(shape.width, shape.ffn), nn.Linear(shape.ffn, shape.width)

    def forward(self, x_BSD: Tensor, frames_BF: Tensor, numbers_BF: Tensor) -> Tensor:
        sounds_BS = number_sounds(frames_BF, numbers_BF)[:, ::2]
        x_BSD = x_BSD + self.self_attn(self.self_attn_layer_norm(x_BSD), sounds_BS)
        out_BSD: Tensor = x_BSD + self.fc2(F.gelu(self.fc1(self.final_layer_norm(x_BSD))))
        return out_BSD


class AudioProjector(nn.Module):
    """Means of two places to rows of the decoder's width."""

    def __init__(self, shape: AudioShape) -> None:
        super().__init__()
        self.layer_norm = nn.LayerNorm(shape.width)
        self.linear = nn.Linear(shape.width, shape.outputs)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """The tokens' rows, [B, M, outputs]."""
        out: Tensor = self.linear(self.layer_norm(x_BSD.unflatten(1, (-1, 2)).mean(2)))
        return out


STEM_AXES: dict[str, tuple[str | None, ...]] = {
    "conv1.weight": ("stream", "bands", None),
    "conv1.bias": ("stream",),
    "conv2.weight": ("stream", "stream", None),
    "conv2.bias": ("stream",),
    "embed_positions.weight": ("positions", "stream"),
}
BLOCK_AXES: dict[str, tuple[str | None, ...]] = {
    "self_attn.q_proj.weight": ("heads", "stream"),
    "self_attn.q_proj.bias": ("heads",),
    "self_attn.k_proj.weight": ("heads", "stream"),
    "self_attn.v_proj.weight": ("heads", "stream"),
    "self_attn.v_proj.bias": ("heads",),
    "self_attn.out_proj.weight": ("stream", "heads"),
    "self_attn.out_proj.bias": ("stream",),
    "self_attn_layer_norm.weight": ("stream",),
    "self_attn_layer_norm.bias": ("stream",),
    "fc1.weight": ("ffn", "stream"),
    "fc1.bias": ("ffn",),
    "fc2.weight": ("stream", "ffn"),
    "fc2.bias": ("stream",),
    "final_layer_norm.weight": ("stream",),
    "final_layer_norm.bias": ("stream",),
}
PROJECTOR_NAMES = {
    "layer_norm.weight": "audio_tower.layer_norm.weight",
    "layer_norm.bias": "audio_tower.layer_norm.bias",
    "linear.weight": "multi_modal_projector.linear.weight",
    "linear.bias": "multi_modal_projector.linear.bias",
}
PROJECTOR_AXES: dict[str, tuple[str | None, ...]] = {
    "layer_norm.weight": ("stream",),
    "layer_norm.bias": ("stream",),
    "linear.weight": ("outputs", "stream"),
    "linear.bias": ("outputs",),
}


def audio_units(shape: AudioShape) -> tuple[UnitSpec, ...]:
    """The encoder as units, ``audio.stem``, ``audio.0``, ..., ``audio.projector``. The table of positions is not
    trained, as in transformers; without given weights it has Whisper's sinusoids.
    """

    def spec(name: str, axes: tuple[str | None, ...]) -> ParamSpec:
        std = shape.init_std if len(axes) > 1 else 0.0 if name.endswith("bias") else None
        return ParamSpec(name=name, axes=axes, std=std)

    def block(layer: int) -> UnitSpec:
        params = {local: spec(f"audio_tower.layers.{layer}.{local}", axes) for local, axes in BLOCK_AXES.items()}
        before = f"audio.{layer - 1}" if layer else "audio.stem"
        build = partial(AudioBlock, shape)
        return UnitSpec(name=f"audio.{layer}", build=build, params=params, inputs=(before, FRAMES, NUMBERS))

    stem = {local: spec(f"audio_tower.{local}", axes) for local, axes in STEM_AXES.items()}
    table = replace(stem["embed_positions.weight"], values=sinusoids(shape.places, shape.width), is_frozen=True)
    stem["embed_positions.weight"] = table
    projector = {local: spec(name, PROJECTOR_AXES[local]) for local, name in PROJECTOR_NAMES.items()}
    last = f"audio.{shape.layers - 1}"
    return (
        UnitSpec(name="audio.stem", build=partial(AudioStem, shape), params=stem, inputs=(MEL, FRAMES, NUMBERS)),
        *(block(layer) for layer in range(shape.layers)),
        UnitSpec(name="audio.projector", build=partial(AudioProjector, shape), params=projector, inputs=(last,)),
    )


def sinusoids(places: int, width: int) -> Tensor:
    """Whisper's table of positions: sines of each place's angles, then cosines; [places, width]."""
    rates = torch.exp(-math.log(10000) * torch.arange(width // 2) / max(1, width // 2 - 1))
    angles = torch.arange(places).unsqueeze(1) * rates
    return torch.cat([angles.sin(), angles.cos(), torch.zeros(places, width % 2)], -1)
