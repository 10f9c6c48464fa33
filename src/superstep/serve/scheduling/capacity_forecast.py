"""Capacity forecast before the server starts: the simulator with a few kinds of requests."""

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
"""Prompt lengths of which the first token is forecast, as far as the context allows."""
STREAMS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Numbers of concurrent requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageCapacity:
    """Capacity of the KV cache.

    Attributes:
        context_tokens: of each request.
        streams: number of such requests that run at once.
    """

    context_tokens: int
    streams: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstPrompt:
    """A single prompt.

    Attributes:
        prompt_tokens: its length.
        first_token_s: until its first token.
        bounds: shares of this time by bottleneck, the largest first.
    """

    prompt_tokens: int
    first_token_s: float
    bounds: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConcurrentRequests:
    """Requests that arrive together.

    Attributes:
        streams: their number.
        tokens_per_s: of all answers, from the first prompt's arrival to the last token.
        first_token_s: the median.
        token_s: seconds between tokens of an answer, the median over answers of their means.
        preemptions: number of preemptions.
        bounds: as in ``FirstPrompt``.
    """

    streams: int
    tokens_per_s: float
    first_token_s: float
    token_s: float
    preemptions: int
    bounds: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSetup:
    """A draft model.

    Attributes:
        model: of a rank.
        rate: of its steps.
    """

    model: RankModelSize
    rate: ServingRate

    @property
    def weight_bytes(self) -> float:
        return weight_bytes(self.model, self.rate)

    def prefill_s(self, work: StepWork) -> float:
        """Seconds for the known rows of a step: the draft model computes all of them, too, and draws no token from
        them.
        """
        return seconds(self.rate, self.model, replace(work, wanted=0, drawn=0, chance=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSetup:
    """A server's configuration.

    Attributes:
        model: of a rank.
        rate: of its steps.
        pages: of the KV cache.
        page_tokens: positions of a page.
        budget: of a step.
        context_tokens: the most tokens of a prompt and its answer.
        small: the draft model; None without one.
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
        """Of a rank, without the draft model's."""
        return weight_bytes(self.model, self.rate)

    @property
    def page_bytes(self) -> int:
        """Of a rank's page, which holds keys of both models."""
        return self.page_tokens * (self.model.key_bytes + (0 if self.small is None else self.small.model.key_bytes))

    @property
    def key_bytes(self) -> int:
        """Of a rank, for all pages."""
        return self.pages * self.page_bytes

    def seconds(self, work: StepWork) -> float:
        """Seconds of a step with the draft model's known rows, without its draft tokens."""
        return seconds(self.rate, self.model, work) + (0.0 if self.small is None else self.small.prefill_s(work))

    def simulate(self, arrivals: Sequence[Arrival]) -> Simulated:
        """Simulate requests, from an empty KV cache."""
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
    """Bytes of a rank: linears in their format, the rest in the model's dtype."""
    return model.linears * rate.held_bytes + model.embedding * model.bytes


def rooms(server: ServerSetup) -> list[PageCapacity]:
    """Numbers of concurrent requests for some context lengths."""
    sizes = [size for size in (256, 1024, 4096, 16_384, 65_536) if size < server.context_tokens]
    return [
        PageCapacity(
            context_tokens=size, streams=min(server.budget.requests, server.pages // -(-size // server.page_tokens))
        )
        for size in (*sizes, server.context_tokens)
    ]


def firsts(server: ServerSetup) -> list[FirstPrompt]:
    """First-token times of single prompts."""
    times = []
    for prompt in [size for size in PROMPTS if size < server.context_tokens]:
        alone = server.simulate([Arrival(prompt_tokens=prompt, answer_tokens=1)])
        held = bounds(server.rate, server.model, alone.works)
        times.append(FirstPrompt(prompt_tokens=prompt, first_token_s=alone.served[0].first_token_s, bounds=held))
    return times


def crowds(
    server: ServerSetup, *, prompt_tokens: int, answer_tokens: int, replicas: int = 1
) -> list[ConcurrentRequests]:
    """Throughput of requests of one length that arrive together, divided among equal replicas."""
    arrival = Arrival(prompt_tokens=prompt_tokens, answer_tokens=answer_tokens)
    most = server.budget.requests * replicas
    return [_crowd(server, arrival, count, replicas) for count in STREAMS if count <= most]


def _crowd(server: ServerSetup, arrival: Arrival, count: int, replicas: int) -> ConcurrentRequests:
    # The replica with the most requests ends last.
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
