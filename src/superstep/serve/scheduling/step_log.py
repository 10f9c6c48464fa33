"""The step log: one line for each engine step, written by the server; a replay is checked, drawn and priced.

    {"model": {...}, "page_tokens": 16, "pages": 512, "tokens": 512, "requests": 64, "way": {...}}
    {"at": 0.01, "took": 0.02, "version": "", "chunks": [[7, 0, 256, 0, 300, 0, [0, 1, ...]]], "frees": [], "left": []}

A chunk is request, first position, positions, shared pages, tokens known before, marks, and the new pages of its block
table. ``left`` names requests that have ended since the line before.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from superstep.cost.fit_serving import MeasuredStep
from superstep.cost.serve import AttentionGroup, ComputeMode, RankModelSize, StepWork
from superstep.errors import StateError
from superstep.serve.scheduling.request_state import LiveRequest
from superstep.serve.scheduling.step import Budget, InvalidStep, PositionRange, ScheduledStep, check

CHANCE, WHOLE = 1, 2
"""Marks: the request samples; the logits of all its rows are wanted."""


@dataclass(frozen=True, slots=True)
class RequestFact:
    """Facts of a request that its chunk does not show.

    Attributes:
        known: tokens before the step.
        marks: ``CHANCE`` and ``WHOLE``, added.
    """

    known: int
    marks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEntry:
    """A step that was computed.

    Attributes:
        at_s: its start, in seconds after the first step.
        took_s: from its start until its tokens were drawn.
        step: the scheduled step.
        facts: of each request with a chunk.
        left: requests that have ended since the step before.
    """

    at_s: float
    took_s: float
    step: ScheduledStep
    facts: Mapping[int, RequestFact]
    left: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings:
    """Settings that all steps of a log share.

    Attributes:
        model: the part of a rank.
        page_tokens: positions of a page.
        pages: their number.
        budget: of a step.
        way: how steps were computed.
    """

    model: RankModelSize
    page_tokens: int
    pages: int
    budget: Budget
    way: ComputeMode


class StepRecorder:
    """Makes a ``StepEntry`` of each step of an engine; it is the engine's ``Watch``.

    Args:
        tell: receives each entry.
        clock: seconds.
    """

    def __init__(self, tell: Callable[[StepEntry], None], clock: Callable[[], float] = time.perf_counter) -> None:
        self._tell, self._clock = tell, clock
        self._held: set[int] = set()
        self._first_s: float | None = None
        self._began_s = 0.0
        self._now: tuple[ScheduledStep, dict[int, RequestFact], tuple[int, ...]] | None = None

    def start(self) -> None:
        self._began_s = self._clock()

    def begin(self, step: ScheduledStep, live: Mapping[int, LiveRequest]) -> None:
        """Record the state before a step."""
        left = tuple(sorted(self._held - live.keys()))
        self._held = (self._held & live.keys()) - set(step.frees) | {chunk.request for chunk in step.chunks}
        self._now = step, {chunk.request: fact_of(live[chunk.request]) for chunk in step.chunks}, left

    def end(self) -> None:
        """Report the step."""
        assert self._now is not None
        took_s = self._clock() - self._began_s
        if self._first_s is None:
            self._first_s = self._began_s
        step, facts, left = self._now
        self._tell(StepEntry(at_s=self._began_s - self._first_s, took_s=took_s, step=step, facts=facts, left=left))


class LogFile:
    """A ``Watch`` that writes a log.

    Args:
        path: of the file; if it exists, as after a restart, a number is added to its name.
        setting: of all steps.
    """

    def __init__(self, path: Path, setting: LogSettings) -> None:
        number, self.path = 0, path
        while self.path.exists():
            number += 1
            self.path = path.with_name(f"{path.name}.{number}")
        self._stream = self.path.open("w", encoding="utf-8")
        self._lines = StepLines()
        self._stream.write(header(setting) + "\n")
        self._stream.flush()
        self._recorder = StepRecorder(self._write)
        self.start, self.begin, self.end = self._recorder.start, self._recorder.begin, self._recorder.end

    def _write(self, entry: StepEntry) -> None:
        self._stream.write(self._lines.line(entry) + "\n")
        self._stream.flush()


def fact_of(live: LiveRequest) -> RequestFact:
    """Facts of a request before a step."""
    sampling = live.request.sampling
    is_whole = sampling.prompt_logprobs and not live.drawn
    is_chance = not (sampling.is_plain and sampling.is_greedy)
    return RequestFact(live.known, CHANCE * is_chance + WHOLE * is_whole)


def work_of(entry: StepEntry, way: ComputeMode, window: int | None = None) -> StepWork:
    """A step's work for the cost model.

    Args:
        entry: the step.
        way: how it is computed.
        window: number of tokens that a row attends to; None for all.
    """
    wanted = drawn = chance = paged = powers = 0
    groups: dict[tuple[int, int, int | None], AttentionGroup] = {}
    for number, chunk in enumerate(entry.step.chunks):
        fact = entry.facts[chunk.request]
        drawing = max(0, chunk.end - fact.known + 1)
        wanted += chunk.count if fact.marks & WHOLE else drawing
        drawn += drawing
        chance += drawing if fact.marks & CHANCE else 0
        if way.is_exact:
            powers += sum(_whole(place + 1, way.block_keys) for place in range(chunk.first, chunk.end))
        if chunk.count == 1 and way.is_paged:
            paged += min(chunk.end, window or chunk.end)
            continue
        blocks = -(-chunk.end // way.block_keys)
        is_alone = chunk.count > 1
        kind = (chunk.count, blocks, number if is_alone else None)
        # With paged attention, rows attend to the keys up to their own: half of the chunk's on average.
        key_count = chunk.first + (chunk.count + 1) // 2 if way.is_paged else blocks * way.block_keys
        keys = min(key_count, window) if way.is_paged and window else key_count
        texts = groups[kind].texts + 1 if kind in groups else 1
        groups[kind] = AttentionGroup(texts=texts, rows=chunk.count, keys=keys)
    return StepWork(
        rows=entry.step.tokens,
        requests=len(entry.step.chunks),
        wanted=wanted,
        drawn=drawn,
        chance=chance,
        paged_keys=paged,
        powers=powers,
        groups=tuple(groups.values()),
    )


def _whole(keys: int, block: int) -> int:
    return -(-keys // block) * block


def samples(setting: LogSettings, entries: Iterable[StepEntry]) -> list[MeasuredStep]:
    """Measured seconds of a log's steps."""
    model = setting.model
    return [MeasuredStep(model, work_of(entry, setting.way, model.window), entry.took_s) for entry in entries]


