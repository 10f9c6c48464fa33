"""The gated delta rule in chunks (Yang 2024), forward and backward.

A head has a state S, [H, V]. Each token lets it fade, corrects the value that it has for the token's key, and reads:

    S ← e^g S;   S ← S + β k (v - kᵀ S)ᵀ;   o = Sᵀ q

For the C tokens of a chunk, with c the sums of g from its start, D_ij = e^(c_i - c_j) for j ≤ i, S the state before:

    T = (1 + tril(diag(β) K Kᵀ ∘ D, -1))⁻¹           the corrections of tokens of each other (the WY form)
    u = T (β v),   w = T (β e^c k)                   n = u - w S: the corrected values
    o = (e^c q) S + (Q Kᵀ ∘ D) n,                    S' = e^(c_C) S + (e^(c_C - c) k)ᵀ n

All but the states is computed for all chunks at once. The backward computes the forward again, from what went in.

    M  chunks    K  key heads      C  tokens of a chunk    H  width of a key    V  width of a value
                 N  value heads, of which each key head serves N / K neighbours
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from superstep.kernels import triton_loader
from superstep.numerics.delta_rule.chunks import Chunks
from superstep.numerics.delta_rule.sums import Sums
from superstep.numerics.sending import send

EPS = 1e-6
"""Added to the sum of squares of queries and keys."""

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Queries and keys [B, S, K, H], values [B, S, N, V], the logarithm g of what stays and β, [B, S, N]."""


@dataclass(frozen=True, slots=True)
class Heads:
    """Queries or keys of unit length, by chunk."""

    unit: Tensor
    inverse: Tensor

    @classmethod
    def of(cls, x_MCKH: Tensor, sums: Sums) -> Heads:
        """[M, K, C, H], and 1 / length, [M, K, C, 1]."""
        wide = sums.pad(widen(x_MCKH)).transpose(1, 2).contiguous()
        inverse = 1.0 / (sums.add_last(wide * wide).unsqueeze(-1) + EPS).sqrt()
        return cls(wide * inverse, inverse)

    def backward(self, grad: Tensor, sums: Sums) -> Tensor:
        """The gradient of ``x``, before its transposition."""
        shift = sums.add_last(grad * self.unit).unsqueeze(-1)
        return (grad - self.unit * shift) * self.inverse


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What chunks have without a state, [M, N, C, ...] each; names as above.

    Attributes:
        query, key: of unit length, for each value head.
        of_queries, of_keys: e^c q and e^(c_C - c) k.
        of_values: β v.
        faded: β e^c k.
        end: e^(c_C), [M, N].
        pairs: Q Kᵀ ∘ D.
        lower: the matrix that is inverted to T.
    """

    query: Heads
    key: Heads
    value: Tensor
    beta: Tensor
    rise: Tensor
    fall: Tensor
    end: Tensor
    decay: Tensor
    pairs: Tensor
    lower: Tensor
    inverse: Tensor
    of_queries: Tensor
    of_keys: Tensor
    of_values: Tensor
    faded: Tensor
    u: Tensor
    w: Tensor
    scale: float

    @property
    def group(self) -> int:
        """Value heads of a key head."""
        return self.value.shape[1] // self.key.unit.shape[1]


def widen(x: Tensor) -> Tensor:
    """fp32 or wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def find_terms(inputs: Inputs, chunks: Chunks, sums: Sums) -> Terms:
    """The terms of all chunks."""
    q, k, v, g, beta = (chunks.split(x) for x in inputs)
    query, key = Heads.of(q, sums), Heads.of(k, sums)
    scale = inputs[0].shape[-1] ** -0.5
    value = sums.pad(widen(v)).transpose(1, 2).contiguous()
    beta, c = (widen(x).transpose(1, 2).contiguous() for x in (beta, g))
    c = c.cumsum(-1)
    group = value.shape[1] // key.unit.shape[1]
    later = torch.ones(c.shape[-1], c.shape[-1], dtype=torch.bool, device=c.device).triu(1)
    decay = (c.unsqueeze(-1) - c.unsqueeze(-2)).masked_fill_(later, float("-inf")).exp_()
    transposed = key.unit.transpose(-1, -2)
    pairs = _repeat(sums.multiply(query.unit, transposed), group).mul(scale).mul_(decay)
    lower = _repeat(sums.multiply(key.unit, transposed), group).mul(decay).mul_(beta.unsqueeze(-1)).tril_(-1)
    inverse = sums.invert(lower)
    rise, fall = c.exp(), (c[..., -1:] - c).exp_()
    keys = _repeat(key.unit, group)
    of_values, faded = value * beta.unsqueeze(-1), keys * (beta * rise).unsqueeze(-1)
    return Terms(
        query=query,
        key=key,
        value=value,
        beta=beta,
        rise=rise,
        fall=fall,
        end=rise[..., -1],
        decay=decay,
        pairs=pairs,
        lower=lower,
        inverse=inverse,
        of_queries=_repeat(query.unit, group) * (rise * scale).unsqueeze(-1),
        of_keys=keys * fall.unsqueeze(-1),
        of_values=of_values,
        faded=faded,
        u=sums.multiply(inverse, of_values),
        w=sums.multiply(inverse, faded),
        scale=scale,
    )


