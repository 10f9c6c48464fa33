"""ServeMetrics: metrics for Prometheus, under vLLM's names where the meaning is the same.

Dashboards and autoscalers look for whole names: ``vllm:num_requests_waiting`` under another prefix would not be found.
So a metric with the same meaning has vLLM's name, prefix and labels; this server's own begin with ``superstep:``. The
registry belongs to the server: two servers in one process do not collide.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from superstep.http.drain import Drain
from superstep.serve.api.backend import Backend

FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
BETWEEN_TOKENS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
WHOLE_ANSWER_S = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 240.0, 480.0, 960.0)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000)


class ServeMetrics:
    """Counters of answers, and the engine's numbers at each scrape."""

    def __init__(self, backend: Backend, drain: Drain) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineNumbers(backend, drain))
        self._model = backend.info.name

        def histogram(name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
            histogram = Histogram(name, about, ["model_name"], registry=self.registry, buckets=buckets)
            return histogram.labels(self._model)

        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(name, about, ["model_name", *labels], registry=self.registry)

        self.prompt_tokens = counter("vllm:prompt_tokens", "Tokens of prompts.").labels(self._model)
        self.finished = counter("vllm:request_success", "Answers, by why they ended.", "finished_reason")
        self.refused = counter("superstep:requests_refused", "Requests that were not answered.", "status")
        self.first_token_s = histogram(
            "vllm:time_to_first_token_seconds", "From a request to its first token.", FIRST_TOKEN_S
        )
        self.tokens = Tally(self._model)
        self.registry.register(self.tokens)
        self.whole_s = histogram("vllm:e2e_request_latency_seconds", "From a request to its end.", WHOLE_ANSWER_S)
        self.prompt_sizes = histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", TOKENS)
        self.answer_sizes = histogram("vllm:request_generation_tokens", "Tokens of an answer.", TOKENS)

    def watch(self, prompt_tokens: int) -> AnswerMetrics:
        return AnswerMetrics(self, prompt_tokens)

    def end(self, reason: str) -> None:
        """Count an answer that ended for this reason."""
        self.finished.labels(self._model, reason).inc()

    def refuse(self, status: int) -> None:
        """Count a refused request."""
        self.refused.labels(self._model, str(status)).inc()


class AnswerMetrics:
    """Times, tokens and end of one answer. Ending early means that it was aborted."""

    def __init__(self, metrics: ServeMetrics, prompt_tokens: int) -> None:
        self._metrics = metrics
        self._began = self._last = time.monotonic()
        self._tokens = 0
        metrics.prompt_tokens.inc(prompt_tokens)
        metrics.prompt_sizes.observe(prompt_tokens)

    def drew(self, tokens: int) -> None:
        """Count tokens that came together, as if they had come evenly."""
        if not tokens:
            return
        now = time.monotonic()
        if not self._tokens:
            self._metrics.first_token_s.observe(now - self._began)
        self._metrics.tokens.add(tokens, (now - self._last) / tokens if self._tokens else None)
        self._last, self._tokens = now, self._tokens + tokens

    def end(self, reason: str) -> float:
        """End the answer; returns its seconds."""
        seconds = time.monotonic() - self._began
        self._metrics.whole_s.observe(seconds)
        self._metrics.answer_sizes.observe(self._tokens)
        self._metrics.end(reason)
        return seconds


class Tally(Collector):
    """Counters for every token. Only the event loop counts and reads, so there are no locks, which are most of the cost
    of a library counter.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._drawn = 0
        self._between = [0] * (len(BETWEEN_TOKENS_S) + 1)
        self._seconds = 0.0

    def add(self, tokens: int, between_s: float | None) -> None:
        """Count tokens, each ``between_s`` after the one before; None for the first."""
        self._drawn += tokens
        if between_s is not None:
            self._between[bisect_left(BETWEEN_TOKENS_S, between_s)] += tokens
            self._seconds += between_s * tokens

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        """The counters now."""
        drawn = CounterMetricFamily("vllm:generation_tokens", "Tokens drawn.", labels=["model_name"])
        drawn.add_metric([self._model], self._drawn)
        yield drawn
        between = HistogramMetricFamily(
            "vllm:inter_token_latency_seconds", "From one token of an answer to the next.", labels=["model_name"]
        )
        bounds = [*map(str, BETWEEN_TOKENS_S), "+Inf"]
        counts = zip(bounds, accumulate(self._between), strict=True)
        between.add_metric([self._model], buckets=[(bound, count) for bound, count in counts], sum_value=self._seconds)
        yield between


class EngineNumbers(Collector):
    """Reads the engine's numbers at each scrape."""

    def __init__(self, backend: Backend, drain: Drain) -> None:
        self._backend, self._drain = backend, drain

    def describe(self) -> list[Metric]:
        """Nothing: registering must not call an engine that may still be starting."""
        return []

    def collect(self) -> Iterator[Metric]:
        is_ready = self._backend.health().is_ready and not self._drain.is_begun
        now, labels = self._backend.counters(), [self._backend.info.name]
        used = now.used_pages / now.pages if now.pages else 0.0
        for gauge, about, value in (
            ("vllm:num_requests_running", "Requests that are computed.", now.running),
            ("vllm:num_requests_waiting", "Requests that wait for room.", now.waiting),
            ("vllm:kv_cache_usage_perc", "Pages in use, as a share of 1.", used),
            ("superstep:ready", "Whether requests are answered.", int(is_ready)),
        ):
            one = GaugeMetricFamily(gauge, about, labels=["model_name"])
            one.add_metric(labels, value)
            yield one
        for counter, about, total in (
            ("vllm:num_preemptions", "Times that a request lost its pages.", now.preemptions),
            ("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.", now.prefix_queried_tokens),
            ("vllm:prefix_cache_hits", "Tokens found in the prefix cache.", now.prefix_hit_tokens),
            ("vllm:spec_decode_num_drafts", "Times that tokens were guessed for a request.", now.drafts),
            ("vllm:spec_decode_num_draft_tokens", "Tokens that were guessed.", now.drafted_tokens),
            ("vllm:spec_decode_num_accepted_tokens", "Guessed tokens that stood.", now.accepted_tokens),
        ):
            many = CounterMetricFamily(counter, about, labels=["model_name"])
            many.add_metric(labels, total)
            yield many
