"""Activations: what each unit keeps of a microbatch between its passes, as this decoder leaves it in eager mode.

With e for the bytes of a number in the compute dtype; t, m, T, Tf, Tv, D, N, K, H, F, V are ``work.LocalDims``, a tp
rank's share:

    block, kept "all"
      input; residual stream between attention and feed-forward       2 · t·D·e
      outputs of both norms, whole where they enter a cut product     (T + Tf)·D·e
      1 / rms of both norms                                           2 · t·4
      queries and keys after rotation; values                         T·(N + 2K)·H·e
        of each query head, where a GPU's kernel knows no groups      T·3N·H·e
      attention's output, and the log-sum-exp of its scores           T·N·H·e + T·N·4
      gate, up, their product; silu of the gate, where kernels keep it    (3; 4) · Tf·F·e
      with qk_norm: queries and keys before it, 1 / rms               T·(N + K)·(H·e + 4)
        one norm over all heads                                       T·(N + K)·H·e + 2·T·4
      norms after attention and feed-forward as well: what is added, 1 / rms      2 · t·D·e + 2 · t·4
      a position bias of t5; of relative, in bf16                     (N + 32)·distances·4; N·H·distances·4
      in a sliding window: attention's output once more, by blocks, and their masks
                                                                      T·N·H·e + queries·keys·e of each block
        or where each query's range of keys begins                    S·8
      with Ulysses: keys and values of at least cp heads, and attention's output once more, as it was exchanged back
                                                                      2 · T·max(cp - K, 0)·H·e + T·N·H·e
        where they are kept of each query head, as they came as well  2 · T·max(cp, K)·H·e + T·N·H·e
    block, kept "selective": the input, and what products and attention gave
      input                                                           t·D·e
      queries, keys, values before rotation                           T·(N + 2K)·H·e
      attention's output and log-sum-exp                              T·N·H·e + T·N·4
      attention's projection, gate, up, down's output                 (T + Tf)·D·e + 2 · Tf·F·e
    block with a mixture of experts: the same, but for its feed-forward, with R = m·k rows sent to experts and s shared
    experts; as if each rank got its even share of the rows and none was dropped
      output of the second norm                                       m·D·e for T·D·e
      kept "all", for 4 · T·F·e
        rows before their experts; outputs, and their weights         2 · R·D·e + R·e
        gate, up, their product, silu of the gate, as above; shared ones    (3; 4) · (R + m·s)·F·e
        the order of the rows (twice with ep > 1), rows of each       R·8 (+ R·8) + E·8
        the router, of whole sequences: see ``_router``
      kept "selective", for T·D·e + 2 · T·F·e
        the router's logits                                           m·logits·4
        gate, up; down's outputs, shared ones, their sum              2 · (R + m·s)·F·e + (R + m (+ m))·D·e
    head
      input, 1 / rms                                                  t·D·e + t·4
      fused with the loss: the gradient of the norm's output          Tv·D·e
        where gradients are not whole (ZeRO 2, 3), the weight's       D·V·4
    embed
      tokens; cut, the own ones, and which are not                    T·8 (+ T·9)

A backward pass that comes in two keeps, from BackwardInput to BackwardWeight, the inputs of the products with
parameters and the gradients of their outputs; and of the norms' weights, which have no product, the gradient itself:

    block
      inputs: both norms' outputs, attention's output, the product of gate and up          2·T·D·e + T·N·H·e + T·F·e
      gradients: of queries, keys, values, gate, up, attention's and feed-forward's sum   T·(N + 2K)·H·e + 2·T·(D + F)·e
      of its norms, and of biases                                                         vectors · 4
    block with a mixture of experts, for those of the feed-forward; shared experts have the same of their tokens
      inputs: rows; the products of gate and up; how many rows each has        R·(D + F)·e + E·8
      gradients: of gate, up, and down's outputs; the router's, made at once   R·(D + 2F)·e + D·logits·4
    head
      the weight's gradient was made in the forward; ZeRO 2, 3: it                        D·4 (+ D·V·4)
    embed
      tokens; the gradient of what they gave                                              T·8; T·D·e

With adapters the linears keep what ``cost.program.lora`` says, a frozen head no input, and nothing goes back to
the embedding.

In exact mode gradients are sums of 8 bytes, beside which a rank has its share of them in fp32. Units keep as above, but

    block
      keys and values are fp32, and of whole sequences where a ring has their parts  for T·2K·H·e: T·cp·2K·H·4
      no log-sum-exp                                                                 T·N·4 less
      kept "selective": the input alone, of which all is computed again              t·D·e
      of its norms and biases, in two halves, what their gradients are summed of     2·t·D·4; qk_norm T·(N + K)·H·4
    head: its norm's output, the gradient of the logits                              T·D·e + T·V·e

Compiled units keep less than this. What a pass makes and drops is in ``workspace``.
"""

