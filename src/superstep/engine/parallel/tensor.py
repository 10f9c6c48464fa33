"""Tensor parallelism, applied to a plain module from outside (Shoeybi 2019), with sequence parallelism (Korthikanti
2022).

The table of logical axes says which matrices are cut. The communication follows from it:

    embedding cut over its rows    look up the own rows, zeros elsewhere, sum over tp
    linear cut over its output     its input enters; each rank has its own columns, and its part of the bias
    linear cut over its input      each rank has a part of the sum: sum over tp, then add the bias once
    convolution                    as a linear, over channels (``convolution``)
    norm cut over its numbers      the sum of squares is summed over tp, and so is what the backward needs of a row
    everything else                nothing

Without sequence parallelism the residual stream is whole on every rank: entering is the identity (and sums gradients in
the backward), leaving is an all-reduce. A tensor that several cut linears read, as queries, keys and values do, enters
once. With sequence parallelism the stream is split over the sequence: entering gathers it, leaving reduce-scatters it,
and everything between, cut or not, works on S / tp tokens. Then the input enters the smallest module with linears of
both kinds, such as attention, so that its own code sees whole sequences.

The first unit has whole sequences. Where it is only a lookup, leaving splits them; otherwise its output is split at the
end, so that additions to the lookup, such as learned positions, see every token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from superstep.comm.collectives import scatter_sequence
from superstep.comm.mesh import Group
from superstep.engine.flat.layout import is_cut
from superstep.engine.layers.implementation import Forward, Implementation
from superstep.engine.parallel.convolution import convolve_into_own, convolve_own
from superstep.engine.parallel.sequence_parallel import GatherWhole, KeepOwn, part
from superstep.engine.parallel.split_norm import norm_over_ranks
from superstep.kernels.position_bias import Slopes
from superstep.model.custom.is_plain import is_plain_convolution
from superstep.model.decoder import Embedding
from superstep.model.norm import RMSNorm
from superstep.model.position_bias import AlibiBias
from superstep.model.unit import UnitSpec
from superstep.numerics.loss import VocabularyColumns, own_columns
from superstep.plan.rules import Rules


class Gather(GatherWhole):
    """Forward gathers the sequence, backward reduce-scatters its gradient."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        return scatter_sequence(grad, ctx.group), None


