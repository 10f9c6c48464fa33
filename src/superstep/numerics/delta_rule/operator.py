"""The gated delta rule of whole sequences, within each of their documents, as operators of torch's dispatcher.

Selective recompute keeps the operator's result, and a compiler sees one call for any number of documents.

    B  sequences    S  positions    K  key heads, of H numbers    N  value heads, of V numbers
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from superstep.numerics.delta_rule.chunks import Chunks, find_pieces, list_chunks
from superstep.numerics.delta_rule.rule import (
    Inputs,
    Terms,
    backward,
    find_terms,
    pass_gradients,
    pass_states,
    read_gradients,
    read_states,
    widen,
)
from superstep.numerics.delta_rule.sums import Sums


@torch.library.custom_op("superstep::delta_rule", mutates_args=())
def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, starts: Tensor | None, is_exact: bool
) -> Tensor:
    """The outputs, [B, S, N, V].

    Args:
        q, k: [B, S, K, H].
        v: [B, S, N, V].
        g: the logarithm of the share of the state that stays, [B, S, N].
        beta: the share of the correction that is made, [B, S, N].
        starts: int64 [B, S] on the host, the start of each token's document; None for one document in each row.
        is_exact: whether bits must not depend on the layout.
    """
    sums = Sums(is_exact)
    chunks = _chunks_of(q, starts)
    terms = find_terms((q, k, v, g, beta), chunks, sums)
    out = read_states(terms, pass_states(terms, chunks.steps, empty_states(terms, chunks), sums), sums)
    return chunks.join(out, v)[..., : v.shape[-1]].to(v.dtype).contiguous()


@torch.library.custom_op("superstep::delta_rule_backward", mutates_args=())
def _delta_rule_backward(  # noqa: PLR0913
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, starts: Tensor | None, is_exact: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v, g and beta."""
    sums, inputs = Sums(is_exact), (q, k, v, g, beta)
    chunks = _chunks_of(q, starts)
    terms = find_terms(inputs, chunks, sums)
    none = empty_states(terms, chunks)
    passed = pass_states(terms, chunks.steps, none, sums)
    grad = split_gradient(grad, chunks, sums)
    read = read_gradients(terms, grad, sums)
    of_corrected, of_states, _ = pass_gradients(terms, chunks.steps, read, none, sums)
    return join_gradients(backward(terms, passed, grad, of_corrected, of_states, sums), chunks, inputs)


def empty_states(terms: Terms, chunks: Chunks) -> Tensor:
    """A state of zeros for each piece, [pieces, N, H, V]."""
    return terms.u.new_zeros(len(chunks.pieces), terms.u.shape[1], terms.w.shape[-1], terms.u.shape[-1])


def split_gradient(grad: Tensor, chunks: Chunks, sums: Sums) -> Tensor:
    """The gradient of the outputs by chunk, [M, N, C, V]."""
    return sums.pad(widen(chunks.split(grad))).transpose(1, 2).contiguous()


def join_gradients(
    by_chunk: tuple[Tensor, ...], chunks: Chunks, inputs: Inputs
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of the inputs, in their shapes and dtypes."""
    dq, dk, dv, dg, dbeta = (chunks.join(x, like) for x, like in zip(by_chunk, inputs, strict=True))
    wide = (x[..., : like.shape[-1]] for x, like in zip((dq, dk, dv), inputs, strict=False))
    dq, dk, dv, dg, dbeta = (x.to(like.dtype).contiguous() for x, like in zip((*wide, dg, dbeta), inputs, strict=True))
    return dq, dk, dv, dg, dbeta


def _chunks_of(q: Tensor, starts: Tensor | None) -> Chunks:
    rows, tokens = q.shape[:2]
    host = None if starts is None else starts.cpu()
    return list_chunks(find_pieces(host, rows, tokens), tokens, rows * tokens, q.device)


@delta_rule.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, starts: Tensor | None, is_exact: bool) -> Tensor:
    return torch.empty_like(v, memory_format=torch.contiguous_format)


@_delta_rule_backward.register_fake
def _(  # noqa: PLR0913
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, starts: Tensor | None, is_exact: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv, dg, dbeta = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, g, beta))
    return dq, dk, dv, dg, dbeta


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ANN401
    *tensors, ctx.is_exact = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, None, None]:  # noqa: ANN401
    return *_delta_rule_backward(grad.contiguous(), *ctx.saved_tensors, ctx.is_exact), None, None


delta_rule.register_autograd(_backward, setup_context=_keep)
