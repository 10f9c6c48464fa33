"""Work: how many parameters each unit has, and the floating-point operations that it takes.

    T  tokens of a microbatch       N, K, H  query heads, key and value heads, the width of one head
    S  tokens of a sequence         F  inner width of the feed-forward, or of one expert
    D  width                        V  vocabulary
    E, k, s  experts: all, those of one token, those that every token visits

    unit     matrices                          vectors           operations of a forward pass
    embed    V·D                                                 0: it looks up
    block    D·(N + 2K)·H + N·H·D + 3·D·F      2·D (+ 2·H)       2·T · matrices + 4·T·S·N·H
             with biases: (N + 2K)·H           norms around: 4·D S at most the sliding window
             with norms of all heads: (N + K)·H
    head     D·V, unless tied                  D                 2·T·D·V

A mixture of experts has E + s feed-forwards in the place of one, and a router of D·E (noisy-topk: 2·D·E):

             3·D·F·E                                             6·T·D·F·k + 2·T·k·D to weigh and add
             D·E + 3·D·F·s                                       2·T · matrices

so k + s of them count for a token, as if none was dropped.

A multiply and its add are two operations, and products alone are counted. Attention counts the full square of the
sequence, as if it were not causal: 2·T·S·N·H for the scores, as many for their product with the values (the convention
of Chowdhery 2022, appendix B). Kernels that skip the masked half do half of that, and with ``data.document_mask`` they
also skip scores between documents, which still count. Tensor parallelism cuts every matrix and every head, so a rank
does 1 / tp of the work; for matrices that the plan's rules leave whole it does all, or its tokens of a split sequence.
In a mixture tp cuts the tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from superstep.plan.block_weights import BlockFormat, block_sizes
from superstep.plan.mesh import Family
from superstep.plan.model.outline import Factor, Parameter
from superstep.plan.model.shape import ModelShape
from superstep.plan.resolution.resolve import Resolved
from superstep.plan.rules import Rules
from superstep.plan.sharding.unit_flops import (
    cut_matrices,
    cut_vectors,
    expert_biases,
    feed_forward,
    forward_flops_per_token,
    whole_matrices,
    whole_vectors,
)

MFU_CONVENTION = "3 forward passes; head and full-square attention count, embedding and recomputation do not"
"""The convention of ``model_flops_per_token``, for displays."""
FROZEN_CONVENTION = (
    "forward passes, and the products of the backward passes that are computed; head and full-square attention count, "
    "embedding and recomputation do not"
)
"""The same with frozen parameters."""


@dataclass(frozen=True, slots=True)
class UnitParameters:
    """The parameters that a unit owns; a tied head's matrix is the embedding's.

    Attributes:
        matrices: cut over tp, with their biases.
        vectors: weights of norms, whole on each tp rank.
        whole: matrices that are whole there too: routers and shared experts, and those that the plan's rules leave
            whole.
        experts: matrices of experts, cut over ep.
        factors: of adapters, cut over tp.
        whole_factors: those that are whole on each tp rank.
        partial_factors: those of them with a cut linear.
        statistics: running statistics, whole on each tp rank.
        sparse: tables with sparse gradients, whole on each tp rank.
        row_width: elements that divide each of their rows.
        frozen: not trained, cut over tp; they count nowhere else.
        whole_frozen: those that are whole on each tp rank.
        packed: bytes of frozen matrices in blocks of few bits, cut over tp; they count nowhere else.
        whole_packed: those that are whole on each tp rank: their scales, and matrices that are not cut.
        narrow: elements on a rank with moments in fewer bits than fp32, for each family that has any.
    """

    matrices: int
    vectors: int = 0
    whole: int = 0
    experts: int = 0
    factors: int = 0
    whole_factors: int = 0
    partial_factors: int = 0
    statistics: int = 0
    frozen: int = 0
    whole_frozen: int = 0
    packed: int = 0
    whole_packed: int = 0
    sparse: int = 0
    row_width: int = 0
    narrow: tuple[tuple[Family, int], ...] = ()

    def dense_on_rank(self, tp: int) -> int:
        """Trained elements on one tensor-parallel rank, without experts and adapters."""
        return self.matrices // tp + self.whole + self.vectors

    def adapters_on_rank(self, tp: int) -> int:
        """Elements of adapters on one tensor-parallel rank."""
        return self.factors // tp + self.whole_factors

    def frozen_on_rank(self, tp: int) -> int:
        """Elements that are not trained on one tensor-parallel rank."""
        return self.frozen // tp + self.whole_frozen

    def count_packed_on_rank(self, tp: int) -> int:
        """Bytes of matrices in blocks on one tensor-parallel rank."""
        return self.packed // tp + self.whole_packed

    def on_rank(self, tp: int, ep: int = 1) -> int:
        trained = (
            self.dense_on_rank(tp) + self.experts // ep + self.adapters_on_rank(tp) + self.statistics + self.sparse
        )
        return trained + self.frozen_on_rank(tp)


@dataclass(frozen=True, slots=True)
class UnitWork:
    """Floating-point operations of one unit on one microbatch, on one tensor-parallel rank."""

    forward_flops: int

    @property
    def backward_flops(self) -> int:
        """Each product has two in the backward pass: for its input's gradient and for its weight's."""
        return 2 * self.forward_flops


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalDims:
    """The dims above for one microbatch on one cp and tp rank; ``t``: tokens of the residual stream there.

    With sequence parallelism t = T / tp, else t = T. The feed-forward works on ``Tf`` of them and the head on ``Tv``: T
    where they are cut over tp, t where they are whole. ``m``: a rank's tokens for a mixture of experts.
    """

    T: int
    t: int
    m: int
    Tf: int
    Tv: int
    S: int
    D: int
    N: int
    K: int
    H: int
    F: int
    V: int


_Kind: TypeAlias = tuple[tuple[str | None, ...], tuple[int, ...], Factor | None, bool, bool, BlockFormat | None]
"""A parameter's axes, dims and factor, whether it is a statistic, whether it is frozen, and its format in blocks."""