def header(setting: LogSettings) -> str:
    """The first line of a log."""
    settings = {
        "model": asdict(setting.model),
        "page_tokens": setting.page_tokens,
        "pages": setting.pages,
        "tokens": setting.budget.tokens,
        "requests": setting.budget.requests,
        "way": asdict(setting.way),
    }
    return json.dumps(settings)


class StepLines:
    """Encodes steps as lines; it keeps the length of each block table, as a line has only the new pages."""

    def __init__(self) -> None:
        self._pages: dict[int, int] = {}

    def line(self, entry: StepEntry) -> str:
        for request in (*entry.left, *entry.step.frees):
            self._pages.pop(request, None)
        chunks: list[list[Any]] = []
        for chunk in entry.step.chunks:
            fact, held = entry.facts[chunk.request], self._pages.get(chunk.request, 0)
            new = list(chunk.pages[held:])
            chunks.append([chunk.request, chunk.first, chunk.count, chunk.shared, fact.known, fact.marks, new])
            self._pages[chunk.request] = len(chunk.pages)
        entry_line = {
            "at": round(entry.at_s, 6),
            "took": round(entry.took_s, 6),
            "version": entry.step.version,
            "chunks": chunks,
            "frees": entry.step.frees,
            "left": entry.left,
        }
        return json.dumps(entry_line, separators=(",", ":"))


