"""Qwen3-VL (Bai 2025) as units: its encoder of pictures, and its decoder with positions of three dims.

tokens       [B, S]        text, in which ``image_token`` stands for a square of patches
positions    [B, S, 3]     of each token: time, row and column; equal for text
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from superstep.model.axes import units as decoder_units
from superstep.model.decoder import Attend, Block
from superstep.model.multimodal.place_rows import TOKENS, join_decoder, place_rows, rename_parameters
from superstep.model.multimodal.vision import vision_units
from superstep.model.rope import Rope
from superstep.model.unit import UnitSpec
from superstep.plan.model.multimodal.vision_shape import VisionLanguageShape
from superstep.plan.model.shape import ModelShape

POSITIONS = "positions"


class RopeOfThree(Rope):
    """The rotary embedding of positions [..., S, 3], whose dims share a head's pairs in turn (interleaved M-RoPE).

    Args:
        shape: the decoder's.
        sections: pairs of time, row and column.
    """

    def __init__(self, shape: ModelShape, sections: tuple[int, int, int]) -> None:
        super().__init__(shape)
        self._sections = sections

    def _angles(self, positions: Tensor) -> Tensor:
        return positions.float().index_select(-1, self._dims(positions.device)) * self._frequencies(positions.device)

    def _dims(self, device: torch.device) -> Tensor:
        """The dim of each pair, [H/2], computed on the device, which waits for no copy."""
        pair = torch.arange(self.head_dim // 2, device=device)
        of = pair % 3
        _, rows, columns = self._sections
        return ((of == 1) & (pair < 3 * rows)).long() + 2 * ((of == 2) & (pair < 3 * columns)).long()


class BlockOfThree(Block):
    """A decoder's layer with given positions; with a deepstack its output has the encoder's rows added.

    Args:
        shape: the decoder's.
        rope: of positions with three dims.
        layer: its number.
        token: stands for an encoder's row.
    """

    def __init__(self, shape: ModelShape, rope: Rope, layer: int, token: int) -> None:
        super().__init__(shape, rope, layer)
        self.token = token

    def forward(  # type: ignore[override]
        self,
        h_BSD: Tensor,
        positions_BS3: Tensor,
        tokens_BS: Tensor | None = None,
        rows_BMD: Tensor | None = None,
        *,
        attend: Attend | None = None,
        numbers: Tensor | None = None,
    ) -> Tensor:
        h_BSD = super().forward(h_BSD, attend=attend, positions=positions_BS3)
        if tokens_BS is None or rows_BMD is None:
            return h_BSD
        return h_BSD + place_rows(torch.zeros_like(h_BSD), rows_BMD, tokens_BS == self.token, numbers)


def vision_language_units(shape: VisionLanguageShape) -> tuple[UnitSpec, ...]:
    """The units of encoder and decoder."""
    rope = RopeOfThree(shape.decoder, shape.sections)
    embed, *blocks, head = (
        rename_parameters(unit, "model.", "model.language_model.") for unit in decoder_units(shape.decoder)
    )
    return join_decoder(
        {shape.image_token: vision_units(shape.vision, "model.visual.")},
        shape.decoder,
        (embed, *(_block(shape, rope, layer, unit) for layer, unit in enumerate(blocks)), head),
    )


def _block(shape: VisionLanguageShape, rope: Rope, layer: int, unit: UnitSpec) -> UnitSpec:
    before = f"block.{layer - 1}" if layer else "embed"
    deep = (TOKENS, f"vision.deepstack.{layer}") if layer < len(shape.vision.deepstack) else ()
    build = partial(BlockOfThree, shape.decoder, rope, layer, shape.image_token)
    return replace(unit, build=build, inputs=(before, POSITIONS, *deep), takes=("attend", "numbers"))
