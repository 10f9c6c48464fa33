"""The pairs of word2vec (Mikolov 2013), forward and backward in one pass, with sparse gradients of both tables.

Each word of a text predicts by its neighbours within its reach. They are taken one by one (skip-gram), or as their mean
(continuous bag of words). What they predict is a list of rows of the output table, each with the label 1 or 0: the word
itself and words of noise (negative sampling), or the nodes on the word's way in a tree (hierarchical softmax):

    loss = -sum of log sigmoid(x . o) with the label 1, and of log sigmoid(-x . o) with the label 0

    B  samples    W  words of a sample    N  outputs of a word    V  rows of a table    D  its width
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from superstep.kernels.rows import table_rows

MOST_REACH, MOST_OUTPUTS, MOST_WIDTH = 16, 64, 320
LANES = 16
"""Numbers of a register; the kernel pads its sums to whole ones."""


def word_pairs(
    words_BW: Tensor, reach_BW: Tensor, outputs_BWN: Tensor, inputs_VD: Tensor, rows_VD: Tensor, *, is_bag: bool
) -> Tensor:
    """The loss of each sample, fp32 [B].

    Of a bag each word gets the gradient of the mean undivided, as in word2vec's own code.

    Args:
        words_BW: int32 rows of ``inputs_VD``; below 0 there is no word, and no window reaches over it.
        reach_BW: int32, how many words on each side count; at most 16.
        outputs_BWN: int32, twice the row of ``rows_VD`` plus the label; below 0 there is no output; at most 64.
        inputs_VD, rows_VD: the tables, fp32; their gradients are sparse.
        is_bag: a continuous bag of words, else skip-gram.
    """
    out: Tensor = _WordPairs.apply(words_BW, reach_BW, outputs_BWN, inputs_VD, rows_VD, is_bag)  # type: ignore[no-untyped-call]
    return out


class _WordPairs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        words: Tensor,
        reach: Tensor,
        outputs: Tensor,
        inputs: Tensor,
        rows: Tensor,
        is_bag: bool,
    ) -> Tensor:
        ctx.sizes, ctx.touched = (inputs.shape, rows.shape), None
        if inputs.is_meta or isinstance(inputs, FakeTensor):  # only shapes count
            return inputs.new_empty(len(words))
        compute = _by_kernel if _takes(outputs, inputs, rows) else reference
        losses, ctx.touched = compute(words, reach, outputs, inputs.detach(), rows.detach(), is_bag=is_bag)
        return losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        if ctx.touched is None:
            return None, None, None, *map(grad.new_zeros, ctx.sizes), None
        scale = float(grad[0])
        if not bool((grad == scale).all()):
            raise RuntimeError("word_pairs: the losses of samples have one weight; return them as they are")
        first, second = (
            torch.sparse_coo_tensor(at[None], sums.mul_(scale), size, is_coalesced=None, check_invariants=False)
            for (at, sums), size in zip(ctx.touched, ctx.sizes, strict=True)
        )
        return None, None, None, first, second, None


Touched = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Of each table the touched rows' numbers, int64 [U], and the sums of their gradients, [U, D]."""


def reference(
    words_BW: Tensor, reach_BW: Tensor, outputs_BWN: Tensor, inputs_VD: Tensor, rows_VD: Tensor, *, is_bag: bool
) -> tuple[Tensor, Touched]:
    """The same in plain torch, word by word."""
    into, onto = (torch.zeros_like(table, dtype=torch.float32) for table in (inputs_VD, rows_VD))
    losses = []
    for words, reach, outputs_WN in zip(words_BW.tolist(), reach_BW.tolist(), outputs_BWN, strict=True):
        loss = inputs_VD.new_zeros((), dtype=torch.float32)
        for at, word in enumerate(words):
            contexts = list_contexts(words, at, reach[at]) if word >= 0 else []
            outputs = outputs_WN[at][outputs_WN[at] >= 0].long()
            if not contexts or not len(outputs):
                continue
            around = torch.tensor(contexts)
            x, o, label = inputs_VD[around].float(), rows_VD[outputs // 2].float(), (outputs % 2).float()
            taken = x.mean(0, keepdim=True) if is_bag else x
            scores = taken @ o.t()
            loss = loss - torch.nn.functional.logsigmoid(scores * (2 * label - 1)).sum()
            error = scores.sigmoid() - label
            onto.index_add_(0, outputs // 2, error.t() @ taken)
            into.index_add_(0, around, (error @ o).expand(len(contexts), -1))
        losses.append(loss)
    touched = [(total != 0).any(1).nonzero().view(-1) for total in (into, onto)]
    return torch.stack(losses), ((touched[0], into[touched[0]]), (touched[1], onto[touched[1]]))


def list_contexts(words: list[int], at: int, reach: int) -> list[int]:
    """The words around one, up to the first that is none."""
    contexts = []
    for step in (-1, 1):
        for place in range(at + step, at + step * (reach + 1), step):
            if not 0 <= place < len(words) or words[place] < 0:
                break
            contexts.append(words[place])
    return contexts


def _takes(outputs: Tensor, *tables: Tensor) -> bool:
    """Whether the kernel computes with such tensors."""
    return (
        all(x.device.type == "cpu" and x.dtype == torch.float32 and x.is_contiguous() for x in tables)
        and outputs.shape[-1] <= MOST_OUTPUTS
        and tables[0].shape[1] <= MOST_WIDTH
        and table_rows.is_compiled()
    )


def _by_kernel(
    words: Tensor, reach: Tensor, outputs: Tensor, inputs: Tensor, rows: Tensor, *, is_bag: bool
) -> tuple[Tensor, Touched]:
    words, reach, outputs = (x.to(torch.int32).contiguous() for x in (words, reach, outputs))
    width, losses, counts = inputs.shape[1], torch.empty(len(words)), torch.zeros(2, dtype=torch.int64)
    rooms = min(len(inputs), words.numel()), min(len(rows), outputs.numel())
    made = [
        (torch.full((len(table),), -1, dtype=torch.int32), torch.empty(room, dtype=torch.int64),
         torch.empty(room, -(-width // LANES) * LANES))
        for table, room in zip((inputs, rows), rooms, strict=True)
    ]  # fmt: skip
    arguments = (
        *(int(is_bag), words, reach, outputs, *words.shape, outputs.shape[-1]),
        *(inputs, len(inputs), rows, len(rows), width, losses, *made[0], *made[1], counts),
    )
    table_rows.run("word_pairs", *arguments)
    first, second = (
        (at[:count], sums[:count, :width]) for (_, at, sums), count in zip(made, counts.tolist(), strict=True)
    )
    return losses, (first, second)
