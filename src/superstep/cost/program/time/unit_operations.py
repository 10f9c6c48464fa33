"""Operations of our own decoder's units, without torch; ``engine.tracing.trace_units`` traces them from modules.

Products and attention are listed one by one and are exact. Everything else is one pass over memory, in eager mode,
where e is the bytes of a number in the compute dtype and a pass a read or a write of a whole tensor; the backward pass
takes twice these:

    norm 4, residual sum 3, rotation 7, silu and gate 5, lookup 2, with qk_norm 4 more on queries and keys, with biases
    2 on queries, keys and values; a scale 2
    rows of experts: sorted 2, unsorted 2, weighed and added 3
    cross entropy 5, over fp32 logits
    and once each, in fp32: gradient of a matrix, added into its buffer 2

Collectives in a unit: a region that is cut over tp is entered and left (Shoeybi 2019, Korthikanti 2022); rows travel to
their experts and back (Lepikhin 2020); keys and values go round a ring or heads are exchanged (Liu 2023, Jacobs 2023).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

from superstep.cost.program.buffers import ELEMENT_BYTES, FP32, INDEX, TOKEN, has_fused_loss, zero_stage
from superstep.cost.program.flops import LocalDims, local_dims, rank_parameters
from superstep.cost.program.gradient_flow import (
    ATTENTION,
    BETWEEN,
    DOWN,
    OUTPUT,
    GradientFlow,
    flow_of,
    trains_table,
)
from superstep.cost.program.lora import LoraLinear, count_kept_outputs, list_adapted_linears
from superstep.cost.program.memory.linear_attention import DeltaDims
from superstep.cost.program.memory.temporaries import CHUNK_TOKENS
from superstep.cost.program.time.delta_operations import rule_operations
from superstep.cost.program.time.operation import (
    AttentionOperation,
    CollectiveOperation,
    MatmulOperation,
    MemoryOperation,
    Operation,
    Operations,
    UnitOperations,
)
from superstep.plan.model.attention_rule import DELTA_CHUNK, AttentionRule, DeltaShape
from superstep.plan.model.shape import MoeShape
from superstep.plan.resolution.resolve import Resolved


def decoder_operations(run: Resolved) -> tuple[UnitOperations, ...]:
    """Every unit's operations on one microbatch, on one rank, in model order."""
    kinds = [(run.shape.mixer(layer), flow_of(run, layer + 1)) for layer in range(run.shape.layers)]
    blocks = {kind: _block(run, *kind, 1 + kinds.index(kind)) for kind in dict.fromkeys(kinds)}
    if run.shape.mtp_weight is None:
        return _embedding(run), *(blocks[kind] for kind in kinds), _head(run)
    return _embedding(run), *(blocks[kind] for kind in kinds), _mtp(run, blocks[kinds[-1]]), _twice(_head(run))


def _mtp(run: Resolved, block: UnitOperations) -> UnitOperations:
    """Multi-token prediction: a block, the embedding of the next tokens, and the product of both streams."""
    d, embedding = local_dims(run), _embedding(run)
    product = MatmulOperation(rows=d.t, inner=2 * d.D, width=d.D)
    return replace(
        block,
        forward=(*embedding.forward, product, *block.forward),
        backward=(*block.backward, _input_gradient(product), *embedding.backward),
        weight=(*block.weight, _weight_gradient(product), *embedding.weight),
    )


def _twice(head: UnitOperations) -> UnitOperations:
    """The head of two predicted tokens."""
    return replace(
        head, forward=(*head.forward, *head.forward), backward=(*head.backward, *head.backward), weight=head.weight * 2
    )


