"""Linear attention of a sequence cut in zig-zag over ranks: what they exchange does not grow with its length.

To the tokens after it, a run of tokens is an affine map of a head's state, S → A S + B, with A [H, H] and B [H, V].
Each rank computes the maps of its two runs, all ranks gather them, and each applies those before its own runs. In the
backward the gradients of the states pass through the transposed maps. A document that starts within a run makes A zero;
then no state goes through. In exact mode every rank computes whole sequences, so that bits do not depend on the cut.

    B  sequences    S  a rank's own tokens      K  key heads, of H numbers
    R  its runs: 2  L  tokens of a run          N  value heads, of V numbers
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group

from superstep.comm.collectives import stack_ranks
from superstep.comm.mesh import Group
from superstep.engine.parallel.zigzag import by_rank, gather_kv
from superstep.model.mixers.short_convolution import AddTaps, convolve
from superstep.numerics.delta_rule.chunks import Chunks, Piece, list_chunks, make_room, take_rows
from superstep.numerics.delta_rule.operator import (
    delta_rule,
    empty_states,
    put_gradients,
    split_gradient,
    take_gradients,
)
from superstep.numerics.delta_rule.rule import (
    Terms,
    backward,
    carry_states,
    find_terms,
    pass_gradients,
    pass_states,
    read_gradients,
    read_states,
)
from superstep.numerics.delta_rule.sums import Sums
from superstep.numerics.sending import send

RUNS = 2
"""Runs of the sequence that a rank holds."""

FAST = Sums()


@dataclass(frozen=True, slots=True)
class ScanOverRanks:
    """Linear attention over the ranks of ``group``, as ``model.mixers.gated_delta.Scan``.

    Attributes:
        starts: int64 [B, cp · S] on the host, the start of each token's document; None for one in each row.
        positions: of the own tokens within their documents, and of the W - 1 after each run, [B, R, L + W - 1]; None
            likewise.
        is_exact: whether bits must not depend on the layout.
    """

    group: Group
    starts: Tensor | None = None
    positions: Tensor | None = None
    is_exact: bool = False

    def convolve(self, x_BSC: Tensor, weight_C1W: Tensor, add: AddTaps | None = None) -> Tensor:
        return convolve(x_BSC, weight_C1W, NeighboursOverRanks(self.group), self.positions, add)

    def attend(self, q_BSKH: Tensor, k_BSKH: Tensor, v_BSNV: Tensor, g_BSN: Tensor, beta_BSN: Tensor) -> Tensor:
        inputs = q_BSKH, k_BSKH, v_BSNV, g_BSN, beta_BSN
        if self.is_exact:
            whole = [_Gather.apply(x, self.group) for x in inputs]  # type: ignore[no-untyped-call]
            out: Tensor = _Keep.apply(delta_rule(*whole, self.starts, True), self.group)  # type: ignore[no-untyped-call] # noqa: FBT003
            return out
        mixed: Tensor = delta_rule_over_ranks(*inputs, self.starts, self.group.group_name)[0]
        return mixed


def list_positions(starts: Tensor, taps: int, group: Group) -> Tensor:
    """``ScanOverRanks.positions``, on the host."""
    inside = torch.arange(starts.shape[1]) - starts
    length = starts.shape[1] // (RUNS * group.size())
    padded = torch.cat((inside, inside.new_zeros(len(inside), taps - 1)), 1)
    return torch.stack([padded[:, at : at + length + taps - 1] for at in _first_places(length, group)], 1)


def _runs_of(group: Group) -> tuple[int, int]:
    """The numbers of the own runs in the sequence."""
    return group.rank(), RUNS * group.size() - 1 - group.rank()


def _first_places(length: int, group: Group) -> list[int]:
    return [number * length for number in _runs_of(group)]


def _gather_runs(x_BRX: Tensor, group: Group) -> list[Tensor]:
    """Something of each run of the sequence, in its order: [B, ...] each."""
    early, late = stack_ranks(x_BRX, group).unbind(2)
    return [*early, *late.flip(0)]


@dataclass(frozen=True, slots=True)
class NeighboursOverRanks:
    """The tokens beside the runs of each rank, as ``short_convolution.Neighbours``."""

    group: Group

    def before(self, x_BSC: Tensor, count: int) -> Tensor:
        runs = x_BSC.unflatten(1, (RUNS, -1))
        ends = _gather_runs(runs[:, :, -count:], self.group)
        return torch.cat((self._beside(ends, -1), runs), 2)

    def after(self, x_BSC: Tensor, count: int) -> Tensor:
        runs = x_BSC.unflatten(1, (RUNS, -1))
        starts = _gather_runs(runs[:, :, :count], self.group)
        return torch.cat((runs, self._beside(starts, 1)), 2)

    def _beside(self, ends: Sequence[Tensor], step: int) -> Tensor:
        places = [number + step for number in _runs_of(self.group)]
        nothing = torch.zeros_like(ends[0])
        return torch.stack([ends[at] if 0 <= at < len(ends) else nothing for at in places], 1)


class _Gather(torch.autograd.Function):
    """The whole sequence; each rank then computes the whole gradient, of which it keeps its own tokens'."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:  # noqa: ANN401
        ctx.group = group
        return gather_kv(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        return by_rank(grad, ctx.group.size())[ctx.group.rank()].clone(), None


class _Keep(torch.autograd.Function):
    """The inverse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:  # noqa: ANN401
        ctx.group = group
        return by_rank(x, group.size())[group.rank()].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        return gather_kv(grad.contiguous(), ctx.group), None


@dataclass(frozen=True, slots=True)
class _Runs:
    """The pieces of a rank's runs, and which of them a state enters or leaves.

    Attributes:
        entering, leaving, passing: numbers of pieces, and their run's number among all rows' runs, [2, pieces]; a state
            passes a piece that it enters and leaves.
    """

    chunks: Chunks
    entering: Tensor
    leaving: Tensor
    passing: Tensor

    @classmethod
    def of(cls, like_BSX: Tensor, starts: Tensor | None, group: Group) -> _Runs:
        rows, tokens = like_BSX.shape[:2]
        length = tokens // RUNS
        firsts = _first_places(length, group)
        pieces: dict[Piece, tuple[int, bool, bool]] = {}
        for row in range(rows):
            for run, first in enumerate(firsts):
                own = [0] * length if starts is None else starts[row, first : first + length].tolist()
                begins = _list_begins(own, first)
                for begin, end in zip(begins, [*begins[1:], length], strict=True):
                    piece = Piece(row, run * length + begin, run * length + end)
                    pieces[piece] = row * RUNS + run, begin == 0 and own[0] < first, end == length
        chunks = list_chunks(list(pieces), tokens, rows * tokens, like_BSX.device)
        ends = [pieces[piece] for piece in chunks.pieces]

        def pick(is_so: Callable[[bool, bool], bool]) -> Tensor:
            pairs = [(number, run) for number, (run, enters, leaves) in enumerate(ends) if is_so(enters, leaves)]
            return send(torch.tensor(pairs, dtype=torch.int64).view(-1, 2).t().contiguous(), like_BSX.device)

        return cls(
            chunks,
            entering=pick(lambda enters, leaves: enters),
            leaving=pick(lambda enters, leaves: leaves),
            passing=pick(lambda enters, leaves: enters and leaves),
        )

    def place(self, of_runs_BRX: Tensor, which: Tensor) -> Tensor:
        """For each piece, what its run has; zeros for other pieces than those."""
        numbers, runs = which
        flat = of_runs_BRX.flatten(0, 1)
        out = flat.new_zeros(len(self.chunks.pieces), *flat.shape[1:])
        return out.index_copy_(0, numbers, flat.index_select(0, runs))

    def take(self, of_pieces: Tensor, rows: int, which: Tensor) -> Tensor:
        """The inverse: for each run, what its piece has, [B, R, ...]; zeros for runs without."""
        numbers, runs = which
        out = of_pieces.new_zeros(rows * RUNS, *of_pieces.shape[1:])
        out.index_copy_(0, runs, of_pieces.index_select(0, numbers))
        by_row: Tensor = out.unflatten(0, (rows, RUNS))
        return by_row

    def find_maps(self, terms: Terms, rows: int) -> tuple[Tensor, Tensor]:
        """B, [B, R, N, H, V], and A, [B, R, N, H, H], of each run."""
        states = empty_states(terms, self.chunks)
        width, value = states.shape[-2:]
        unit = torch.eye(width, dtype=states.dtype, device=states.device).expand(*states.shape[:2], width, width)
        both = replace(terms, u=torch.cat((terms.u, terms.u.new_zeros(*terms.u.shape[:-1], width)), -1))
        added, through = carry_states(both, self.chunks.steps, torch.cat((states, unit), -1), FAST).split(
            (value, width), -1
        )
        return self.take(added, rows, self.leaving), self.take(through, rows, self.passing)


def _list_begins(starts: Sequence[int], first: int) -> list[int]:
    """Where the pieces of a run begin, whose first token is at ``first``: with it, and with each document."""
    return sorted({max(start - first, 0) for start in starts})


def _group_by_name(group: str) -> Group:
    return _resolve_process_group(group)  # type: ignore[arg-type]


@torch.library.custom_op("superstep::delta_rule_over_ranks", mutates_args=())
def delta_rule_over_ranks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, starts: Tensor | None, group: str
) -> tuple[Tensor, Tensor, Tensor]:
    """The outputs of the own tokens, [B, S, N, V]; the state that enters each run, and the A of its map."""
    ranks, rows = _group_by_name(group), len(q)
    runs = _Runs.of(q, starts, ranks)
    terms = find_terms((q, k, v, g, beta), runs.chunks, FAST)
    added, through = runs.find_maps(terms, rows)
    state = torch.zeros_like(added[:, 0])
    entering = []
    for both in _gather_runs(torch.cat((added, through), -1), ranks):
        entering.append(state)
        state = both[..., state.shape[-1] :] @ state + both[..., : state.shape[-1]]
    own = torch.stack([entering[number] for number in _runs_of(ranks)], 1)
    passed = pass_states(terms, runs.chunks.steps, runs.place(own, runs.entering), FAST)
    room = make_room(v)
    runs.chunks.put(read_states(terms, passed, FAST), room)
    return take_rows(room, v), own, through.contiguous()


@torch.library.custom_op("superstep::delta_rule_over_ranks_backward", mutates_args=())
def _delta_rule_over_ranks_backward(  # noqa: PLR0913
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    starts: Tensor | None,
    own: Tensor,
    through: Tensor,
    group: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v, g and beta."""
    ranks, rows, inputs = _group_by_name(group), len(q), (q, k, v, g, beta)
    runs = _Runs.of(q, starts, ranks)
    chunks, steps = runs.chunks, runs.chunks.steps
    terms = find_terms(inputs, chunks, FAST)
    passed = pass_states(terms, steps, runs.place(own, runs.entering), FAST)
    grad = split_gradient(grad, chunks, FAST)
    read = read_gradients(terms, grad, FAST)
    *_, before = pass_gradients(terms, steps, read, empty_states(terms, chunks), FAST)
    local = runs.take(before, rows, runs.entering)
    state = torch.zeros_like(local[:, 0])
    leaving: list[Tensor] = []
    for both in reversed(_gather_runs(torch.cat((local, through), -1), ranks)):
        leaving.insert(0, state)
        state = both[..., state.shape[-1] :].transpose(-1, -2) @ state + both[..., : state.shape[-1]]
    after = torch.stack([leaving[number] for number in _runs_of(ranks)], 1)
    of_corrected, of_states, _ = pass_gradients(terms, steps, read, runs.place(after, runs.leaving), FAST)
    rooms = [make_room(x) for x in inputs]
    put_gradients(backward(terms, passed, grad, of_corrected, of_states, FAST), chunks, rooms)
    return take_gradients(rooms, inputs)


@delta_rule_over_ranks.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, starts: Tensor | None, group: str
) -> tuple[Tensor, Tensor, Tensor]:
    rows, (heads, value), width = len(q), v.shape[2:], q.shape[-1]
    state = g.new_empty(rows, RUNS, heads, width, value, dtype=torch.float32)
    return (
        torch.empty_like(v, memory_format=torch.contiguous_format),
        state,
        state.new_empty(rows, RUNS, heads, width, width),
    )


@_delta_rule_over_ranks_backward.register_fake
def _(  # noqa: PLR0913
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    starts: Tensor | None,
    own: Tensor,
    through: Tensor,
    group: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv, dg, dbeta = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, g, beta))
    return dq, dk, dv, dg, dbeta


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:  # noqa: ANN401
    *tensors, ctx.group = inputs
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _backward(
    ctx: Any,  # noqa: ANN401
    grad: Tensor,
    _: Tensor,
    __: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, None, None]:
    return *_delta_rule_over_ranks_backward(grad.contiguous(), *ctx.saved_tensors, ctx.group), None, None


delta_rule_over_ranks.register_autograd(_backward, setup_context=_keep)