def _repeat(x_MKCX: Tensor, group: int) -> Tensor:
    return x_MKCX if group == 1 else x_MKCX.repeat_interleave(group, 1)


@dataclass(frozen=True, slots=True)
class Passed:
    """What the states leave: each chunk's state before it, [M, N, H, V], its corrected values n, and the last state of
    each piece.
    """

    states: Tensor
    corrected: Tensor
    last: Tensor


def pass_states(terms: Terms, steps: Sequence[slice], first: Tensor, sums: Sums) -> Passed:
    """Pass on the states from chunk to chunk.

    Args:
        steps: the n-th chunks of all pieces (``Chunks.steps``).
        first: the state before each piece, [pieces, N, H, V].
    """
    if kernel := _kernel(terms, sums):
        return Passed(*kernel.pass_states(*_without_state(terms), send_steps(steps, first.device), first))
    state, states, corrected = first.clone(), [], []
    for step in steps:
        states.append(state[: step.stop - step.start].clone())
        corrected.append(_advance(state, terms, step, sums))
    return Passed(torch.cat(states), torch.cat(corrected), state)


def carry_states(terms: Terms, steps: Sequence[slice], first: Tensor, sums: Sums) -> Tensor:
    """The last state of each piece alone. Arguments as of ``pass_states``."""
    if kernel := _kernel(terms, sums):
        inputs = (*_without_state(terms), send_steps(steps, first.device), first)
        last: Tensor = kernel.pass_states(*inputs, is_kept=False)[-1]
        return last
    state = first.clone()
    for step in steps:
        _advance(state, terms, step, sums)
    return state


def _kernel(terms: Terms, sums: Sums) -> ModuleType | None:
    """Triton's kernels, which go through all chunks in one launch; None where torch goes from step to step: that takes
    less time than an interpreted launch.
    """
    if sums.is_exact or not terms.u.is_cuda or terms.u.dtype != torch.float32 or triton_loader.missing(terms.u.device):
        return None
    kernels = triton_loader.module("delta_states")
    return kernels if kernels.IS_COMPILED else None


def _without_state(terms: Terms) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return terms.u, terms.w, terms.of_keys, terms.end


def send_steps(steps: Sequence[slice], device: torch.device) -> tuple[Tensor, Tensor]:
    """The number of each step's first chunk, and the number of chunks of each piece."""
    starts, stops = torch.tensor([(step.start, step.stop) for step in steps], dtype=torch.int32).t()
    counts = stops - starts
    lengths = (torch.arange(int(counts[0]))[:, None] < counts).sum(1, dtype=torch.int32)
    first, of_pieces = send(torch.cat((starts, lengths)), device).split((len(starts), len(lengths)))
    return first, of_pieces


def _advance(state: Tensor, terms: Terms, step: slice, sums: Sums) -> Tensor:
    """Pass a step's states through its chunks, in place; the corrected values."""
    before = state[: step.stop - step.start]
    n = terms.u[step] - sums.multiply(terms.w[step], before)
    before.mul_(terms.end[step][..., None, None]).add_(sums.multiply(terms.of_keys[step].transpose(-1, -2), n))
    return n


def read_states(terms: Terms, passed: Passed, sums: Sums) -> Tensor:
    """The outputs, [M, C, N, V]."""
    out = sums.multiply(terms.of_queries, passed.states) + sums.multiply(terms.pairs, passed.corrected)
    return out.transpose(1, 2)


def read_gradients(terms: Terms, grad: Tensor, sums: Sums) -> tuple[Tensor, Tensor]:
    """What the gradient of the outputs, [M, N, C, V], gives to n and to the states before each chunk."""
    of_corrected = sums.multiply(terms.pairs.transpose(-1, -2), grad)
    return of_corrected, sums.multiply(terms.of_queries.transpose(-1, -2), grad)