def _embedding(run: Resolved) -> UnitOperations:
    d, e = local_dims(run), ELEMENT_BYTES[run.config.numerics.compute]
    stream = 2 * d.T * d.D * e
    backward = MemoryOperation(kernel="gather", bytes=2 * stream)
    forward: Operations = (MemoryOperation(kernel="gather", bytes=stream),)
    if not trains_table(run, 0):
        cut = run.plan.rules.cut("vocab") is not None and run.plan.mesh.tp > 1
        leave = _seam(run, d.T * d.D * e)[1] if cut else ()
        return UnitOperations(forward=(*forward, *leave), backward=(), weight=(), input_bytes=TOKEN * d.T)
    if run.plan.rules.cut("vocab") is None or run.plan.mesh.tp == 1:
        return UnitOperations(forward=forward, backward=(backward,), weight=(backward,), input_bytes=TOKEN * d.T)
    enter, leave = _seam(run, d.T * d.D * e)
    into = enter if run.plan.sequence_parallel else ()
    return UnitOperations(
        forward=(*forward, *leave),
        backward=(*into, backward),
        weight=(backward,),
        input_bytes=TOKEN * d.T,
    )


def _seam(run: Resolved, size: int) -> tuple[Operations, Operations]:
    """The operations at the end of a region that is cut over tp: forward and backward."""
    if run.plan.mesh.tp == 1:
        return (), ()
    if not run.plan.sequence_parallel:
        both = (CollectiveOperation(collective="all-reduce", axis="tp", bytes=size),)
        return both, both
    return (
        (CollectiveOperation(collective="all-gather", axis="tp", bytes=size),),
        (CollectiveOperation(collective="reduce-scatter", axis="tp", bytes=size),),
    )


def _block(run: Resolved, mixer: AttentionRule | DeltaShape, flow: GradientFlow, unit: int) -> UnitOperations:
    d, e = local_dims(run), ELEMENT_BYTES[run.config.numerics.compute]
    named, adapted = (*_projections(run, d, mixer), *_linears(run, d)), list_adapted_linears(run)
    linears = tuple(linear for _, linear in named)
    factors = tuple(factor for one in adapted for factor in _factors(one))
    mixed, mixed_back = (tuple(_mixing(run, d, mixer, is_backward=each)) for each in (False, True))
    style = run.shape.style
    moved = (4 * style.norm_count + 2 * 3) * d.t * d.D + _inner(run, d) + _moved_by(run, d, mixer)
    moved += 2 * 2 * d.t * d.D if style.residual_scale != 1.0 else 0
    sent, returned = tuple(_messages(run, d, e)), tuple(_messages(run, d, e, flow))
    owned = rank_parameters(run)[unit]
    matrices = owned.matrices // run.plan.mesh.tp + owned.whole + owned.experts // run.plan.mesh.ep
    if adapted:
        matrices, moved = owned.adapters_on_rank(run.plan.mesh.tp), moved + 2 * count_kept_outputs(run)
    added = MemoryOperation(kernel="copy", bytes=2 * FP32 * matrices)
    plain = MemoryOperation(kernel="copy", bytes=e * moved)
    weights = factors or tuple(_pick(named, flow.has_weight_gradient))
    inputs = (*_pick(named, flow.has_input_gradient), *_pick_inner(adapted, flow))
    weight: Operations = (*map(_weight_gradient, weights), added)
    forward = (*linears, *factors, *mixed, plain, *sent)
    # Selective recomputation does everything again but the products and attention, and in exact mode these too.
    again: Operations = forward if run.plan.grain is not None else (plain, *sent)
    return UnitOperations(
        forward=forward,
        backward=(
            *((plain, *sent) if run.plan.recompute == "selective" else ()),
            *map(_input_gradient, inputs),
            *(mixed_back if flow.reaches(ATTENTION) else ()),
            *weight,
            MemoryOperation(kernel="copy", bytes=2 * e * moved),
            *returned,
        ),
        weight=weight,
        again=again,
        input_bytes=d.t * d.D * e,
    )


Named: TypeAlias = tuple[tuple[str, ...], MatmulOperation]
"""Products of one size, and the linears that they are of; of a mixture none is named."""


def _pick(named: Sequence[Named], has_gradient: Callable[[str], bool]) -> Iterator[MatmulOperation]:
    """The products of the linears with a gradient; those of a mixture all have one."""
    for linears, product in named:
        count = sum(map(has_gradient, linears)) if linears else product.count
        if count:
            yield replace(product, count=count)


