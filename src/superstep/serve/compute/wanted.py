"""Results of a step's wanted rows, read together: the host waits once for a GPU, for the drawn tokens.

V  vocabulary      R  wanted rows
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor

from superstep.numerics.sending import send
from superstep.serve.compute.sampler import (
    LogitTotals,
    SampledToken,
    TotalsOf,
    columns,
    draw_rows,
    likeliest,
    read_draws,
    read_likeliest,
    read_rows,
    read_totals,
    round_logprob,
)
from superstep.serve.scheduling.request import Sampling, TokenOutput


class LogitsRow(NamedTuple):
    """A row of logits, its statistics, and the token drawn from it in the batched draw, if any."""

    logits: Tensor
    totals: LogitTotals
    drawn: SampledToken | None


def read_wanted(
    wanted: Sequence[int],
    samplings: Mapping[int, tuple[Sampling, int]],
    logits_RV: Tensor,
    totals: TotalsOf,
    *,
    vocab: int,
) -> dict[int, LogitsRow]:
    """Results of each wanted row, by number.

    Args:
        wanted: their numbers.
        samplings: of rows for the batched draw: the parameters, and the position of the token.
        logits_RV: fp32.
        totals: of rows, with the bits of the served mode.
        vocab: columns; columns after them are padding for ranks or cells, and cannot be drawn.
    """
    if not wanted:
        return {}
    totals_R3, ways = totals(logits_RV), list(samplings.values())
    drawn: dict[int, SampledToken] = {}
    if samplings:
        place = {row: at for at, row in enumerate(wanted)}
        at_D = send(torch.tensor([place[row] for row in samplings]), logits_RV.device)
        rows, *draws = read_rows(totals_R3, *draw_rows(logits_RV[at_D], ways, totals))
        drawn = dict(zip(samplings, read_draws(draws, ways), strict=True))
    else:
        (rows,) = read_rows(totals_R3)
    known = zip(wanted, logits_RV[:, :vocab], read_totals(rows), strict=True)
    return {row: LogitsRow(logits_V, each, drawn.get(row)) for row, logits_V, each in known}


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