class Scatter(KeepOwn):
    """Forward reduce-scatters along the sequence, backward gathers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:  # noqa: ANN401
        ctx.group = group
        return scatter_sequence(x, group)


class Enter(torch.autograd.Function):
    """Forward is the identity, backward sums over tp (the f of Shoeybi 2019, fig. 3)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:  # noqa: ANN401
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Leave(torch.autograd.Function):
    """Forward sums over tp, backward is the identity (the g of Shoeybi 2019, fig. 3)."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, group: Group) -> Tensor:
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


@dataclass(frozen=True, slots=True)
class Boundary:
    """How a tensor enters a cut region, and how it leaves: after a product, and after a lookup."""

    enter: Callable[[Tensor, Group], Tensor]
    leave: Callable[[Tensor, Group], Tensor]
    leave_lookup: Callable[[Tensor, Group], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundaries:
    """Boundaries between cut and whole regions.

    Attributes:
        whole: where the residual stream is whole.
        split: where it is split over the sequence.
        end: splits the output of a first unit that had whole sequences.
        norm: the forward of a norm over numbers of all ranks; by default its own, which gathers them.
    """

    whole: Boundary
    split: Boundary
    end: Callable[[Tensor, Group], Tensor]
    norm: Callable[[RMSNorm, Forward, Group], Forward] = lambda layer, inner, group: inner


def pass_on(x: Tensor, group: Group) -> Tensor:
    """The identity: nothing is left to sum."""
    return x


OVER_TP = Boundaries(
    whole=Boundary(Enter.apply, Leave.apply, Leave.apply),
    split=Boundary(Gather.apply, Scatter.apply, Scatter.apply),
    end=KeepOwn.apply,
    norm=norm_over_ranks,
)
EXACT_OVER_TP = Boundaries(
    whole=Boundary(pass_on, pass_on, Leave.apply),
    split=Boundary(GatherWhole.apply, KeepOwn.apply, Scatter.apply),
    end=KeepOwn.apply,
)
"""Of exact mode: products are whole when they leave. A lookup adds zeros to one number, which is exact."""


class _Entrance:
    """Lets a tensor enter once, for all cut layers of the unit that read it."""

    def __init__(self, enter: Callable[[Tensor, Group], Tensor], group: Group) -> None:
        self._enter = enter
        self._group = group
        self._last: tuple[Tensor, Tensor] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self._last is None or self._last[0] is not x:
            self._last = x, self._enter(x, self._group)
        return self._last[1]

    def close(self) -> None:
        """Drop the last entered tensor."""
        self._last = None


def splitting(
    module: nn.Module,
    spec: UnitSpec,
    group: Group,
    rules: Rules,
    seams: Boundaries = OVER_TP,
    *,
    sequence_parallel: bool,
    is_first: bool,
) -> tuple[Implementation, ...]:
    """Wrappers of the module's layers, by the unit's table of axes. The weights are cut already."""
    is_whole = is_first and not _is_lookup(spec, rules)
    is_split = sequence_parallel and not is_whole
    seam = seams.split if is_split else seams.whole
    entrance = _Entrance(seam.enter, group)
    cut = _cut_layers(spec, rules)
    # In latent attention whole layers lie within the cut region, so that its input enters there in any case.
    regions = _regions(module, spec, rules) if is_split or has_latent(spec) else {}
    entered = {path for path, dim in cut.items() if dim == 0 and path not in regions} | set(regions.values())
    end = seams.end if is_cut(spec, rules) else part

    return (
        _row(
            "looks up its own rows, output leaves tp",
            lambda path, layer: path in cut and isinstance(layer, nn.Embedding),
            lambda layer, inner: vocabulary_lookup(layer, inner, group, seam.leave_lookup),
        ),
        _row(
            "output leaves tp",
            lambda path, layer: cut.get(path) == 1 and isinstance(layer, nn.Linear),
            lambda layer, inner: _rows(layer, inner, group, seam.leave),
        ),
        *_convolutions(cut, group, seams, entrance),
        _row(
            "mean square over tp",
            lambda path, layer: cut.get(path) == 0 and isinstance(layer, RMSNorm),
            lambda layer, inner: seams.norm(layer, inner, group),
        ),
        *_ends(lambda path, layer: is_split and _is_whole_lookup(path, layer, cut), part, group),
        _row(
            "slopes of its own heads",
            lambda path, layer: isinstance(layer, AlibiBias) and rules.cut("heads") == "tp",
            lambda layer, inner: _own_slopes(layer, inner, group),
        ),
        _row(
            "input enters tp",
            lambda path, layer: path in entered and (path not in cut or isinstance(layer, nn.Linear)),
            lambda layer, inner: _entering(inner, entrance),
        ),
        _row(
            "lets go of what entered",
            lambda path, layer: not path and bool(entered),
            lambda layer, inner: _closing(inner, entrance),
        ),
        *_ends(lambda path, layer: not path and sequence_parallel and is_whole, end, group),
    )


def _convolutions(
    cut: Mapping[str, int], group: Group, seams: Boundaries, entrance: _Entrance
) -> tuple[Implementation, ...]:
    return (
        _row(
            "own channels",
            lambda path, layer: cut.get(path) == 0 and is_plain_convolution(layer),
            lambda layer, inner: convolve_into_own(layer, inner, group, entrance, seams.split.enter, seams.end),
        ),
        _row(
            "output leaves tp",
            lambda path, layer: cut.get(path) == 1 and is_plain_convolution(layer),
            lambda layer, inner: convolve_own(layer, inner, group, seams.whole.leave),
        ),
    )


def _ends(
    applies: Callable[[str, nn.Module], bool], end: Callable[[Tensor, Group], Tensor], group: Group
) -> tuple[Implementation, ...]:
    """The output of a layer that had whole sequences is split over the sequence."""
    return (_row("output split over the sequence", applies, lambda layer, inner: _then(inner, end, group)),)


def _is_whole_lookup(path: str, layer: nn.Module, cut: Mapping[str, int]) -> bool:
    """Whether a layer looks up whole sequences in a table that is not cut, in a unit with a split stream."""
    return isinstance(layer, Embedding) and f"{path}.embed_tokens".lstrip(".") not in cut


def _row(
    name: str, applies: Callable[[str, nn.Module], bool], build: Callable[[Any, Forward], Forward]
) -> Implementation:
    return Implementation(name, "plan.tp", applies, lambda path, layer, inner: build(layer, inner))


def has_latent(spec: UnitSpec) -> bool:
    """Whether a unit has latent attention."""
    return any("key_rank" in param.axes for param in spec.params.values())


def _cut_layers(spec: UnitSpec, rules: Rules) -> dict[str, int]:
    """For each layer with a cut weight, by its path in the unit's module, the cut dim."""
    dims = {}
    for local, param in spec.params.items():
        path, _, leaf = local.rpartition(".")
        cut = [dim for dim, axis in enumerate(param.axes) if rules.cut(axis) == "tp"]
        # An adapter's factors are within the layer that enters or leaves.
        if leaf == "weight" and cut and param.factor is None:
            dims[path] = cut[0]
    return dims


