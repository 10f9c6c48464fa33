"""Forecast of speculative decoding before the server starts: its cost, and how many tokens must be accepted to pay.

    one step for each token        large: 1 row of each request
    a step that verifies a draft   small: 1 row for each draft token in turn; large: one row more for each of them

The acceptance rate depends on the texts and is not known in advance, so both extremes are reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from superstep.cost.serve import ComputeMode, StepWork, seconds, way_of
from superstep.serve.scheduling.capacity_forecast import STREAMS, ServerSetup
from superstep.serve.scheduling.step import PositionRange, ScheduledStep
from superstep.serve.scheduling.step_log import RequestFact, StepEntry, work_of


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftForecast:
    """Requests that all draft in one step.

    Attributes:
        streams: number of running requests.
        tokens: draft tokens of each; a step may have room for fewer than configured.
        plain_s: a step for one token of each, without drafts.
        guess_s: seconds to draft; 0 for drafts from the text.
        step_s: the step that verifies them, if all are accepted.
        best_tokens_per_s: if all are accepted.
        pays_from: mean number of accepted tokens of a request from which answers come no later than without drafts.
    """

    streams: int
    tokens: int
    plain_s: float
    guess_s: float
    step_s: float
    best_tokens_per_s: float
    pays_from: float


def guesses(server: ServerSetup, *, draft_tokens: int, known: int, replicas: int = 1) -> list[DraftForecast]:
    """Forecasts for some numbers of requests.

    Args:
        server: the configuration.
        draft_tokens: the most draft tokens of a request.
        known: tokens of each request, in the middle of its answer.
        replicas: that share the requests.
    """
    counts = [count for count in STREAMS if count <= server.budget.requests * replicas]
    rounds = [(count, -(-count // replicas)) for count in counts]
    room = [(count, share, min(draft_tokens, server.budget.tokens // share - 1)) for count, share in rounds]
    return [_guess(server, count, share, tokens, known) for count, share, tokens in room if tokens > 0]


def _guess(server: ServerSetup, streams: int, share: int, tokens: int, known: int) -> DraftForecast:
    way, window = way_of(server.rate), server.model.window
    plain_s = seconds(server.rate, server.model, _work(share, 0, known, way, window))
    step_s = seconds(server.rate, server.model, _work(share, tokens, known, way, window))
    guess_s = 0.0
    if server.small is not None:
        rate, model = server.small.rate, server.small.model
        own = way_of(rate)
        guess_s = sum(
            seconds(rate, model, _work(share, 0, known + place, own, model.window)) for place in range(tokens)
        )
        # The last draft token is computed only where it ends a page.
        guess_s += _last_s(server, share, known + tokens) / server.page_tokens
    return DraftForecast(
        streams=streams,
        tokens=tokens,
        plain_s=plain_s,
        guess_s=guess_s,
        step_s=step_s,
        best_tokens_per_s=streams * (tokens + 1) / (step_s + guess_s),
        pays_from=(step_s + guess_s) / plain_s - 1,
    )


def _last_s(server: ServerSetup, share: int, known: int) -> float:
    assert server.small is not None
    rate, model = server.small.rate, server.small.model
    silent = replace(_work(share, 0, known, way_of(rate), model.window), wanted=0, drawn=0)
    return seconds(rate, model, silent)


def _work(requests: int, guessed: int, known: int, way: ComputeMode, window: int | None) -> StepWork:
    """A step for one token of each request, and ``guessed`` draft tokens of each."""
    chunks: Sequence[PositionRange] = [
        PositionRange(request=number, first=known - 1, count=1 + guessed, pages=()) for number in range(requests)
    ]
    facts = {number: RequestFact(known) for number in range(requests)}
    entry = StepEntry(at_s=0.0, took_s=0.0, step=ScheduledStep(chunks=tuple(chunks), frees=(), version=""), facts=facts)
    return work_of(entry, way, window)
