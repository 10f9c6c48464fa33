"""Graded groups as a global batch: several strands in a row, and the inputs of the loss for each drawn token.

    row of tokens    p p p a b c │ q q d e │ . .        p, q prompts; a to e drawn; . padding
    targets          - - a b c - │ - d e - │ - -
    advantages       0 0 x x x 0 │ 0 y y 0 │ 0 0
    starts           0 0 0 0 0 0 │ 6 6 6 6 │ 10 10

A strand lies in one row as a whole, and attention stays within it. Strands follow the order of their groups, and each
goes into the first row with room, so that a batch is a function of its groups alone.

Dims: B rows, S tokens of a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from superstep.data.batch import TOKENS, Batch
from superstep.errors import ConfigError, Fault
from superstep.numerics.loss import IGNORE
from superstep.tune.advantage import TokenShare
from superstep.tune.rl.rollout import Strand
from superstep.tune.rl.sampling import TaskGroup


@dataclass(frozen=True, slots=True)
class PlacedStrand:
    """A strand's place in a batch, and its answer."""

    row: int
    first: int
    strand: Strand
    group: int
    answer: int
    share: TokenShare

    @property
    def targets(self) -> Tensor:
        """Places in the row with drawn tokens as targets: each is one before its token."""
        return self.first + torch.tensor(self.strand.drawn) - 1


@dataclass(frozen=True, slots=True)
class PackedRollouts:
    """A batch, and the place of each strand in it."""

    batch: Batch
    placed: tuple[PlacedStrand, ...]

    def answers(self) -> tuple[Tensor, Tensor]:
        """The answer of each target, counted from 0 and -1 for none, int64 [B, S]; and the advantage of
        each: fp64 [N].
        """
        answer_BS = torch.full_like(self.batch.tokens_BS, -1)
        numbers: dict[tuple[int, int], int] = {}
        gains: list[float] = []
        for one in self.placed:
            if one.share.weight > 0:
                number = numbers.setdefault((one.group, one.answer), len(numbers))
                if number == len(gains):
                    gains.append(one.share.advantage)
                answer_BS[one.row, one.targets] = number
        return answer_BS, torch.tensor(gains, dtype=torch.float64)


def lessons_of(
    groups: Sequence[TaskGroup],
    shares: Sequence[Sequence[TokenShare | None] | None],
    *,
    divisor: float,
    multiple: int,
    tokens: int,
    is_masked: bool,
    keeps_all: bool = True,
) -> PackedRollouts:
    """The global batch of a step.

    Args:
        groups: of the step.
        shares: of each group's answers; None leaves out an answer, or a whole group.
        divisor: of the loss.
        multiple: the batch's rows are the smallest multiple of it that holds the strands.
        tokens: of a row.
        is_masked: whether a row may hold several separate strands.
        keeps_all: whether answers without a gradient are computed as well, for the metrics.

    Raises:
        ConfigError: a strand is longer than a row.
    """
    placed = tuple(_place(groups, shares, tokens=tokens, is_masked=is_masked, keeps_all=keeps_all))
    rows = multiple * max(1, math.ceil((1 + max((one.row for one in placed), default=0)) / multiple))
    tokens_BS = torch.zeros(rows, tokens, dtype=torch.int64)
    targets_BS = torch.full_like(tokens_BS, IGNORE)
    starts_BS = torch.zeros_like(tokens_BS)
    streams = {name: torch.zeros(rows, tokens) for name in ("weights", "advantages", "sampled")}
    ends = [0] * rows
    for one in placed:
        ids = torch.tensor(one.strand.tokens)
        end = one.first + len(ids) - 1
        tokens_BS[one.row, one.first : end] = ids[:-1]
        starts_BS[one.row, one.first : end] = one.first
        ends[one.row] = end
        at = one.targets
        targets_BS[one.row, at] = ids[at - one.first + 1]
        streams["advantages"][one.row, at] = one.share.advantage
        streams["weights"][one.row, at] = one.share.weight
        streams["sampled"][one.row, at] = torch.tensor(one.strand.logprobs)
    for row, end in enumerate(ends):
        starts_BS[row, end:] = end
    batch = Batch(
        fields={TOKENS: tokens_BS},
        targets_BS=targets_BS,
        valid_tokens=int((targets_BS != IGNORE).sum()),
        starts_BS=starts_BS if is_masked else None,
        streams=streams,
        divisor=divisor,
    )
    return PackedRollouts(batch, placed)


def _place(
    groups: Sequence[TaskGroup],
    shares: Sequence[Sequence[TokenShare | None] | None],
    *,
    tokens: int,
    is_masked: bool,
    keeps_all: bool,
) -> Iterator[PlacedStrand]:
    """Place each strand in the first row with room."""
    ends: list[int] = []
    for group, each in zip(groups, shares, strict=True):
        for number, (answer, share) in enumerate(zip(group.answers, each or (), strict=each is not None)):
            if share is None or not (keeps_all or share.advantage * share.weight):
                continue
            for strand in answer.strands:
                size = len(strand.tokens) - 1
                if size > tokens:
                    raise ConfigError(
                        f"data.sequence_tokens = {tokens} has no room for answer {number} to task {group.number}: with "
                        f"its prompt it has {size + 1}; set it higher, or rollout.max_tokens lower."
                    )
                row = next((r for r, end in enumerate(ends) if is_masked and end + size <= tokens), len(ends))
                ends += [0] * (row == len(ends))
                yield PlacedStrand(row, ends[row], strand, group.number, number, share)
                ends[row] += size


def require_same_bits(lessons: PackedRollouts, logprobs_BS: Tensor, version: int) -> None:
    """Check that the sampler's log-probabilities equal the trainer's, bit for bit.

    Args:
        lessons: of tokens that the current weights have sampled.
        logprobs_BS: the trainer's, fp32.
        version: of the weights.

    Raises:
        Fault: one differs; names the first token.
    """
    for one in lessons.placed:
        ours, theirs = logprobs_BS[one.row, one.targets], torch.tensor(one.strand.logprobs)
        wrong = (ours != theirs).nonzero()
        if len(wrong):
            nth = int(wrong[0])
            place = one.strand.drawn[nth]
            raise Fault(
                f"version {version}, task {one.group}, answer {one.answer}: token {place} (id "
                f"{one.strand.tokens[place]}) has log-probability {float(ours[nth])!r} in training, and the sampler "
                f"drew it with {float(theirs[nth])!r}. In exact mode they are the same bits; find out by superstep "
                "prove --serve what differs."
            )