def local_dims(run: Resolved) -> LocalDims:
    """The dims of a run's microbatch on a tensor-parallel rank."""
    shape, plan = run.shape, run.plan
    tp, sequence_tokens = plan.mesh.tp, run.config.data.sequence_tokens
    tokens = plan.microbatch * sequence_tokens // plan.mesh.cp
    part = tokens // tp if plan.sequence_parallel else tokens

    def ways(axis: str) -> int:
        return tp if plan.rules.cut(axis) == "tp" else 1

    return LocalDims(
        T=tokens,
        t=part,
        m=tokens // tp,
        Tf=tokens if plan.rules.cut("ffn") == "tp" else part,
        Tv=tokens if plan.rules.cut("vocab") == "tp" else part,
        S=sequence_tokens,
        D=shape.width,
        N=shape.heads // ways("heads"),
        K=shape.kv_heads // ways("kv_heads"),
        H=shape.head_dim,
        F=shape.ffn if shape.moe else shape.ffn // ways("ffn"),
        V=dict(plan.padding).get("vocab", shape.vocab) // ways("vocab"),
    )


def rank_parameters(run: Resolved) -> tuple[UnitParameters, ...]:
    """The parameters that each unit owns, in model order, as the run's rules cut and pad them."""
    known: dict[tuple[_Kind, ...], UnitParameters] = {}
    kinds = [
        tuple(
            (p.axes, run.plan.pad_dims(p), p.factor, p.is_statistic, p.is_frozen, p.block_format)
            for p in owned
            if not _is_sparse(p)
        )
        for owned in run.outline.owned
    ]
    for kind in kinds:  # blocks are alike
        if kind not in known:
            known[kind] = _parameters(run.plan.rules, kind)
    every = tuple(known[kind] for kind in kinds)
    if run.plan.narrow:
        every = tuple(_with_narrow(run, unit, owned) for unit, owned in zip(every, run.outline.owned, strict=True))
    return tuple(map(_with_tables, every, run.outline.owned)) if run.outline.sparse else every


def _is_sparse(parameter: Parameter) -> bool:
    return parameter.is_sparse and not parameter.is_frozen


def _with_narrow(run: Resolved, unit: UnitParameters, owned: Sequence[Parameter]) -> UnitParameters:
    """The unit with its parameters whose moments have fewer bits."""
    mesh, narrow = run.plan.mesh, dict[Family, int]()
    degrees = {"tp": mesh.tp, "ep": mesh.ep}
    for p in owned:
        if p.name in run.plan.narrow:
            cuts = set(map(run.plan.rules.cut, p.axes))
            family: Family = "adapters" if p.factor is not None else "experts" if "ep" in cuts else "dense"
            numel = math.prod(run.plan.pad_dims(p)) // math.prod(degrees[cut] for cut in cuts if cut in degrees)
            narrow[family] = narrow.get(family, 0) + numel
    return replace(unit, narrow=tuple(narrow.items()))


