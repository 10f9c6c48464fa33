"""The engine: requests in, tokens out, a step at a time.

    add ──► waiting ──schedule──► Step ──check──► run ──draw──► Progress
               ▲                    │
               └──── preempted ─────┘

The loop is ``step``: ``serve.scheduling.scheduler`` decides what to compute, ``serve.compute`` computes it, and
``serve.compute.sampler`` draws; this file keeps the state of requests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from superstep.errors import ConfigError
from superstep.serve.compute.flat_batch import RequestRows, Rows
from superstep.serve.compute.sampler import Draw, SamplingContext, describe, draw
from superstep.serve.compute.wanted import LogitsRow, RowDraws, read_known, read_wanted
from superstep.serve.drafting.grammar_protocol import Matcher, Matchers
from superstep.serve.drafting.speculate import Speculation
from superstep.serve.scheduling.apply_step import book, book_computed
from superstep.serve.scheduling.kv_pages import Pages
from superstep.serve.scheduling.lora_registry import AdapterHolder, LoraRegistry
from superstep.serve.scheduling.request import (
    Counters,
    Finish,
    ModelInfo,
    Request,
    RequestUpdate,
    Sampling,
    TokenOutput,
    check_request,
)
from superstep.serve.scheduling.request_state import LiveRequest
from superstep.serve.scheduling.scheduler import schedule
from superstep.serve.scheduling.step import Budget, PositionRange, ScheduledStep, check


class StepModel(AdapterHolder, Protocol):
    """Computes steps."""

    def __call__(self, rows: Rows) -> Tensor:
        """The logits of the wanted rows, fp32: [R, V], or more columns of -inf after them."""

    def totals(self, logits_RV: Tensor) -> Tensor:
        """``LogitTotals`` of each row, on the logits' device: [R, 3], fp64."""

    def wait(self) -> None:
        """Signal that there is nothing to compute yet."""

    def end(self) -> None:
        """Signal the end."""


class StepObserver(Protocol):
    """Observes steps without changing anything."""

    def start(self) -> None:
        """A step is about to be scheduled."""

    def begin(self, step: ScheduledStep, live: Mapping[int, LiveRequest]) -> None:
        """A step, checked and not yet applied, and every request."""

    def end(self) -> None:
        """The step is computed, and its tokens are drawn."""


class NoObserver:
    """A ``StepObserver`` that does nothing."""

    def start(self) -> None: ...
    def begin(self, step: ScheduledStep, live: Mapping[int, LiveRequest]) -> None: ...
    def end(self) -> None: ...