def _pick_inner(adapted: Sequence[LoraLinear], flow: GradientFlow) -> Iterator[MatmulOperation]:
    """The products of factors with an input gradient: all second ones."""
    for one in adapted:
        first, second = _factors(one)
        yield from (first, second) if flow.has_input_gradient(one.linear) else (second,)


def _projections(run: Resolved, d: LocalDims, mixer: AttentionRule | DeltaShape) -> Iterator[Named]:
    """The products into and out of a mixer."""
    if isinstance(mixer, AttentionRule):
        gate = 2 if run.shape.style.output_gate else 1
        yield ("q_proj",), MatmulOperation(rows=d.T, inner=d.D, width=gate * d.N * d.H)
        yield ("k_proj", "v_proj"), MatmulOperation(rows=d.T, inner=d.D, width=d.K * d.H, count=2)
        yield ("o_proj",), MatmulOperation(rows=d.T, inner=d.N * d.H, width=d.D)
        return
    x = DeltaDims.of(mixer, run)
    values, gates = x.N * x.V, 2 * x.N
    if mixer.is_grouped:
        yield ("in_proj_qkvz",), MatmulOperation(rows=d.T, inner=d.D, width=x.mixed + values)
        yield ("in_proj_ba",), MatmulOperation(rows=d.T, inner=d.D, width=gates)
    else:
        yield ("in_proj_qkv",), MatmulOperation(rows=d.T, inner=d.D, width=x.mixed)
        yield ("in_proj_z",), MatmulOperation(rows=d.T, inner=d.D, width=values)
        yield ("in_proj_b", "in_proj_a"), MatmulOperation(rows=d.T, inner=d.D, width=x.N, count=2)
    yield ("out_proj",), MatmulOperation(rows=d.T, inner=values, width=d.D)


