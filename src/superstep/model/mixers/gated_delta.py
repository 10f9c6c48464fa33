"""Linear attention by the gated delta rule (Yang 2024), as in Qwen3-Next and Qwen3.5.

Queries, keys and values go through a short convolution; each head then has a state that fades, is corrected and read
(``numerics.delta_rule``). Its output is normalised, and multiplied by the SiLU of a projection. How a token sees those
before it is an argument, ``scan``, as attention is of other layers.

    B  sequences    K  key heads, of H numbers      D  width of the residual stream
    S  positions    N  value heads, of V numbers
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from superstep.model.mixers.short_convolution import AddTaps, Neighbours, NoNeighbours, ShortConvolution, convolve
from superstep.numerics.delta_rule.operator import delta_rule
from superstep.plan.model.shape import ModelShape


class Scan(Protocol):
    """How a token sees those before it, within its document."""

    def convolve(self, x_BSC: Tensor, weight_C1W: Tensor, add: AddTaps | None = None, /) -> Tensor:
        """``short_convolution.Convolve``."""

    def attend(self, q_BSKH: Tensor, k_BSKH: Tensor, v_BSNV: Tensor, g_BSN: Tensor, beta_BSN: Tensor) -> Tensor:
        """The gated delta rule: [B, S, N, V]."""


@dataclass(frozen=True, slots=True)
class WholeScan:
    """Of whole sequences, as ``Scan``.

    Attributes:
        starts: int64 [B, S] on the host, the start of each token's document; None for one document in each row.
        positions: of the tokens within their documents, [B, 1, S + W - 1], with zeros at the end; None likewise.
        is_exact: whether bits must not depend on the layout.
        neighbours: there are none.
    """

    starts: Tensor | None = None
    positions: Tensor | None = None
    is_exact: bool = False
    neighbours: Neighbours = field(default_factory=NoNeighbours)

    def convolve(self, x_BSC: Tensor, weight_C1W: Tensor, add: AddTaps | None = None) -> Tensor:
        return convolve(x_BSC, weight_C1W, self.neighbours, self.positions, add)

    def attend(self, q_BSKH: Tensor, k_BSKH: Tensor, v_BSNV: Tensor, g_BSN: Tensor, beta_BSN: Tensor) -> Tensor:
        out: Tensor = delta_rule(q_BSKH, k_BSKH, v_BSNV, g_BSN, beta_BSN, self.starts, self.is_exact)
        return out


class GatedDelta(nn.Module):
    """The layer; the number of heads is read from the projections' outputs.

    Args:
        shape: of the block.
        norm: of a head's outputs.
    """

    def __init__(self, shape: ModelShape, norm: nn.Module) -> None:
        super().__init__()
        assert shape.delta is not None
        self.delta = delta = shape.delta
        *_, values = delta.sections
        width, mixed = shape.width, sum(delta.sections)
        if delta.is_grouped:
            self.in_proj_qkvz = nn.Linear(width, mixed + values, bias=False)
            self.in_proj_ba = nn.Linear(width, 2 * delta.value_heads, bias=False)
        else:
            self.in_proj_qkv = nn.Linear(width, mixed, bias=False)
            self.in_proj_z = nn.Linear(width, values, bias=False)
            self.in_proj_b = nn.Linear(width, delta.value_heads, bias=False)
            self.in_proj_a = nn.Linear(width, delta.value_heads, bias=False)
        self.conv1d = ShortConvolution(mixed, delta.taps)
        self.dt_bias = nn.Parameter(torch.ones(delta.value_heads))
        self.A_log = nn.Parameter(torch.zeros(delta.value_heads))
        self.norm = norm
        self.out_proj = nn.Linear(values, width, bias=False)
        self.act_fn, self.gate_fn = nn.SiLU(), nn.Sigmoid()

    def forward(self, x_BSD: Tensor, *, scan: Scan | None = None) -> Tensor:
        scan = scan or WholeScan()
        mixed, z, b, a = self._project_grouped(x_BSD) if self.delta.is_grouped else self._project(x_BSD)
        mixed = self.act_fn(self.conv1d(mixed, scan.convolve))
        q, k, v_BSNV = self._split(mixed)
        out_BSNV = scan.attend(q, k, v_BSNV, self.decay(a), self.gate_fn(b))
        out_BSNV = self.norm(out_BSNV) * self.act_fn(z)
        out_BSD: Tensor = self.out_proj(out_BSNV.flatten(2))
        return out_BSD

    def decay(self, a_BSN: Tensor) -> Tensor:
        """The logarithm of the share of the state that stays, fp32 or wider: below 0."""
        wide = torch.promote_types(a_BSN.dtype, torch.float32)
        return -self.A_log.to(wide).exp() * F.softplus(a_BSN.to(wide) + self.dt_bias.to(wide))

    def _project(self, x_BSD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        z = self.in_proj_z(x_BSD).unflatten(-1, (-1, self.delta.value_dim))
        return self.in_proj_qkv(x_BSD), z, self.in_proj_b(x_BSD), self.in_proj_a(x_BSD)

    def _project_grouped(self, x_BSD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The same from projections whose outputs lie by key head."""
        delta, each = self.delta, self.delta.value_heads // self.delta.key_heads
        sizes = delta.key_dim, delta.key_dim, each * delta.value_dim, each * delta.value_dim
        q, k, v, z = self.in_proj_qkvz(x_BSD).unflatten(-1, (-1, sum(sizes))).split(sizes, -1)
        b, a = self.in_proj_ba(x_BSD).unflatten(-1, (-1, 2 * each)).split(each, -1)
        mixed = torch.cat([x.flatten(2) for x in (q, k, v)], -1)
        return mixed, z.unflatten(-1, (each, delta.value_dim)).flatten(2, 3), b.flatten(2), a.flatten(2)

    def _split(self, mixed_BSC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values by head."""
        delta = self.delta
        keys, _, values = (part * mixed_BSC.shape[-1] // sum(delta.sections) for part in delta.sections)
        q, k, v = mixed_BSC.split((keys, keys, values), -1)
        heads = (-1, delta.key_dim)
        return q.unflatten(-1, heads), k.unflatten(-1, heads), v.unflatten(-1, (-1, delta.value_dim))
