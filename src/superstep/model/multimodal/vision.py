"""The picture encoder of Qwen3-VL (Bai 2025): patches in a picture's own size, several pictures in a row of the batch.

Fields of the batch:

    pixels           [B, P, C · T · h · w]    patches, of all pictures of a row; those that become one token together
    patches          [B, P, 4]                of each patch: row, column, and its picture's rows and columns
    pixels.sample    [B, P]                   number of the sample, -1 in the padding

    B  rows of the batch    P  patches of a row    D  width    N  heads    H  width of one head    M  tokens of a row
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from superstep.model.custom.within_samples import attend_within
from superstep.model.unit import ParamSpec, UnitSpec
from superstep.plan.model.multimodal.vision_shape import VisionShape

PIXELS, PATCHES, NUMBERS = "pixels", "patches", "pixels.sample"
EPS = 1e-6


class PatchProjection(nn.Conv3d):
    """A patch's numbers to the width: a convolution with a stride of its own size, as one product."""

    def __init__(self, shape: VisionShape) -> None:
        size = (shape.frames, shape.patch, shape.patch)
        super().__init__(shape.channels, shape.width, size, stride=size)

    def forward(self, pixels_BPX: Tensor) -> Tensor:
        return F.linear(pixels_BPX, self.weight.flatten(1), self.bias)


class VisionStem(nn.Module):
    """Patches to the stream, and the table of positions, interpolated to each picture's size."""

    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        self.side = shape.side
        self.proj = PatchProjection(shape)
        self.pos_embed = nn.Embedding(shape.side**2, shape.width)

    def forward(self, pixels_BPX: Tensor, patches_BP4: Tensor) -> Tensor:
        """The stream, [B, P, D]."""
        x_BPD: Tensor = self.proj(pixels_BPX)
        position_BP2, size_BP2 = patches_BP4.split(2, -1)
        scaled = position_BP2.float() * (self.side - 1) / (size_BP2 - 1).clamp(min=1)
        low = scaled.floor().long().clamp(0, self.side - 1)
        share = scaled - low
        for row, wide in ((0, 1 - share[..., 0]), (1, share[..., 0])):
            for column, high in ((0, 1 - share[..., 1]), (1, share[..., 1])):
                at_row, at_column = (
                    (low[..., dim] + more).clamp(max=self.side - 1) for dim, more in ((0, row), (1, column))
                )
                place = at_row * self.side + at_column
                x_BPD = x_BPD + self.pos_embed(place) * (wide * high).unsqueeze(-1).to(x_BPD.dtype)
        return x_BPD


class VisionAttention(nn.Module):
    """Attention of the patches of one picture, in both directions; queries and keys are rotated by row and column."""

    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        self.head_dim, self.theta = shape.width // shape.heads, shape.theta
        self.qkv, self.proj = nn.Linear(shape.width, 3 * shape.width), nn.Linear(shape.width, shape.width)

    def forward(self, x_BPD: Tensor, patches_BP4: Tensor, pictures_BP: Tensor) -> Tensor:
        q_BPNH, k_BPNH, v_BPNH = self.qkv(x_BPD).unflatten(-1, (3, -1, self.head_dim)).unbind(2)
        angles_BP1H = self._angles(patches_BP4)
        q_BPNH, k_BPNH = rotate(q_BPNH, angles_BP1H), rotate(k_BPNH, angles_BP1H)
        out_BPD: Tensor = self.proj(attend_within(q_BPNH, k_BPNH, v_BPNH, numbers_BS=pictures_BP).flatten(2))
        return out_BPD

    def _angles(self, patches_BP4: Tensor) -> Tensor:
        half = self.head_dim // 2
        pair = torch.arange(0, half, 2, device=patches_BP4.device).float()
        turned = patches_BP4[..., :2, None].float() * (1.0 / self.theta ** (pair / half))
        return turned.flatten(-2).repeat(1, 1, 2).unsqueeze(2)


def rotate(x_BPNH: Tensor, angles_BP1H: Tensor) -> Tensor:
    """Each pair (i, i + H/2) of a head turned by its angle, in fp32."""
    wide = x_BPNH.float()
    first, second = wide.chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    return (wide * angles_BP1H.cos() + turned * angles_BP1H.sin()).to(x_BPNH.dtype)


class VisionFeedForward(nn.Module):
    """Two linear layers with a GELU between."""

    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        self.linear_fc1, self.linear_fc2 = nn.Linear(shape.width, shape.ffn), nn.Linear(shape.ffn, shape.width)

    def forward(self, x_BPD: Tensor) -> Tensor:
        out_BPD: Tensor = self.linear_fc2(F.gelu(self.linear_fc1(x_BPD), approximate="tanh"))
        return out_BPD


class VisionBlock(nn.Module):
    """One layer of the encoder."""

    def __init__(self, shape: VisionShape) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(shape.width, EPS), nn.LayerNorm(shape.width, EPS)
        self.attn, self.mlp = VisionAttention(shape), VisionFeedForward(shape)

    def forward(self, x_BPD: Tensor, patches_BP4: Tensor, numbers_BP: Tensor) -> Tensor:
        pictures_BP = number_pictures(patches_BP4, numbers_BP)
        x_BPD = x_BPD + self.attn(self.norm1(x_BPD), patches_BP4, pictures_BP)
        out_BPD: Tensor = x_BPD + self.mlp(self.norm2(x_BPD))
        return out_BPD