@dataclass(slots=True)
class LoggedRequest:
    """A request of a log, as ``check`` reads it."""

    id: int
    known: int = 0
    computed: int = 0
    pages: tuple[int, ...] = ()
    drafts: int = 0
    guessed: int = 0
    """Of the last positions, those with draft tokens that may be rejected."""


@dataclass(slots=True)
class Replay:
    """A log; every step was checked.

    Attributes:
        setting: of all steps.
        entries: the steps.
        used_pages: after each step.
    """

    setting: LogSettings
    entries: list[StepEntry] = field(default_factory=list)
    used_pages: list[int] = field(default_factory=list)
    tables: dict[int, LoggedRequest] = field(default_factory=dict)

    def add(self, line: Mapping[str, Any]) -> None:
        """Decode and check the step of a line.

        Raises:
            InvalidStep: it breaks a rule.
        """
        for request in line["left"]:
            self.tables.pop(request, None)
        facts, chunks = {}, []
        for request, first, count, shared, known, marks, new in line["chunks"]:
            table = self.tables.setdefault(request, LoggedRequest(request))
            chunk = PositionRange(request=request, first=first, count=count, pages=(*table.pages, *new), shared=shared)
            if table.guessed and table.computed - table.guessed <= first <= table.computed:
                table.computed = first  # later draft tokens were rejected
            table.known, table.drafts, table.guessed = known, max(0, chunk.end - known), max(0, chunk.end - known)
            facts[request] = RequestFact(known, marks)
            chunks.append(chunk)
        step = ScheduledStep(chunks=tuple(chunks), frees=tuple(line["frees"]), version=line["version"])
        page_tokens, budget = self.setting.page_tokens, self.setting.budget
        check(step, self.tables, budget, page_tokens=page_tokens, version=step.version)
        for request in step.frees:
            del self.tables[request]
        for chunk in chunks:
            self.tables[chunk.request].computed, self.tables[chunk.request].pages = chunk.end, chunk.pages
        self.used_pages.append(len({page for table in self.tables.values() for page in table.pages}))
        left = tuple(line["left"])
        self.entries.append(StepEntry(at_s=line["at"], took_s=line["took"], step=step, facts=facts, left=left))


def is_log(path: Path) -> bool:
    """Whether a file begins like a log."""
    try:
        with path.open(encoding="utf-8") as stream:
            return '"page_tokens"' in stream.readline(4096)
    except (OSError, UnicodeDecodeError):
        return False


def read_log(path: Path) -> Replay:
    """The steps of a log, each one checked. An incomplete last line is skipped: the server may be writing it.

    Raises:
        StateError: it is no log, or a step breaks a rule; the message names the line.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    number = 1
    try:
        replay = Replay(_setting(json.loads(lines[0])))
        for number, line in enumerate(lines[1:], 2):
            try:
                raw = json.loads(line)
            except ValueError:
                if number == len(lines):
                    break
                raise
            replay.add(raw)
    except InvalidStep as error:
        raise StateError(f"{path}, line {number}: {error}") from error
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise StateError(
            f"{path}, line {number} is no engine step ({error}); name a file of --serve.replay."
        ) from error
    return replay


def _setting(raw: Mapping[str, Any]) -> LogSettings:
    return LogSettings(
        model=RankModelSize(**raw["model"]),
        page_tokens=raw["page_tokens"],
        pages=raw["pages"],
        budget=Budget(tokens=raw["tokens"], requests=raw["requests"]),
        way=ComputeMode(**raw["way"]),
    )


def prompt_rows(entry: StepEntry) -> Sequence[int]:
    """For each chunk, the number of rows with a known next token."""
    return [max(0, min(c.count, entry.facts[c.request].known - 1 - c.first)) for c in entry.step.chunks]
