"""Position biases of exact mode: added to a chunk's scores, and their gradients on a fixed grid.

A query's sum over keys at one distance has one order, as its keys are counted from its document's start. Each chunk of
queries then adds to the grid what a microbatch of any size adds.

    B  sequences            N  query heads              C  queries of a chunk's part    R  rows of a key head, G · C
    b  products, B · K      K  key heads, G = N / K     P  their keys                   D  the farthest distance
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from superstep.engine.layers.grad_accumulation import GradientSink
from superstep.engine.layers.implementation import Forward
from superstep.kernels.invariant import product, row_sum
from superstep.kernels.position_bias import Bias, ByContent, Slopes
from superstep.model.position_bias import BucketBias, LearntBias
from superstep.numerics import invariant_matmul
from superstep.numerics.attention.invariant_attention import pad_rows


@dataclass(frozen=True, slots=True)
class ExactBias:
    """The bias of a layer's heads on this rank, and the target of its gradient.

    Attributes:
        bias: of these heads.
        sink: of the weight's gradient; None for a bias that is not trained.
        buckets: where several distances have one number: 1 where a distance is of a bucket, [buckets, D + 1].
        first: the first of these heads among those of the sink.
    """

    bias: Bias
    sink: GradientSink | None = None
    buckets: Tensor | None = None
    first: int = 0

    @property
    def tensor(self) -> Tensor:
        return self.bias.tensor

    def of_heads(self, first: int, heads: int) -> ExactBias:
        """Those of some heads."""
        return ExactBias(self.bias.of_heads(first, heads), self.sink, self.buckets, self.first + first)

    def compute(self, rows_bRH: Tensor, behind_CP: Tensor, kv_heads: int) -> Tensor:
        """What is added to scores, [b, R, P]; for later keys it is arbitrary.

        Args:
            rows_bRH: queries, fp32.
            behind_CP: how many tokens each key is before each query.
        """
        tensor, sequences = self.tensor, rows_bRH.shape[0] // kv_heads
        G, shape = tensor.shape[0] // kv_heads, behind_CP.shape
        if isinstance(self.bias, Slopes):
            alike = tensor[:, None, None] * -behind_CP
        elif not isinstance(self.bias, ByContent):
            alike = tensor[:, behind_CP.clamp(0, tensor.shape[-1] - 1)]
        else:
            q_XCH = rows_bRH.reshape(sequences * kv_heads * G, -1, rows_bRH.shape[-1])
            whole = tensor.expand(sequences, *tensor.shape).reshape(-1, *tensor.shape[1:])
            by_distance = product(pad_rows(q_XCH), whole)[:, : shape[0]].mul_(rows_bRH.shape[-1] ** -0.5)
            far = behind_CP.clamp(0, tensor.shape[-1] - 1).expand(len(q_XCH), *shape)
            return by_distance.gather(-1, far).view(rows_bRH.shape[0], -1, shape[1])
        return alike.view(1, kv_heads, -1, shape[1]).expand(sequences, -1, -1, -1).reshape(-1, G * shape[0], shape[1])

    def add_gradient(self, ds_bRP: Tensor, rows_bRH: Tensor, behind_CP: Tensor, kv_heads: int) -> Tensor | None:
        """Add the gradient to the sink, and return what it adds to that of the queries, [b, R, H]; None for nothing.

        Args:
            ds_bRP: the gradient of scores, fp32; that of hidden keys is 0.
        """
        if isinstance(self.bias, Slopes):
            return None
        tensor, C = self.tensor, behind_CP.shape[0]
        sequences, heads = rows_bRH.shape[0] // kv_heads, tensor.shape[0]
        by_distance = _sum_by_distance(ds_bRP.reshape(sequences * heads, C, -1), behind_CP, tensor.shape[-1])
        if not isinstance(self.bias, ByContent):
            self._add(by_distance if self.buckets is None else _by_bucket(by_distance, self.buckets))
            return None
        by_distance.mul_(rows_bRH.shape[-1] ** -0.5)
        q_XCH = pad_rows(rows_bRH.reshape(sequences * heads, C, -1))
        wide = pad_rows(by_distance)
        self._add(product(q_XCH.transpose(1, 2), wide))
        whole = tensor.expand(sequences, *tensor.shape).reshape(-1, *tensor.shape[1:])
        return product(wide, whole.transpose(1, 2))[:, :C].reshape(rows_bRH.shape)

    def _add(self, parts: Tensor) -> None:
        """Add to the sink: for each sequence and head, terms of its rows, [B · N, terms of a row, columns]."""
        if self.sink is not None:
            self.sink.sums.do(partial(_add_parts, self.sink, parts, self.tensor.shape[0], self.first, self.bias))


def _add_parts(sink: GradientSink, parts: Tensor, heads: int, first: int, bias: Bias) -> None:
    on_grid = sink.grid.put_(parts).unflatten(0, (-1, heads)).sum(0)
    if not isinstance(bias, ByContent):  # one row for each head, and a term for each query
        on_grid = on_grid.sum(1, keepdim=True)
    rows = on_grid.shape[1]
    sink.into[first * rows : (first + heads) * rows].add_(on_grid.flatten(0, 1))


def _by_bucket(by_distance_XCD: Tensor, buckets: Tensor) -> Tensor:
    parts = invariant_matmul.product(by_distance_XCD.flatten(0, 1), buckets.t())
    by_bucket: Tensor = parts.unflatten(0, by_distance_XCD.shape[:2])
    return by_bucket


def _sum_by_distance(ds_XCP: Tensor, behind_CP: Tensor, distances: int) -> Tensor:
    """The sum of each query's numbers over keys at one distance, [X, C, D + 1]; the last is of all that are farther."""
    place_C = behind_CP[:, 0]  # the first key is that many tokens before
    last = distances - 1
    key_CD = place_C[:, None] - torch.arange(last, device=behind_CP.device)
    near = ds_XCP.gather(-1, key_CD.clamp(0, ds_XCP.shape[-1] - 1).expand(len(ds_XCP), -1, -1))
    near.masked_fill_((key_CD < 0) | (key_CD >= ds_XCP.shape[-1]), 0.0)
    far = row_sum(ds_XCP.masked_fill(behind_CP < last, 0.0))
    both: Tensor = torch.cat((near, far), -1)
    return both


def exact_position_bias(layer: LearntBias, sink: GradientSink | None) -> Forward:
    """The layer's new forward; the gradient of its weight goes to the sink."""

    def forward(like: Tensor) -> ExactBias:
        weight = layer.weight.detach()
        buckets = layer.shares(weight.device) if isinstance(layer, BucketBias) else None
        return ExactBias(layer.bias_of(weight), sink, buckets)

    return forward  # type: ignore[return-value]