def pass_gradients(
    terms: Terms, steps: Sequence[slice], read: tuple[Tensor, Tensor], last: Tensor, sums: Sums
) -> tuple[Tensor, Tensor, Tensor]:
    """Pass the gradients of the states back.

    Args:
        read: as of ``read_gradients``.
        last: of the state after each piece.

    Returns:
        The gradients of n and of each chunk's state after it, and of the state before each piece.
    """
    if kernel := _kernel(terms, sums):
        _, *factors = _without_state(terms)
        of_n, of_each, of_first = kernel.pass_gradients(read, *factors, send_steps(steps, last.device), last)
        return of_n, of_each, of_first
    state = last.clone()
    of_corrected, of_states = torch.empty_like(read[0]), torch.empty_like(read[1])
    for step in reversed(steps):
        after = state[: step.stop - step.start]
        of_states[step] = after
        dn = read[0][step] + sums.multiply(terms.of_keys[step], after)
        of_corrected[step] = dn
        taken = sums.multiply(terms.w[step].transpose(-1, -2), dn)
        after.mul_(terms.end[step][..., None, None]).add_(read[1][step]).sub_(taken)
    return of_corrected, of_states, state


def backward(
    terms: Terms, passed: Passed, grad: Tensor, of_corrected: Tensor, of_states: Tensor, sums: Sums
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of the inputs, by chunk: [M, C, ...].

    Args:
        grad: of the outputs, [M, N, C, V].
        of_corrected, of_states: as of ``pass_gradients``.
    """
    scale = terms.scale
    turned = passed.states.transpose(-1, -2)
    dw = sums.multiply(of_corrected, turned).neg_()
    inverse = terms.inverse.transpose(-1, -2)
    of_values, of_faded = sums.multiply(inverse, of_corrected), sums.multiply(inverse, dw)
    lower = sums.multiply(of_values, terms.u.transpose(-1, -2)) + sums.multiply(of_faded, terms.w.transpose(-1, -2))
    lower = lower.neg_().tril_(-1)
    pairs = sums.multiply(grad, passed.corrected.transpose(-1, -2)).tril_()
    of_queries = sums.multiply(grad, turned)
    of_keys = sums.multiply(passed.corrected, of_states.transpose(-1, -2))

    risen = sums.add_last(of_queries * terms.of_queries) + sums.add_last(of_faded * terms.faded)
    fallen = sums.add_last(of_keys * terms.of_keys)
    ends = sums.add_last((passed.states * of_states).flatten(-2)) * terms.end
    dg = _across((pairs * terms.pairs).add_(lower * terms.lower)) + _suffix(risen) + (fallen.cumsum(-1) - fallen)
    dg += ends.unsqueeze(-1)

    of_products = lower.mul_(terms.decay)
    keys = terms.key.unit.transpose(-1, -2)
    products = _repeat(sums.multiply(terms.key.unit, keys), terms.group)
    dbeta = sums.add_last(of_products * products)
    of_products.mul_(terms.beta.unsqueeze(-1))
    dbeta += sums.add_last(of_values * terms.value)
    faded = _repeat(terms.key.unit, terms.group) * terms.rise.unsqueeze(-1)
    dbeta += sums.add_last(of_faded * faded)

    pairs = pairs.mul_(terms.decay).mul_(scale)
    query, key = (_repeat(each.unit, terms.group) for each in (terms.query, terms.key))
    dquery = sums.multiply(pairs, key) + of_queries * (terms.rise * scale).unsqueeze(-1)
    dkey = sums.multiply(pairs.transpose(-1, -2), query)
    dkey += sums.multiply(of_products + of_products.transpose(-1, -2), key)
    dkey += of_keys * terms.fall.unsqueeze(-1) + of_faded * (terms.beta * terms.rise).unsqueeze(-1)
    dq, dk = (each.backward(_gather(x, terms.group), sums) for each, x in ((terms.query, dquery), (terms.key, dkey)))
    dv = of_values * terms.beta.unsqueeze(-1)
    return tuple(x.transpose(1, 2) for x in (dq, dk, dv, dg, dbeta))  # type: ignore[return-value]


def _suffix(x: Tensor) -> Tensor:
    """The sum from each place on."""
    return x.flip(-1).cumsum(-1).flip(-1)


def _across(pairs_MNCC: Tensor) -> Tensor:
    """For each token t the sum over pairs (i, j) with j < t ≤ i: of those that its g is between, [M, N, C].

    Summed as such, not as a difference of sums over all pairs: those that do not count are larger.
    """
    below = pairs_MNCC.tril(-1)
    before = below.cumsum(-1).sub_(below)
    return _suffix(before.transpose(-1, -2)).diagonal(dim1=-2, dim2=-1)


def _gather(x_MNCH: Tensor, group: int) -> Tensor:
    """The sum over the value heads of each key head, in their order."""
    parted: Tensor = x_MNCH.unflatten(1, (-1, group))
    first, *others = parted.unbind(2)
    for part in others:
        first = first + part
    return first