def _regions(module: nn.Module, spec: UnitSpec, rules: Rules) -> dict[str, str]:
    """For each linear cut over its output, the path of the smallest module around it that also has one cut over its
    input; without those where only the whole unit has.
    """
    cut = {p: dim for p, dim in _cut_layers(spec, rules).items() if isinstance(module.get_submodule(p), nn.Linear)}
    rows = [path for path, dim in cut.items() if dim == 1]
    regions = {}
    for path in (path for path, dim in cut.items() if dim == 0):
        around = path.rpartition(".")[0]
        while around and not any(row.startswith(f"{around}.") for row in rows):
            around = around.rpartition(".")[0]
        if around:
            regions[path] = around
    return regions


def _is_lookup(spec: UnitSpec, rules: Rules) -> bool:
    """Whether a unit is only a table, cut over its rows."""
    tables = [param.axes for param in spec.params.values()]
    return len(tables) == 1 and len(tables[0]) == 2 and rules.cut(tables[0][0]) == "tp"


def _then(inner: Callable[..., Tensor], outer: Callable[[Tensor, Group], Tensor], group: Group) -> Forward:
    def forward(*inputs: Tensor, **given: Any) -> Tensor:  # noqa: ANN401
        return outer(inner(*inputs, **given), group)

    return forward


def _own_slopes(layer: AlibiBias, inner: Callable[..., Any], group: Group) -> Callable[..., Any]:
    heads = layer.heads // group.size()

    def forward(like: Tensor) -> Slopes:
        slopes: Slopes = inner(like)
        return slopes.of_heads(group.rank() * heads, heads)

    return forward


def _closing(inner: Callable[..., Tensor], entrance: _Entrance) -> Forward:
    def forward(*inputs: Tensor, **given: Any) -> Tensor:  # noqa: ANN401
        try:
            return inner(*inputs, **given)
        finally:
            entrance.close()

    return forward


def _entering(inner: Callable[..., Tensor], entrance: _Entrance) -> Forward:
    def forward(x: Tensor, *others: Any, **given: Any) -> Tensor:  # noqa: ANN401
        return inner(entrance(x), *others, **given)

    return forward


def _rows(layer: nn.Linear, inner: Forward, group: Group, leave: Callable[[Tensor, Group], Tensor]) -> Forward:
    # Without its bias the layer gives the product alone; every rank adds the whole bias to the whole sum.
    bias = layer.bias
    layer.register_parameter("bias", None)
    layer.register_parameter("bias_of_sum", bias)

    def forward(x: Tensor) -> Tensor:
        out = leave(inner(x), group)
        return out if bias is None else out + bias

    return forward


def vocabulary_lookup(
    layer: nn.Embedding, inner: Forward, group: Group, leave: Callable[[Tensor, Group], Tensor]
) -> Forward:
    """A lookup in a table with rows cut over tp; each rank looks up its own rows, ``leave`` sums over ranks."""

    def forward(tokens_BS: Tensor) -> Tensor:
        rows = layer.weight.shape[0]
        local_BS = tokens_BS - group.rank() * rows
        is_elsewhere = (local_BS < 0) | (local_BS >= rows)
        h_BSD = inner(local_BS.masked_fill(is_elsewhere, 0)).masked_fill(is_elsewhere[..., None], 0.0)
        return leave(h_BSD, group)

    return forward


def own_part(columns: int, vocab: int, group: Group) -> VocabularyColumns:
    """This rank's columns of a padded vocabulary."""
    place = group.rank()
    return VocabularyColumns(place * columns, own_columns(columns, place, vocab), partial(_over_ranks, group))


def _over_ranks(group: Group, lse_C: Tensor, score_C: Tensor) -> tuple[Tensor, Tensor]:
    top_C = lse_C.clone()
    dist.all_reduce(top_C, op=dist.ReduceOp.MAX, group=group)
    sums = torch.stack(((lse_C - top_C).exp_(), score_C))
    dist.all_reduce(sums, group=group)
    return sums[0].log() + top_C, sums[1]