from __future__ import annotations

from superstep.cost.program.buffers import (
    ELEMENT_BYTES,
    EXACT,
    FP32,
    INDEX,
    TOKEN,
    count_fetched_bytes,
    count_settled_numel,
    gradient_bytes,
    has_fused_loss,
    is_exact,
    zero_stage,
)
from superstep.cost.program.flops import LocalDims, local_dims, rank_parameters
from superstep.cost.program.gradient_flow import (
    AFTER,
    ATTENTION,
    BETWEEN,
    GATE,
    GradientFlow,
    flow_of,
    trains_table,
)
from superstep.cost.program.lora import READS, count_kept_inner, count_kept_outputs
from superstep.cost.program.memory import linear_attention, softmax_attention
from superstep.cost.program.memory.further_token import keep_further_token
from superstep.cost.program.memory.temporaries import (
    block_workspace,
    count_inner,
    head_workspace,
    input_workspace,
    keeps_gate,
)
from superstep.plan.model.attention_rule import AttentionRule, DeltaShape
from superstep.plan.model.shape import T5_BUCKETS, MoeShape
from superstep.plan.model.style import NORM_NAMES
from superstep.plan.resolution.resolve import Resolved
from superstep.program.peak_memory import UnitBytes


def _is_vocabulary_cut(run: Resolved) -> bool:
    return run.plan.mesh.tp > 1 and run.plan.rules.cut("vocab") == "tp"


def unit_bytes(run: Resolved) -> tuple[UnitBytes, ...]:
    """Each unit's transient bytes within a step, in model order: activations of one microbatch."""
    d, e = local_dims(run), ELEMENT_BYTES[run.config.numerics.compute]
    boundary = d.t * d.D * e
    tokens = TOKEN * d.T
    # Of a frozen table nothing goes back.
    trains_embed, trains_head = (trains_table(run, unit) for unit in (0, len(run.outline.units) - 1))
    embed = tokens + (TOKEN + 1) * d.T if _is_vocabulary_cut(run) and trains_embed else tokens
    losses = 1 if run.shape.mtp_weight is None else 2
    head = losses * _head(run, d, e)
    of_head = _head_products(run, d, e) if trains_head else (0, 0)
    kinds = [(run.shape.mixer(layer), flow_of(run, layer + 1)) for layer in range(run.shape.layers)]
    blocks = {
        (mixer, flow): (
            *(_block(d, e, run, mixer, flow), _block_selective(d, e, run, mixer), boundary, boundary),
            _block_products(d, e, run, mixer, flow),
        )
        for mixer, flow in dict.fromkeys(kinds)
    }
    kept = [
        (embed, embed, tokens, 0, (tokens, d.T * d.D * e) if trains_embed else (0, 0)),
        *(blocks[kind] for kind in kinds),
        *([keep_further_token(blocks[kinds[-1]], d, e)] if losses > 1 else []),
        (head, head, boundary, boundary, of_head),
    ]
    head_forward, head_backward = head_workspace(run)
    workspaces = [
        (0, 0, 0),
        *(
            (*block_workspace(run, kind[0]), input_workspace(run, blocks[kind][-1][1], kind[0]))
            for kind in (*kinds, *kinds[-1:] * (losses - 1))
        ),
        (head_forward, head_backward, max(head_backward, of_head[1])),
    ]
    return tuple(
        UnitBytes(
            params=count_fetched_bytes(run, unit),
            gradient=gradient_bytes(run) * count_settled_numel(run, unit),
            kept_all=whole,
            kept_selective=kept_selective,
            kept_input=kept_input,
            product_inputs=products[0],
            product_gradients=products[1],
            boundary=passed,
            forward_workspace=forward,
            backward_workspace=backward,
            input_workspace=backward_input,
        )
        for unit, (whole, kept_selective, kept_input, passed, products), (forward, backward, backward_input) in zip(
            rank_parameters(run), kept, workspaces, strict=True
        )
    )