def _mixing(
    run: Resolved, d: LocalDims, mixer: AttentionRule | DeltaShape, *, is_backward: bool
) -> Iterator[Operation]:
    """A mixer's own operations in one direction."""
    if isinstance(mixer, AttentionRule):
        attention = _attention(run, d, mixer)
        yield _back(attention) if is_backward else attention
        return
    x = DeltaDims.of(mixer, run)
    yield from rule_operations(-(-d.T // DELTA_CHUNK), x.K, x.N, x.H, x.V, is_backward=is_backward)


def _moved_by(run: Resolved, d: LocalDims, mixer: AttentionRule | DeltaShape) -> int:
    """Elements that a mixer moves beside its products: norms, rotation, biases, gates, the convolution."""
    if isinstance(mixer, DeltaShape):
        x = DeltaDims.of(mixer, run)
        return d.T * ((3 * mixer.taps + 2) * x.mixed + 9 * x.N * x.V)
    style = run.shape.style
    moved = (7 + (4 if run.shape.qk_norm else 0)) * d.T * (d.N + d.K) * d.H
    moved += 2 * d.T * (d.N + 2 * d.K) * d.H if run.shape.qkv_bias else 0
    moved += 5 * d.T * d.N * d.H if style.output_gate else 0
    return moved + (2 * d.T * d.N * d.H if style.query_scale is not None else 0)


def _linears(run: Resolved, d: LocalDims) -> Iterator[Named]:
    shape = run.shape
    if shape.moe is None:
        yield ("gate_proj", "up_proj"), MatmulOperation(rows=d.Tf, inner=d.D, width=d.F, count=2)
        yield ("down_proj",), MatmulOperation(rows=d.Tf, inner=d.F, width=d.D)
        return
    yield from (((), product) for product in _mixture(run, d, shape.moe))


def _mixture(run: Resolved, d: LocalDims, moe: MoeShape) -> Iterator[MatmulOperation]:
    yield MatmulOperation(rows=d.m, inner=d.D, width=moe.logits)
    # Each expert has its even share of the rows that come here.
    held = moe.experts // run.plan.mesh.ep
    rows = d.m * moe.experts_per_token
    share = {"rows": rows // held, "count": held} if rows % held == 0 else {"rows": rows, "count": 1}
    yield MatmulOperation(rows=share["rows"], inner=d.D, width=d.F, count=2 * share["count"])
    yield MatmulOperation(rows=share["rows"], inner=d.F, width=d.D, count=share["count"])
    yield MatmulOperation(rows=d.m, inner=moe.experts_per_token, width=d.D)
    if moe.shared_experts:
        inner = moe.shared_experts * d.F
        yield MatmulOperation(rows=d.m, inner=d.D, width=inner, count=2)
        yield MatmulOperation(rows=d.m, inner=inner, width=d.D)


def _factors(one: LoraLinear) -> tuple[MatmulOperation, MatmulOperation]:
    return (
        MatmulOperation(rows=one.rows, inner=one.inputs, width=one.rank),
        MatmulOperation(rows=one.rows, inner=one.rank, width=one.outputs),
    )


def _attention(run: Resolved, d: LocalDims, rule: AttentionRule) -> AttentionOperation:
    """As if the rank had its share of all heads of whole sequences, which is as much work for any cut over cp, and as
    if each sequence was one document. In a sliding window a block of queries meets two of keys.
    """
    keys = min(d.S, 2 * rule.window) if rule.window else d.S
    queries = d.S // run.plan.mesh.cp
    return AttentionOperation(heads=d.N * (d.T // queries), queries=queries, keys=keys, head_dim=d.H)


def _back(attention: AttentionOperation) -> AttentionOperation:
    return AttentionOperation(
        heads=attention.heads,
        queries=attention.queries,
        keys=attention.keys,
        head_dim=attention.head_dim,
        is_backward=True,
    )


def _input_gradient(forward: MatmulOperation) -> MatmulOperation:
    return MatmulOperation(rows=forward.rows, inner=forward.width, width=forward.inner, count=forward.count)


def _weight_gradient(forward: MatmulOperation) -> MatmulOperation:
    return MatmulOperation(
        rows=forward.width, inner=forward.rows, width=forward.inner, kernel="gradient", count=forward.count
    )


def _inner(run: Resolved, d: LocalDims) -> int:
    """Elements that the feed-forward moves beside its products."""
    moe = run.shape.moe
    if moe is None:
        return 5 * d.Tf * d.F
    rows = d.m * moe.experts_per_token
    return 5 * (rows + d.m * moe.shared_experts) * d.F + (2 + 2 + 3) * rows * d.D


def _messages_of_regions(run: Resolved, size: int, flow: GradientFlow | None) -> Iterator[Operation]:
    """Of regions that are cut over tp. Going back, what a region gives has a whole gradient on each rank, and what it
    takes has one that is summed over ranks.
    """
    for region, (before, last) in REGIONS.items():
        if run.plan.rules.cut(region) != "tp" or (run.shape.moe and region == "ffn"):
            continue
        gives, takes = (flow is None or flow.reaches(place) for place in (last, before))
        if run.plan.sequence_parallel and gives:
            yield CollectiveOperation(collective="all-gather", axis="tp", bytes=size)
        if run.plan.sequence_parallel and takes:
            yield CollectiveOperation(collective="reduce-scatter", axis="tp", bytes=size)
        if not run.plan.sequence_parallel and takes:
            yield CollectiveOperation(collective="all-reduce", axis="tp", bytes=size)


REGIONS = {"heads": (0, OUTPUT), "ffn": (BETWEEN, DOWN)}
"""Regions that are cut over tp: the last place before each, and its own last place."""


def _messages(run: Resolved, d: LocalDims, e: int, flow: GradientFlow | None = None) -> Iterator[Operation]:
    """The messages of a forward pass; or of the backward pass with this flow, which has most of them too, in the other
    direction.
    """
    mesh, shape, is_backward = run.plan.mesh, run.shape, flow is not None
    if mesh.tp > 1:
        yield from _messages_of_regions(run, d.T * d.D * e, flow)
    if flow is not None and not flow.reaches(ATTENTION):
        return
    if shape.has_wide_qk_norm and mesh.tp > 1:  # of each token's queries and of its keys
        yield CollectiveOperation(collective="all-reduce", axis="tp", bytes=FP32 * d.T, count=2)
    if shape.moe and mesh.ep > 1:
        rows = d.m * shape.moe.experts_per_token
        yield CollectiveOperation(collective="all-to-all", axis="ep", bytes=rows * d.D * e, count=2)
        if not is_backward:  # how many rows go where
            yield CollectiveOperation(collective="all-to-all", axis="ep", bytes=shape.moe.experts * INDEX)
    if shape.moe and mesh.cp * mesh.tp > 1 and not is_backward:
        logits = run.plan.microbatch * d.S * shape.moe.logits
        yield CollectiveOperation(collective="all-gather", axis="sequence", bytes=FP32 * logits)
    if shape.moe and mesh.tp > 1 and not run.plan.sequence_parallel:
        yield CollectiveOperation(collective="all-gather", axis="tp", bytes=d.T * d.D * e)
    if mesh.cp > 1 and run.plan.context == "ring":
        hop = 2 * d.T * d.K * d.H
        yield CollectiveOperation(collective="send", axis="cp", bytes=hop * e, count=mesh.cp - 1)
        if is_backward:  # their gradients, which make one hop more
            yield CollectiveOperation(collective="send", axis="cp", bytes=hop * FP32, count=mesh.cp)
    elif mesh.cp > 1:
        packed = d.N + 2 * max(d.K, mesh.cp)
        yield CollectiveOperation(collective="all-to-all", axis="cp", bytes=d.T * packed * d.H * e)
        yield CollectiveOperation(collective="all-to-all", axis="cp", bytes=d.T * d.N * d.H * e)


def _head(run: Resolved) -> UnitOperations:
    d, e = local_dims(run), ELEMENT_BYTES[run.config.numerics.compute]
    norm, loss, matrix = 4 * d.t * d.D * e, 5 * FP32 * d.Tv * d.V, FP32 * d.D * d.V
    logits = MatmulOperation(rows=d.Tv, inner=d.D, width=d.V)
    is_trained = trains_table(run, len(run.outline.units) - 1)
    back = (_input_gradient(logits), *((_weight_gradient(logits),) if is_trained else ()))
    matrix = matrix if is_trained else 0

    def move(size: int) -> MemoryOperation:
        return MemoryOperation(kernel="copy", bytes=size)

    is_cut = run.plan.mesh.tp > 1 and run.plan.rules.cut("vocab") == "tp"
    enter, leave = _seam(run, d.T * d.D * e) if is_cut else ((), ())
    entered = enter if run.plan.sequence_parallel else ()
    if has_fused_loss(run):
        # The gradient is made in the forward; where it cannot stay in its buffer, the backward adds it there.
        scaled, copied = (2 * matrix, 3 * matrix) if zero_stage(run).shards_gradients else (0, 0)
        sums = tuple(_over_vocabulary(d.T, CHUNK_TOKENS)) if is_cut else ()
        return UnitOperations(
            forward=(*entered, logits, *back, move(norm + loss + 2 * matrix), *sums),
            backward=(move(2 * norm + scaled + copied), *leave),
            weight=(move(copied),),
            input_bytes=d.t * d.D * e,
        )
    added = move(2 * matrix)
    sums = tuple(_over_vocabulary(d.T, d.T)) if is_cut else ()
    return UnitOperations(
        forward=(*entered, logits, move(norm + loss), *sums),
        backward=(*back, move(2 * (norm + loss)), added, *leave),
        weight=(*back[1:], added) if is_trained else (),
        input_bytes=d.t * d.D * e,
    )


def _over_vocabulary(tokens: int, chunk_tokens: int) -> Iterator[CollectiveOperation]:
    """For each chunk: the largest of all ranks' sums of a token; their sum, and the target's logit."""
    for first in range(0, tokens, chunk_tokens):
        size = FP32 * min(chunk_tokens, tokens - first)
        yield CollectiveOperation(collective="all-reduce", axis="tp", bytes=size)
        yield CollectiveOperation(collective="all-reduce", axis="tp", bytes=2 * size)
