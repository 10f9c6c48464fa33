"""The rotary position embedding.

B  sequences    N  heads
S  positions    H  width of one head
"""

from __future__ import annotations

import math
from collections.abc import MutableMapping

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from superstep.plan.model.rope import LinearRope, Llama3Rope, YarnRope
from superstep.plan.model.shape import ModelShape


def layer_ropes(shape: ModelShape) -> tuple[Rope, ...]:
    """The rotary embedding of each layer: one for all, or one for those with a window and one for the others."""
    whole = Rope(shape)
    local = whole if shape.style.local_theta is None else Rope(shape, is_local=True)
    windows = [shape.rule(layer).window for layer in range(shape.layers)]
    return tuple(whole if window is None else local for window in windows)


class Rope:
    """The rotary position embedding (Su 2021), with the stretches of ``plan.model.rope``; with ``is_local``, that of
    layers with a window.

    One object serves all blocks, so that the tables of a sequence length are made once, and those of given positions
    once as long as these exist: recompute uses the same tables. It is no module and has no parameter: tables are made
    on the device of the rotated tensor, at its first use.
    """

    def __init__(self, shape: ModelShape, *, is_local: bool = False) -> None:
        local = shape.style.local_theta if is_local else None
        self.head_dim = shape.rotated
        self.theta = shape.rope_theta if local is None else local
        self.scaling = shape.rope_scaling if local is None else None
        self.scale = self.scaling.attention_factor if isinstance(self.scaling, YarnRope) else 1.0
        self._tables: dict[tuple[int, torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}
        self._given: MutableMapping[Tensor, dict[torch.dtype, tuple[Tensor, Tensor]]] = WeakTensorKeyDictionary()

    def __call__(self, x_BSNH: Tensor, positions: Tensor | None = None) -> Tensor:
        """Rotate each pair (i, i + H/2) of a head by position · frequency i, as Hugging Face does.

        Args:
            x_BSNH: queries or keys.
            positions: [S] or [B, S]; None means 0, 1, ... S - 1. Must not be changed afterwards.
        """
        cos, sin = self.tables_of(x_BSNH, positions)
        # sin carries the sign of its half, so that rotation is one product, one roll and one multiply-add.
        return torch.addcmul(x_BSNH * cos, x_BSNH.roll(self.head_dim // 2, -1), sin)

    def tables_of(self, x_BSNH: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        """The cached ``tables`` of a tensor to rotate."""
        return self._whole(x_BSNH) if positions is None else self._at(positions, x_BSNH.dtype)

    def tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and signed sine, [..., S, 1, H], computed in fp32 and rounded once to ``dtype``."""
        angle = self._angles(positions)
        cos, sin = angle.cos() * self.scale, angle.sin() * self.scale
        cos, signed = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        return cos.to(dtype).unsqueeze(-2), signed.to(dtype).unsqueeze(-2)

    def _whole(self, x_BSNH: Tensor) -> tuple[Tensor, Tensor]:
        tokens, device, dtype = x_BSNH.shape[1], x_BSNH.device, x_BSNH.dtype
        if torch.compiler.is_compiling():  # the compiler fuses the tables into their use
            return self.tables(torch.arange(tokens, device=device), dtype)
        key = (tokens, device, dtype)
        if key not in self._tables:
            # A table made under inference_mode could not be saved for a later backward.
            with torch.inference_mode(mode=False):
                self._tables[key] = self.tables(torch.arange(tokens, device=device), dtype)
        return self._tables[key]

    def _at(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if torch.compiler.is_compiling():
            return self.tables(positions, dtype)
        made = self._given.setdefault(positions, {})
        if dtype not in made:
            with torch.inference_mode(mode=False):
                made[dtype] = self.tables(positions, dtype)
        return made[dtype]

    def _angles(self, positions: Tensor) -> Tensor:
        """The angle of each pair, [..., S, H/2], fp32."""
        return positions[..., None].float() * self._frequencies(positions.device)

    def _frequencies(self, device: torch.device) -> Tensor:
        """Radians a position, [H/2], fp32."""
        pair = torch.arange(0, self.head_dim, 2, device=device).float()
        frequency = 1.0 / self.theta ** (pair / self.head_dim)
        match self.scaling:
            case None:
                return frequency
            case LinearRope(factor=factor):
                return frequency / factor
            case Llama3Rope(factor=factor, low_freq_factor=low, high_freq_factor=high, original_tokens=tokens):
                # Turns within the original context: pairs with many turns are kept, those with few are slowed by the
                # factor, between them is a ramp.
                turns = tokens * frequency / (2 * math.pi)
                keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
            case YarnRope(factor=factor):
                keep = self._compute_yarn_ramp(self.scaling, pair / 2)
        return keep * frequency + (1.0 - keep) * frequency / factor

    def _compute_yarn_ramp(self, yarn: YarnRope, pair: Tensor) -> Tensor:
        """The ramp of Peng 2023 (eq. 18), over the number of the pair as in its code, from 1 to 0."""

        def turning(turns: float) -> float:
            """The pair with this number of turns within the original context."""
            wavelength = yarn.original_tokens / turns
            return self.head_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(self.theta))

        first, last = turning(yarn.beta_fast), turning(yarn.beta_slow)
        if yarn.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, self.head_dim - 1)
        return 1.0 - ((pair - first) / ((last - first) or 0.001)).clamp(0.0, 1.0)