def _block(d: LocalDims, e: int, run: Resolved, mixer: AttentionRule | DeltaShape, flow: GradientFlow) -> int:
    shape = run.shape
    inputs = _product_inputs(d, run, flow)
    norms = sum(map(flow.reaches, _list_norm_places(run)))
    stream = _norm_inputs(run, d, flow) * e + inputs.get("first norm", 0) * e + norms * d.t * FP32
    if isinstance(mixer, AttentionRule):
        attention = softmax_attention.count_kept(run, d, e, mixer, flow)
    else:
        attention = linear_attention.count_kept(run, d, e, mixer)
    if not flow.reaches(ATTENTION):
        attention = inputs.get("attention", 0) * e
    if shape.moe is None:
        feed_forward = (_count_gates(run, flow) * d.Tf * d.F + inputs.get("second norm", 0) + inputs.get("gate", 0)) * e
    else:
        feed_forward = _mixture(d, e, shape.moe, run)
    return stream + attention + feed_forward + count_kept_inner(run) * e


def _product_inputs(d: LocalDims, run: Resolved, flow: GradientFlow) -> dict[str, int]:
    """Elements of the inputs that products with trained parameters keep, by their source."""
    every = {
        "first norm": d.T * d.D,
        "attention": d.T * d.N * d.H,
        "second norm": d.Tf * d.D,
        "gate": d.Tf * d.F,
    }
    if run.shape.moe is not None:
        return every
    return {source: every[source] for source in every if source in {READS[linear] for linear in flow.linears}}


def _count_gates(run: Resolved, flow: GradientFlow) -> int:
    """How many tensors a feed-forward keeps for its gate: gate, up, and the activation of the gate where it is kept."""
    if not flow.reaches(GATE):
        return 0
    if flow.first < GATE or not keeps_gate(run) or {"gate_proj", "up_proj"} <= flow.layers:
        return 2 + keeps_gate(run)
    return 2 if "gate_proj" in flow.layers else 1


def _list_norm_places(run: Resolved) -> list[int]:
    """The places of a block's norms, without those of queries and keys."""
    places = (0, BETWEEN, BETWEEN, AFTER)
    return [place for name, place in zip(NORM_NAMES[run.shape.style.norms], places, strict=True) if name is not None]


def _norm_inputs(run: Resolved, d: LocalDims, flow: GradientFlow) -> int:
    """Elements of the residual stream, and of what is added to it, that a block's norms and its input keep."""
    # A norm before attention keeps the unit's input, which is kept anyway; what enters a product is counted there, and
    # the unit's input where it is not the same.
    own = 1 if run.shape.style.norms != "after" or d.t != d.T else 0
    return (own + sum(place > 0 and flow.reaches(place) for place in _list_norm_places(run))) * d.t * d.D


def _mixture(d: LocalDims, e: int, moe: MoeShape, run: Resolved) -> int:
    R, mesh = d.m * moe.experts_per_token, run.plan.mesh
    inner = count_inner(run) * (R + d.m * moe.shared_experts)
    rows = 2 * R * d.D * e + R * e + inner * d.F * e
    orders = R * (INDEX if mesh.ep == 1 else 2 * INDEX) + moe.experts * INDEX
    return (1 + run.shape.style.shared_gate) * d.m * d.D * e + rows + orders + _router(d, moe, mesh.cp)


def _router(d: LocalDims, moe: MoeShape, cp: int) -> int:
    """Each rank that shares sequences routes the whole of them."""
    E, k, tokens = moe.experts, moe.experts_per_token, d.T * cp
    # Choices, who was turned away, the logarithm of the partition.
    kept = tokens * (k * INDEX + k + FP32)
    if moe.router == "noisy-topk":
        # Logits, spread, noise, distance to the threshold and its quotient, which threshold; one more choice; weights.
        kept += tokens * (6 * E * FP32 + E + INDEX + k * FP32)
        return kept + tokens // d.S * (2 * E * FP32 + 6 * FP32)
    # Logits, probabilities; weights and their sum; each sequence's shares.
    kept += tokens * (2 * E * FP32 + ((k + 1) * FP32 if moe.renormalise else 0))
    return kept + tokens // d.S * E * FP32


def _block_selective(d: LocalDims, e: int, run: Resolved, mixer: AttentionRule | DeltaShape) -> int:
    moe = run.shape.moe
    if is_exact(run):
        return d.t * d.D * e
    attention = d.T * ((1 + run.shape.style.output_gate) * d.N + 2 * d.K) * d.H * e + d.T * d.N * (d.H * e + FP32)
    if isinstance(mixer, DeltaShape):
        attention = linear_attention.count_products(run, d, e, mixer)
    kept = d.t * d.D * e + attention + d.T * d.D * e
    if run.shape.positions == "t5":
        kept += d.N * (run.shape.max_distance + 1) * FP32
    if moe is None:
        return kept + d.Tf * (d.D + 2 * d.F) * e
    R, shared = d.m * moe.experts_per_token, d.m * moe.shared_experts
    outputs = R + d.m * (2 if shared else 1)
    return kept + d.m * moe.logits * FP32 + 2 * (R + shared) * d.F * e + outputs * d.D * e