def number_pictures(patches_BP4: Tensor, numbers_BP: Tensor) -> Tensor:
    """The number of each patch's picture in its row of the batch, [B, P]; -1 in the padding.

    A picture begins with the patch of row 0 and column 0.
    """
    is_first_BP = (patches_BP4[..., :2] == 0).all(-1)
    return (is_first_BP.cumsum(1) - 1).masked_fill(numbers_BP < 0, -1)


class Merger(nn.Module):
    """Squares of patches to rows of the decoder's width. The norm is of one patch, with ``is_deep`` of a square."""

    def __init__(self, shape: VisionShape, *, is_deep: bool = False) -> None:
        super().__init__()
        self.patches = shape.merge**2
        self.is_deep = is_deep
        self.norm = nn.LayerNorm(shape.square if is_deep else shape.width, EPS)
        self.linear_fc1, self.linear_fc2 = nn.Linear(shape.square, shape.square), nn.Linear(shape.square, shape.outputs)

    def forward(self, x_BPD: Tensor) -> Tensor:
        """The tokens' rows, [B, M, outputs]."""
        if not self.is_deep:
            x_BPD = self.norm(x_BPD)
        x_BMX = x_BPD.unflatten(1, (-1, self.patches)).flatten(2)
        if self.is_deep:
            x_BMX = self.norm(x_BMX)
        out: Tensor = self.linear_fc2(F.gelu(self.linear_fc1(x_BMX)))
        return out


STEM_AXES = {
    "proj.weight": ("stream", None, None, None, None),
    "proj.bias": ("stream",),
    "pos_embed.weight": ("positions", "stream"),
}
BLOCK_AXES = {
    "norm1.weight": ("stream",),
    "norm1.bias": ("stream",),
    "attn.qkv.weight": ("heads", "stream"),
    "attn.qkv.bias": ("heads",),
    "attn.proj.weight": ("stream", "heads"),
    "attn.proj.bias": ("stream",),
    "norm2.weight": ("stream",),
    "norm2.bias": ("stream",),
    "mlp.linear_fc1.weight": ("ffn", "stream"),
    "mlp.linear_fc1.bias": ("ffn",),
    "mlp.linear_fc2.weight": ("stream", "ffn"),
    "mlp.linear_fc2.bias": ("stream",),
}
MERGER_AXES = {
    "norm.weight": ("stream",),
    "norm.bias": ("stream",),
    "linear_fc1.weight": ("ffn", "merged"),
    "linear_fc1.bias": ("ffn",),
    "linear_fc2.weight": ("stream", "ffn"),
    "linear_fc2.bias": ("stream",),
}


def vision_units(shape: VisionShape, prefix: str = "visual.") -> tuple[UnitSpec, ...]:
    """The encoder as units, ``vision.stem``, ``vision.0``, ..., ``vision.merger``; those of ``deepstack``, such as
    ``vision.deepstack.0``, behind their layers. ``prefix`` is that of the parameters' names.
    """

    def spec(name: str, axes: tuple[str | None, ...]) -> ParamSpec:
        std = shape.init_std if len(axes) > 1 else 0.0 if name.endswith("bias") else None
        sections = (shape.width,) * 3 if ".qkv." in name else ()
        return ParamSpec(name=f"{prefix}{name}", axes=axes, std=std, sections=sections)

    def block(layer: int) -> UnitSpec:
        before = f"vision.{layer - 1}" if layer else "vision.stem"
        params = {local: spec(f"blocks.{layer}.{local}", axes) for local, axes in BLOCK_AXES.items()}
        build = partial(VisionBlock, shape)
        return UnitSpec(name=f"vision.{layer}", build=build, params=params, inputs=(before, PATCHES, NUMBERS))

    def merger(name: str, of: str, path: str, *, is_deep: bool) -> UnitSpec:
        params = {local: spec(f"{path}.{local}", axes) for local, axes in MERGER_AXES.items()}
        return UnitSpec(name=name, build=partial(Merger, shape, is_deep=is_deep), params=params, inputs=(of,))

    def deep(layer: int) -> Iterator[UnitSpec]:
        if layer in shape.deepstack:
            number = shape.deepstack.index(layer)
            path = f"deepstack_merger_list.{number}"
            yield merger(f"vision.deepstack.{number}", f"vision.{layer}", path, is_deep=True)

    stem = {
        local: spec(f"patch_embed.{local}" if local.startswith("proj.") else local, axes)
        for local, axes in STEM_AXES.items()
    }
    return (
        UnitSpec(name="vision.stem", build=partial(VisionStem, shape), params=stem, inputs=(PIXELS, PATCHES)),
        *(unit for layer in range(shape.layers) for unit in (block(layer), *deep(layer))),
        merger("vision.merger", f"vision.{shape.layers - 1}", "merger", is_deep=False),
    )
