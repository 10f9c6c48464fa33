"""VisionShape and VisionLanguageShape: the numbers of a picture encoder, and of a decoder that reads its rows."""

from __future__ import annotations

from dataclasses import dataclass

from superstep.plan.model.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionShape:
    """A vision transformer on patches of pictures in their own size (Qwen3-VL, Bai 2025).

    Attributes:
        patch: pixels of a patch's side.
        frames: pictures one after another in a patch; a single picture is repeated.
        channels: numbers of a pixel.
        merge: patches of a side of the square that becomes one token.
        side: rows and columns of the learned table of positions, which is interpolated to each picture's size.
        deepstack: layers with outputs that are merged too, and added to the stream after the decoder's first layers.
        outputs: width of the decoder's stream.
        theta: base of the rotary embedding of rows and columns.
    """

    layers: int
    width: int
    heads: int
    ffn: int
    patch: int
    merge: int
    side: int
    outputs: int
    frames: int = 2
    channels: int = 3
    deepstack: tuple[int, ...] = ()
    theta: float = 10000.0
    init_std: float = 0.02

    @property
    def pixels(self) -> int:
        """Numbers of a patch."""
        return self.channels * self.frames * self.patch**2

    @property
    def square(self) -> int:
        """Numbers of the square of patches that becomes one token."""
        return self.merge**2 * self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionLanguageShape:
    """A decoder that reads pictures.

    Attributes:
        image_token: stands for ``merge²`` patches.
        sections: pairs of a decoder head's numbers that are rotated by time, row and column.
        other_tokens: of a video, and of the start and end of a picture, in this order: named in files alone.
    """

    vision: VisionShape
    decoder: ModelShape
    image_token: int
    sections: tuple[int, int, int]
    other_tokens: tuple[int, int, int] = (0, 0, 0)