def _block_products(
    d: LocalDims, e: int, run: Resolved, mixer: AttentionRule | DeltaShape, flow: GradientFlow
) -> tuple[int, int]:
    """Inputs of the products, and gradients of their outputs."""
    shape = run.shape
    if run.config.lora:
        inner = count_kept_inner(run)
        inputs = sum(_product_inputs(d, run, flow).values())
        return (inputs + inner) * e, (count_kept_outputs(run) + inner) * e
    if run.config.freeze:
        outputs = {"q_proj": d.T * d.N * d.H, "o_proj": d.T * d.D, "down_proj": d.Tf * d.D}
        outputs |= dict.fromkeys(("k_proj", "v_proj"), d.T * d.K * d.H)
        outputs |= dict.fromkeys(("gate_proj", "up_proj"), d.Tf * d.F)
        gradients = sum(outputs[linear] for linear in flow.linears) * e + _vectors(run, d) * FP32
        return sum(_product_inputs(d, run, flow).values()) * e, gradients
    vectors = _vectors(run, d)
    inputs = d.T * d.D * e + d.T * d.N * d.H * e
    gradients = d.T * ((1 + run.shape.style.output_gate) * d.N + 2 * d.K) * d.H * e + d.T * d.D * e + vectors * FP32
    if isinstance(mixer, DeltaShape):
        inner, outer = linear_attention.count_deferred(run, d, e, mixer)
        inputs, gradients = d.T * d.D * e + inner, outer + shape.style.norm_count * d.D * FP32
    if shape.moe is None:
        return inputs + d.Tf * (d.D + d.F) * e, gradients + d.Tf * (d.D + 2 * d.F) * e
    # Of experts and shared ones; the router's gradient is made at once.
    R, shared = d.m * shape.moe.experts_per_token, d.m * shape.moe.shared_experts
    rows = R + (d.m if shared else 0)
    inputs += (rows * d.D + (R + shared) * d.F) * e + shape.moe.experts * INDEX
    return inputs, gradients + (rows * d.D + 2 * (R + shared) * d.F) * e + d.D * shape.moe.logits * FP32


def _vectors(run: Resolved, d: LocalDims) -> int:
    """Numbers of 4 bytes in the gradients of norms and biases; in exact mode those of biases of every token, until they
    are summed, and of norms too, without a kernel that sums them at once.
    """
    shape = run.shape
    biases = (d.N + 2 * d.K) * d.H if shape.qkv_bias else 0
    norms, norms_of_heads = shape.style.norm_count * d.D, 2 * d.H if shape.qk_norm else 0
    if shape.has_wide_qk_norm:
        norms_of_heads = (d.N + d.K) * d.H
    if not is_exact(run):
        return norms + norms_of_heads + biases + _bias_gradient(run, d)
    norms *= d.t if run.kept.exact_products else EXACT // FP32
    if run.kept.exact_scores:  # heads are of a width that kernels do not take
        norms_of_heads *= d.T * (d.N + d.K) // 2
    else:
        norms_of_heads *= EXACT // FP32
    return norms + norms_of_heads + d.T * biases + _bias_gradient(run, d)


def _bias_gradient(run: Resolved, d: LocalDims) -> int:
    """Elements in the gradient of a learnt position bias; in exact mode in its terms: of every token, or chunk."""
    shape, grain = run.shape, run.plan.grain
    match shape.positions:
        case "t5":
            return d.N * T5_BUCKETS * (1 if grain is None else d.T)
        case "relative":
            chunks = 1 if grain is None else d.T * grain.chunks // d.S
            return d.N * d.H * (shape.max_distance + 1) * chunks
        case _:
            return 0


def _head_products(run: Resolved, d: LocalDims, e: int) -> tuple[int, int]:
    if has_fused_loss(run):
        return 0, d.D * FP32 + (d.D * d.V * FP32 if zero_stage(run).shards_gradients else 0)
    return d.T * d.D * e + d.T * d.V * e, d.t * d.D * FP32 if run.kept.exact_products else d.D * EXACT


def _head(run: Resolved, d: LocalDims, e: int) -> int:
    stream = d.t * d.D * e + d.t * FP32 + d.Tv * d.D * e
    if has_fused_loss(run):
        is_summed = zero_stage(run).shards_gradients and trains_table(run, len(run.outline.units) - 1)
        return stream + (d.D * d.V * FP32 if is_summed else 0)
    return stream + d.T * d.V * e
