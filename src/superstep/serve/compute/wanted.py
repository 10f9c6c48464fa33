"""Results of a step's wanted rows, read together: the host waits once for a GPU, for the drawn tokens.

V  vocabulary      R  wanted rows
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor

from superstep.numerics.sending import send
from superstep.serve.compute.sampler import (
    Draw,
    LogitTotals,
    SampledToken,
    TotalsOf,
    columns,
    draw_changed,
    draw_rows,
    likeliest,
    read_changed,
    read_draws,
    read_likeliest,
    read_rows,
    read_totals,
    round_logprob,
)
from superstep.serve.scheduling.request import Sampling, TokenOutput


class LogitsRow(NamedTuple):
    """A row of logits and its statistics; the drawn token and the likeliest ones, if they were read with these."""

    logits: Tensor
    totals: LogitTotals
    drawn: SampledToken | None
    top: Sequence[Sequence[float]] | None = None


@dataclass(frozen=True, slots=True)
class RowDraws:
    """Draws of a step whose results are read together, by row.

    Attributes:
        plain: parameters and position, where only a temperature changes the logits: most draws of a busy engine.
        changed: draws of other requests; of a draft only the first row, on whose token the next one depends.
        tops: how many likeliest tokens to read, of rows that are not in ``changed``.
    """

    plain: Mapping[int, tuple[Sampling, int]]
    changed: Mapping[int, Draw]
    tops: Mapping[int, int]


def read_wanted(
    wanted: Sequence[int], draws: RowDraws, logits_RV: Tensor, totals: TotalsOf, *, vocab: int
) -> dict[int, LogitsRow]:
    """Results of each wanted row, by number.

    Args:
        wanted: their numbers.
        draws: of some of them.
        logits_RV: fp32.
        totals: of rows, with the bits of the served mode.
        vocab: columns; columns after them are padding for ranks or cells, and cannot be drawn.
    """
    if not wanted:
        return {}
    rows_V = dict(zip(wanted, logits_RV[:, :vocab], strict=True))
    ways = list(draws.plain.values())
    parts = [totals(logits_RV)]
    for row, one in draws.changed.items():
        parts += draw_changed(rows_V[row], one)
    parts += [likeliest(rows_V[row], count) for row, count in draws.tops.items()]
    if ways:
        parts += draw_rows(_rows_of(logits_RV, wanted, list(draws.plain)), ways, totals)
    rows, *read = read_rows(*parts)
    rest = iter(read)
    changed = {row: read_changed(next(rest), next(rest)) for row in draws.changed}
    tops = {row: next(rest) for row in draws.tops}
    drawn = dict(zip(draws.plain, read_draws(list(rest), ways), strict=True)) if ways else {}
    return {
        row: LogitsRow(logits_V, each, *changed.get(row, (drawn.get(row), tops.get(row))))
        for (row, logits_V), each in zip(rows_V.items(), read_totals(rows), strict=True)
    }


def _rows_of(logits_RV: Tensor, wanted: Sequence[int], some: Sequence[int]) -> Tensor:
    """The logits of some of the wanted rows, by their numbers; no copy where these are all."""
    if some == list(wanted):
        return logits_RV
    place = {row: at for at, row in enumerate(wanted)}
    return logits_RV[send(torch.tensor([place[row] for row in some]), logits_RV.device)]


def read_known(rows: Sequence[LogitsRow], tokens: Sequence[int], *, top: int, version: str) -> tuple[TokenOutput, ...]:
    """What rows say of tokens that are known, read at once.

    Args:
        rows: of a prompt.
        tokens: of each row the one that follows.
        top: likeliest tokens to give of each row.
        version: of the weights.
    """
    if not rows:
        return ()
    known_R = torch.stack([row.logits[token] for row, token in zip(rows, tokens, strict=True)])
    known, *tops = read_rows(columns(known_R), *(likeliest(row.logits, top) for row in rows if top))
    return tuple(
        TokenOutput(
            token=token,
            logprob=round_logprob(logit, row.totals),
            top=read_likeliest(its_top, row.totals),
            version=version,
        )
        for row, token, (logit,), its_top in zip(rows, tokens, known, tops or repeat(()), strict=False)
    )