class InferenceEngine:
    """Answers requests; one thread calls it.

    Args:
        model: computes steps.
        info: of the model.
        pages: of the KV cache.
        budget: limits of one step.
        matchers: makes the grammar of an answer; None without structured output.
        speculation: speculative decoding; None without it.
        watch: observes steps.
    """

    def __init__(
        self,
        model: StepModel,
        info: ModelInfo,
        pages: Pages,
        budget: Budget,
        matchers: Matchers | None = None,
        speculation: Speculation | None = None,
        watch: StepObserver | None = None,
    ) -> None:
        if pages.count * pages.page_tokens < info.context_tokens:
            raise ValueError(f"{pages.count} pages of {pages.page_tokens} do not hold {info.context_tokens} tokens.")
        self.info = info
        self.pages = pages
        self.adapters = LoraRegistry(model)
        self.model = model
        self._budget = budget
        self._matchers: Matchers = matchers or (lambda request: None)
        self.speculation = speculation or Speculation()
        self._watch = watch or NoObserver()
        self._running: list[LiveRequest] = []
        self._waiting: list[LiveRequest] = []
        self._matcher: dict[int, Matcher] = {}
        self._aborted: list[RequestUpdate] = []
        self._order = 0
        self._before: int | None = None
        self._preemptions = self._queried_tokens = self._hit_tokens = 0

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to compute: no request, or only held ones."""
        return not (self._aborted or self._free(self._running) or self._free(self._waiting))

    @property
    def is_held(self) -> bool:
        """Whether new requests are held."""
        return self._before is not None

    @property
    def arrivals(self) -> int:
        """Number of requests so far."""
        return self._order

    @property
    def counters(self) -> Counters:
        """The engine's counters."""
        return Counters(
            running=len(self._running),
            waiting=len(self._waiting),
            pages=self.pages.count,
            used_pages=self.pages.used,
            preemptions=self._preemptions,
            prefix_queried_tokens=self._queried_tokens,
            prefix_hit_tokens=self._hit_tokens,
            drafts=self.speculation.drafts,
            drafted_tokens=self.speculation.drafted_tokens,
            accepted_tokens=self.speculation.accepted_tokens,
        )

    def wait(self) -> None:
        """Call this regularly while there is nothing to do."""
        self.model.wait()

    def end(self) -> None:
        """Release the ranks that share the model. Nothing may be called afterwards."""
        self.model.end()

    def add(self, request: Request) -> None:
        """Add a request.

        Raises:
            ConfigError: it cannot be answered; the message says why.
        """
        check_request(request, vocab=self.info.vocab, context_tokens=self.info.context_tokens)
        matcher = self._matchers(request)
        adapter = self.adapters.begin(request.adapter)
        if matcher is not None:
            self._matcher[request.id] = matcher
        live = LiveRequest(
            request,
            order=self._order,
            page_tokens=self.pages.page_tokens,
            end_of_text=self.info.end_of_text,
            context_tokens=self.info.context_tokens,
            adapter=adapter,
        )
        self._order += 1
        self._waiting.append(live)
        self._waiting.sort(key=lambda one: one.urgency)

    def abort(self, request: int) -> None:
        """Abort a request; its pages are free at once. One that has ended is ignored."""
        for line in (self._running, self._waiting):
            for live in line:
                if live.id == request:
                    line.remove(live)
                    self._leave(live)
                    self._aborted.append(RequestUpdate(request=request, finish="abort"))
                    return

    def abort_all(self) -> None:
        for live in (*self._running, *self._waiting):
            self.abort(live.id)

    def hold(self, before: int | None) -> None:
        """From now on compute only the first ``before`` requests; None computes all."""
        self._before = before

    def has_before(self, before: int) -> bool:
        """Whether one of the first ``before`` requests is left."""
        return any(live.order < before for live in (*self._running, *self._waiting))

    def begin_again(self) -> None:
        """Preempt all running requests: they wait, and start again with their tokens."""
        self._take_back(list(self._running))

    def renew(self, version: str, *, keeps_keys: bool) -> None:
        """Note an update of the weights.

        Args:
            version: of the new weights.
            keeps_keys: whether running requests keep their keys, or compute all of them again.
        """
        if not keeps_keys:
            self.begin_again()
        for live in self._running:
            live.is_mixed = True
        self.info = replace(self.info, version=version)

    def step(self) -> list[RequestUpdate]:
        """Compute one step; updates of requests with progress. Empty where there is nothing to do."""
        self._watch.start()
        news, self._aborted = self._aborted, []
        live = {one.id: one for one in (*self._running, *self._waiting)}
        for one in self._waiting:
            one.began(self.info.version)
        running, waiting = self._free(self._running), self._free(self._waiting)
        self.speculation.offer(running, self._matcher)
        step = schedule(running, waiting, self.pages, self._budget, version=self.info.version)
        if not step.chunks:
            return news
        check(step, live, self._budget, page_tokens=self.pages.page_tokens, version=self.info.version)
        self._watch.begin(step, live)
        changed = book(step, live, self._running, self._waiting, self.pages)
        self._preemptions += changed.preemptions
        self._queried_tokens += changed.queried_tokens
        self._hit_tokens += changed.hit_tokens
        for number in step.frees:
            self.speculation.forget(number)
        self.speculation.guess(step, live, self._matcher)
        rows, wanted = _rows(step, live)
        logits_RV = self.model(rows)
        draws = self._rows_to_draw(step, live, wanted)
        outputs = read_wanted(rows.wanted, draws, logits_RV, self.model.totals, vocab=self.info.vocab)
        news += [
            self._update_request(live[chunk.request], chunk, wanted[chunk.request], outputs) for chunk in step.chunks
        ]
        self._watch.end()
        return news

    def _free(self, line: list[LiveRequest]) -> list[LiveRequest]:
        """The requests of a queue that are not held."""
        return line if self._before is None else [one for one in line if one.order < self._before]

    def _take_back(self, some: Sequence[LiveRequest]) -> None:
        """Preempt some running requests: they wait."""
        for one in some:
            self.pages.release(one.pages)
            one.restart()
            self.speculation.forget(one.id)
            self._running.remove(one)
            self._waiting.append(one)
        self._waiting.sort(key=lambda one: one.urgency)

    def _update_request(
        self,
        live: LiveRequest,
        chunk: PositionRange,
        wanted: Sequence[int],
        outputs: Mapping[int, LogitsRow],
    ) -> RequestUpdate:
        """Apply a request's computed positions, and draw its next tokens once all of its tokens are computed."""
        prompt, cached = self._of_prompt(live, chunk, wanted, outputs), live.cached_tokens
        if chunk.end < live.known:
            book_computed(live, chunk, self.pages, end=chunk.end, version=self.info.version)
            return RequestUpdate(request=live.id, prompt=prompt, cached_tokens=cached)
        # The last known token, and each draft token after it, has a row with the logits of the next token.
        drawn, finish = self.draw_rows(live, [outputs[row] for row in wanted[live.known - chunk.end - 1 :]])
        self.speculation.judge(live, [token.token for token in drawn])
        # The token drawn last has no key yet. A rejected draft token has one, which will be overwritten.
        book_computed(live, chunk, self.pages, end=live.known - bool(drawn), version=self.info.version)
        if finish is not None:
            self._running.remove(live)
            self._leave(live)
        return RequestUpdate(request=live.id, prompt=prompt, tokens=tuple(drawn), finish=finish, cached_tokens=cached)

    def draw_rows(self, live: LiveRequest, rows: Sequence[LogitsRow]) -> tuple[list[TokenOutput], Finish | None]:
        """The tokens drawn from consecutive rows, while each equals the draft; and the finish reason, if any."""
        drawn: list[TokenOutput] = []
        for row, guess in zip(rows, (*live.guessed, None), strict=True):
            token = self._draw(live, row)
            if token is None:
                return drawn, "abort"
            drawn.append(token)
            finish = self._take(live, token.token)
            if finish is not None or token.token != guess:
                return drawn, finish
        raise AssertionError("behind the last row nothing is guessed")

    def _take(self, live: LiveRequest, token: int) -> Finish | None:
        finish = live.take(token)
        matcher = self._matcher.get(live.id)
        if matcher is not None and finish is None:
            matcher.advance(token)
            finish = "stop" if matcher.is_done else None
        return finish

    def _rows_to_draw(
        self, step: ScheduledStep, live: Mapping[int, LiveRequest], wanted: Mapping[int, Sequence[int]]
    ) -> RowDraws:
        """The draws that do not depend on others of the step."""
        plain: dict[int, tuple[Sampling, int]] = {}
        changed: dict[int, Draw] = {}
        tops: dict[int, int] = {}
        for chunk in step.chunks:
            one, own = live[chunk.request], wanted[chunk.request]
            if chunk.end < one.known or not own:
                continue
            # The last known token has a row, and so has each draft token after it.
            how, rows = one.request.sampling, own if len(own) == 1 else own[one.known - chunk.end - 1 :]
            if not how.is_plain or one.id in self._matcher:
                if (draw := self._next_draw(one)) is not None:
                    changed[rows[0]] = draw
                continue
            if how.top_logprobs:
                tops.update(dict.fromkeys(rows, how.top_logprobs))
            if not how.is_greedy:
                for position, row in enumerate(rows, one.known):
                    plain[row] = how, position
        return RowDraws(plain, changed, tops)

    def _next_draw(self, live: LiveRequest) -> Draw | None:
        """The draw of a request's next token; None if a grammar became too costly."""
        matcher = self._matcher.get(live.id)
        try:
            allowed = None if matcher is None else matcher.compute_mask()
        except ConfigError:
            return None
        return Draw(live.request.sampling, SamplingContext(live.request.prompt, live.drawn, allowed), live.known)

    def _draw(self, live: LiveRequest, row: LogitsRow) -> TokenOutput | None:
        """The next token; None if the logits are not finite, or a grammar became too costly."""
        logits_V, totals, drawn, top = row
        if not (math.isfinite(totals.largest) and math.isfinite(totals.log_total)):
            return None
        version = live.adapter.version_with(self.info.version)
        if drawn is not None:
            return describe(drawn, top or (), totals, vocab=self.info.vocab, version=version)
        one = self._next_draw(live)
        return None if one is None else draw(logits_V, totals, one, top=top, version=version)

    def _of_prompt(
        self,
        live: LiveRequest,
        chunk: PositionRange,
        wanted: Sequence[int],
        outputs: Mapping[int, LogitsRow],
    ) -> tuple[TokenOutput, ...]:
        """Outputs of the prompt's tokens that follow the chunk's positions."""
        if not live.request.sampling.prompt_logprobs or live.drawn:
            return ()
        places = range(max(chunk.first, live.prompt_reported - 1), min(chunk.end, live.known - 1))
        if not places:
            return ()
        live.prompt_reported = places.stop + 1  # earlier ones are not reported again after a preemption
        rows = [outputs[wanted[place - chunk.first]] for place in places]
        version = live.adapter.version_with(self.info.version)
        tokens = [live.tokens[place + 1] for place in places]
        return read_known(rows, tokens, top=live.request.sampling.top_logprobs, version=version)

    def _leave(self, live: LiveRequest) -> None:
        self.pages.release(live.pages)
        live.restart()
        self.adapters.end(live.adapter)
        self._matcher.pop(live.id, None)
        self.speculation.forget(live.id)


def _rows(step: ScheduledStep, live: dict[int, LiveRequest]) -> tuple[Rows, dict[int, list[int]]]:
    """The rows of a step, and for each request the rows with wanted logits."""
    tokens: list[int] = []
    wanted: dict[int, list[int]] = {}
    # Rows of one adapter are neighbours, so that it adds to a slice of them.
    chunks = sorted(step.chunks, key=lambda chunk: live[chunk.request].adapter.number)
    for chunk in chunks:
        one = live[chunk.request]
        # Of the last known token and the draft tokens after it.
        last = max(0, chunk.end - one.known + 1)
        everything = one.request.sampling.prompt_logprobs and not one.drawn
        first = len(tokens)
        tokens += (*one.tokens[chunk.first : chunk.end], *one.guessed)
        wanted[one.id] = list(range(first if everything else len(tokens) - last, len(tokens)))
    parts = tuple(
        RequestRows(first=c.first, count=c.count, pages=c.pages, adapter=live[c.request].adapter.number) for c in chunks
    )
    return Rows(tokens=tuple(tokens), parts=parts, wanted=tuple(r for rows in wanted.values() for r in rows)), wanted
