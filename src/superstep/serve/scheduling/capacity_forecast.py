"""What a server will be able to do, before it starts: the simulator on requests of a few kinds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from superstep.cost.serve import RankModelSize, StepWork, bounds, seconds, way_of
from superstep.hardware.serving_rate import ServingRate
from superstep.serve.scheduling.kv_pages import Pages
from superstep.serve.scheduling.simulate import Arrival, Simulated, simulate
from superstep.serve.scheduling.step import Budget

PROMPTS = (32, 128, 512, 2048, 8192, 32_768)
"""Lengths of prompts whose first token is foreseen, as far as a context has room."""
STREAMS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Requests at once, as many as run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageCapacity:
    """What the pages have room for.

    Attributes:
        context_tokens: of each of so many.
        streams: prompts and answers of this length that run at once.
    """

    context_tokens: int
    streams: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstPrompt:
    """A prompt that comes alone.

    Attributes:
        prompt_tokens: its length.
        first_token_s: until its first token.
        bounds: shares of this time, by what holds it back, the largest first.
    """

    prompt_tokens: int
    first_token_s: float
    bounds: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConcurrentRequests:
    """Requests that come at once.

    Attributes:
        streams: how many.
        tokens_per_s: of all answers, from the first prompt's arrival to the last token.
        first_token_s: the median.
        token_s: from one token of an answer to the next, the median over answers of their means.
        preemptions: times that one lost its pages to others.
        bounds: as of ``FirstPrompt``.
    """

    streams: int
    tokens_per_s: float
    first_token_s: float
    token_s: float
    preemptions: int
    bounds: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSetup:
    """A model that guesses for the served one.

    Attributes:
        model: of a rank.
        rate: what its steps take.
    """

    model: RankModelSize
    rate: ServingRate

    @property
    def weight_bytes(self) -> float:
        """Of a rank."""
        return weight_bytes(self.model, self.rate)

    def prefill_s(self, work: StepWork) -> float:
        """For the rows of a step whose tokens are known: it computes all of them, too, and draws nothing of them."""
        return seconds(self.rate, self.model, replace(work, wanted=0, drawn=0, chance=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSetup:
    """What is asked about.

    Attributes:
        model: of a rank.
        rate: what its steps take.
        pages: of keys.
        page_tokens: positions of one.
        budget: of a step.
        context_tokens: the most tokens of a prompt and its answer.
        small: a model that guesses; None where there is none.
    """

    model: RankModelSize
    rate: ServingRate
    pages: int
    page_tokens: int
    budget: Budget
    context_tokens: int
    small: DraftSetup | None = None

    @property
    def weight_bytes(self) -> float:
        """Of a rank, without those of the model that guesses."""
        return weight_bytes(self.model, self.rate)

    @property
    def page_bytes(self) -> int:
        """Of a rank, for one page: keys of both models lie in it."""
        return self.page_tokens * (self.model.key_bytes + (0 if self.small is None else self.small.model.key_bytes))

    @property
    def key_bytes(self) -> int:
        """Of a rank, for all pages."""
        return self.pages * self.page_bytes

    def seconds(self, work: StepWork) -> float:
        """Of a step, the rows of the model that guesses among them; but not what it guesses."""
        return seconds(self.rate, self.model, work) + (0.0 if self.small is None else self.small.prefill_s(work))

    def simulate(self, arrivals: Sequence[Arrival]) -> Simulated:
        """Answer requests, beginning with empty pages."""
        return simulate(
            arrivals,
            self.seconds,
            pages=Pages(self.pages, self.page_tokens),
            budget=self.budget,
            way=way_of(self.rate),
            context_tokens=self.context_tokens,
            window=self.model.window,
        )


def weight_bytes(model: RankModelSize, rate: ServingRate) -> float:
    """Of a rank: linears as they are held, and the rest in the model's numbers."""
    return model.linears * rate.held_bytes + model.embedding * model.bytes


def rooms(server: ServerSetup) -> list[PageCapacity]:
    """Streams of some contexts."""
    sizes = [size for size in (256, 1024, 4096, 16_384, 65_536) if size < server.context_tokens]
    return [
        PageCapacity(
            context_tokens=size, streams=min(server.budget.requests, server.pages // -(-size // server.page_tokens))
        )
        for size in (*sizes, server.context_tokens)
    ]


def firsts(server: ServerSetup) -> list[FirstPrompt]:
    """Prompts that come alone."""
    times = []
    for prompt in [size for size in PROMPTS if size < server.context_tokens]:
        alone = server.simulate([Arrival(prompt_tokens=prompt, answer_tokens=1)])
        held = bounds(server.rate, server.model, alone.works)
        times.append(FirstPrompt(prompt_tokens=prompt, first_token_s=alone.served[0].first_token_s, bounds=held))
    return times


def crowds(
    server: ServerSetup, *, prompt_tokens: int, answer_tokens: int, replicas: int = 1
) -> list[ConcurrentRequests]:
    """Requests of one length that come at once, shared out among equal servers."""
    arrival = Arrival(prompt_tokens=prompt_tokens, answer_tokens=answer_tokens)
    most = server.budget.requests * replicas
    return [_crowd(server, arrival, count, replicas) for count in STREAMS if count <= most]


def _crowd(server: ServerSetup, arrival: Arrival, count: int, replicas: int) -> ConcurrentRequests:
    # The replica with the most of them ends last.
    share = -(-count // replicas)
    served = server.simulate([arrival] * share)
    tokens = count * arrival.answer_tokens
    between = [(one.last_s - one.first_s) / max(1, one.tokens - 1) for one in served.served]
    return ConcurrentRequests(
        streams=count,
        tokens_per_s=tokens / served.seconds,
        first_token_s=median(one.first_token_s for one in served.served),
        token_s=median(between),
        preemptions=served.preemptions,
        bounds=bounds(server.rate, server.model, served.works),
    )