def _with_tables(unit: UnitParameters, owned: Sequence[Parameter]) -> UnitParameters:
    """The unit with its tables with sparse gradients."""
    tables = [p.dims for p in owned if _is_sparse(p)]
    width = math.gcd(*(math.prod(dims[1:]) for dims in tables))
    return replace(unit, sparse=sum(map(math.prod, tables)), row_width=width)


def _parameters(rules: Rules, owned: Sequence[_Kind]) -> UnitParameters:
    frozen = [(axes, math.prod(dims)) for axes, dims, *_, is_frozen, packed in owned if is_frozen and not packed]
    packed = [(axes, dims[0], block_sizes(of, *dims)) for axes, dims, *_, of in owned if of]
    trained = [each[:4] for each in owned if not each[4]]
    own = [(axes, dims) for axes, dims, factor, is_statistic in trained if factor is None and not is_statistic]
    factors = [(axes, math.prod(dims)) for axes, dims, factor, _ in trained if factor is not None]
    whole = [not rules.cuts_any(axes) for axes, _ in factors]
    # Two for each linear, one after the other: where one is cut, the other meets a part of it.
    beside = [whole[at ^ 1] for at in range(len(whole))]
    return UnitParameters(
        matrices=sum(math.prod(dims) for axes, dims in own if "tp" in map(rules.cut, axes)),
        experts=sum(math.prod(dims) for axes, dims in own if "ep" in map(rules.cut, axes)),
        vectors=sum(math.prod(dims) for axes, dims in own if len(dims) < 2 and not rules.cuts_any(axes)),
        whole=sum(math.prod(dims) for axes, dims in own if len(dims) > 1 and not rules.cuts_any(axes)),
        factors=sum(size for (_, size), is_whole in zip(factors, whole, strict=True) if not is_whole),
        whole_factors=sum(size for (_, size), is_whole in zip(factors, whole, strict=True) if is_whole),
        partial_factors=sum(
            size
            for (_, size), is_whole, is_beside_whole in zip(factors, whole, beside, strict=True)
            if is_whole and not is_beside_whole
        ),
        statistics=sum(math.prod(dims) for _, dims, _, is_statistic in trained if is_statistic),
        frozen=sum(size for axes, size in frozen if rules.cuts_any(axes)),
        whole_frozen=sum(size for axes, size in frozen if not rules.cuts_any(axes)),
        packed=sum(rows * sizes.row for axes, rows, sizes in packed if rules.cuts_any(axes)),
        whole_packed=sum(sizes.scales for *_, sizes in packed)
        + sum(rows * sizes.row for axes, rows, sizes in packed if not rules.cuts_any(axes)),
    )


def unit_parameters(shape: ModelShape) -> tuple[UnitParameters, ...]:
    D = shape.width
    table = shape.vocab * D

    def block(shape: ModelShape) -> UnitParameters:
        return UnitParameters(
            cut_matrices(shape) + cut_vectors(shape),
            whole_vectors(shape),
            whole_matrices(shape),
            shape.moe.experts * (feed_forward(shape) + expert_biases(shape)) if shape.moe else 0,
            statistics=shape.moe.experts if shape.moe and shape.moe.router == "sigmoid" else 0,
        )

    known = {each: block(each) for each in {shape.at(layer) for layer in range(shape.layers)}}
    head = UnitParameters(0 if shape.tied else table, D)
    return UnitParameters(table), *(known[shape.at(layer)] for layer in range(shape.layers)), head


def parameters(shape: ModelShape) -> int:
    """Parameters of the whole model; a tied matrix counts once."""
    return sum(unit.on_rank(1) for unit in unit_parameters(shape))


def unit_work(shape: ModelShape, *, tokens: int, sequence_tokens: int, tp: int = 1) -> tuple[UnitWork, ...]:
    """The work of each unit for a microbatch of ``tokens`` in sequences of ``sequence_tokens``, in model order."""
    return tuple(UnitWork(flops * tokens // tp) for flops in forward_flops_per_token(shape, sequence_tokens))


def model_flops_per_token(shape: ModelShape, sequence_tokens: int) -> int:
    """Operations for training on one token: forward and backward, by ``MFU_CONVENTION``."""
    units = unit_work(shape, tokens=1, sequence_tokens=sequence_tokens)
    return sum(unit.forward_flops + unit.backward_flops for unit in units)
