"""The schedule: every step keeps the rules, every request gets on, and a broken step is refused."""

from dataclasses import dataclass, field, replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from superstep.serve.scheduling.kv_pages import Pages, page_keys
from superstep.serve.scheduling.scheduler import schedule
from superstep.serve.scheduling.step import Budget, InvalidStep, PositionRange, ScheduledStep, check

SIZE = 4


@dataclass
class Asked:
    """A request as the schedule sees it, whose answer has ``wanted`` tokens."""

    id: int
    tokens: list[int]
    wanted: int
    computed: int = 0
    pages: tuple[int, ...] = ()
    drafts: int = 0
    first_s: list[int] = field(default_factory=list)

    @property
    def known(self):
        return len(self.tokens)

    def page_keys(self):
        return page_keys(b"", self.tokens, SIZE)[: (self.known - 1) // SIZE]


class Server:
    """Applies steps as the engine does, without computing anything."""

    def __init__(self, pages, budget):
        self.pages, self.budget = Pages(pages, SIZE), budget
        self.running, self.waiting, self.done, self.steps = [], [], [], []

    def step(self):
        live = {one.id: one for one in (*self.running, *self.waiting)}
        step = schedule(self.running, self.waiting, self.pages, self.budget, version="v")
        check(step, live, self.budget, page_tokens=SIZE, version="v")
        for number in step.frees:
            one = live[number]
            self.pages.release(one.pages)
            one.pages, one.computed = (), 0
            self.running.remove(one)
            self.waiting.insert(0, one)
        for chunk in step.chunks:
            one = live[chunk.request]
            if one in self.waiting:
                self.waiting.remove(one)
                self.running.append(one)
                self.pages.share(chunk.pages[: chunk.shared])
                one.pages = chunk.pages[: chunk.shared]
        for chunk in step.chunks:
            one = live[chunk.request]
            self.pages.take(chunk.pages[len(one.pages) :])
            one.pages = chunk.pages
        for chunk in step.chunks:
            one = live[chunk.request]
            one.computed = chunk.end
            for page, key in zip(one.pages, page_keys(b"", one.tokens[: one.computed], SIZE), strict=False):
                self.pages.publish(page, key)
            if one.computed == one.known:
                one.tokens.append(7)
                one.wanted -= 1
                if one.wanted == 0:
                    self.pages.release(one.pages)
                    self.running.remove(one)
                    self.done.append(one)
        self.pages.check([one.pages for one in self.running])
        self.steps.append(step)
        return step


def asked(count, dice, longest=30):
    return [
        Asked(number, [dice.choice([1, 2])] * dice.randint(1, longest), dice.randint(1, 12)) for number in range(count)
    ]


@given(st.integers(0, 10_000), st.integers(12, 40), st.integers(1, 20), st.integers(1, 6))
@settings(max_examples=150)
def test_every_request_is_answered_whole(seed, pages, tokens, requests):
    """Whatever the memory and the budget: nobody is lost, nobody waits for ever, and the pages come back."""
    server = Server(pages, Budget(tokens=tokens, requests=requests))
    server.waiting = asked(8, Random(seed))
    work = sum(one.known + one.wanted for one in server.waiting)
    # Each step computes something; what is computed again after a request gave its pages back is bounded by the rest.
    for _ in range(20 * work):
        if len(server.done) == 8:
            break
        assert server.step().chunks
    assert len(server.done) == 8
    assert all(one.wanted == 0 for one in server.done)
    assert server.pages.used == 0


def test_running_requests_come_before_waiting_ones_and_share_the_budget():
    server = Server(40, Budget(tokens=10, requests=4))
    server.waiting = [Asked(0, [1] * 3, 9), Asked(1, [2] * 20, 2), Asked(2, [1, 2], 2)]
    chunks = [[(c.request, c.first, c.count) for c in server.step().chunks] for _ in range(4)]
    assert chunks == [
        [(0, 0, 3), (1, 0, 7)],
        [(0, 3, 1), (1, 7, 9)],
        [(0, 4, 1), (1, 16, 4), (2, 0, 2)],
        [(0, 5, 1), (1, 20, 1), (2, 2, 1)],
    ]


def test_a_prompt_that_was_served_is_found_but_for_its_last_page():
    server = Server(20, Budget(tokens=64, requests=4))
    server.waiting = [Asked(0, [1] * 12, 1)]
    server.step()
    server.waiting = [Asked(1, [1] * 12, 1)]
    (chunk,) = server.step().chunks
    assert (chunk.first, chunk.count, chunk.shared) == (8, 4, 2), "its last token is computed, to draw the next from"


def test_the_least_urgent_gives_its_pages_back():
    server = Server(6, Budget(tokens=64, requests=4))
    server.waiting = [Asked(0, [1] * 12, 12), Asked(1, [2] * 11, 4)]
    steps = [server.step() for _ in range(6)]
    assert [step.frees for step in steps if step.frees] == [(1,)]
    while len(server.done) < 2:
        server.step()
    assert [one.id for one in server.done] == [0, 1]


def test_drafts_are_computed_beside_the_known_token():
    server = Server(6, Budget(tokens=64, requests=4))
    server.running = [Asked(0, [1] * 6, 4, computed=5, pages=(0, 1), drafts=3)]
    server.pages.take([0, 1])
    step = schedule(server.running, [], server.pages, server.budget, version="v")
    assert [(c.first, c.count, len(c.pages)) for c in step.chunks] == [(5, 4, 3)]


@given(st.integers(0, 10_000), st.integers(12, 40), st.integers(1, 20), st.integers(1, 6))
@settings(max_examples=40)
def test_guesses_take_what_nobody_else_has_a_use_for(seed, pages, tokens, requests):
    """A step with guesses is the step without, but that some chunks are longer; and nobody loses pages for them."""
    dice = Random(seed)
    server = Server(pages, Budget(tokens=tokens, requests=requests))
    server.waiting = asked(8, dice)
    for _ in range(40):
        plain = schedule(server.running, server.waiting, server.pages, server.budget, version="v")
        for one in server.running:
            one.drafts = dice.randint(0, 6)
        guessing = schedule(server.running, server.waiting, server.pages, server.budget, version="v")
        live = {one.id: one for one in (*server.running, *server.waiting)}
        check(guessing, live, server.budget, page_tokens=SIZE, version="v")
        assert guessing.frees == plain.frees
        for less, more in zip(plain.chunks, guessing.chunks, strict=True):
            one = live[less.request]
            assert replace(more, count=less.count, pages=more.pages[: len(less.pages)]) == less
            assert more.count == less.count or (less.end == one.known and more.end <= one.known + one.drafts)
        for one in server.running:
            one.drafts = 0
        if server.step().chunks == ():
            break


LIVE = {
    0: Asked(0, [1] * 10, 4, computed=9, pages=(0, 1, 2)),
    1: Asked(1, [2] * 6, 4),
    2: Asked(2, [1] * 9, 4, computed=4, pages=(0,)),
}
GOOD = ScheduledStep(
    chunks=(
        PositionRange(request=0, first=9, count=1, pages=(0, 1, 2)),
        PositionRange(request=1, first=0, count=6, pages=(3, 4)),
        PositionRange(request=2, first=4, count=5, pages=(0, 5, 6)),
    ),
    version="v",
)


def _with(number, **fields):
    chunks = list(GOOD.chunks)
    chunks[number] = replace(chunks[number], **fields)
    return replace(GOOD, chunks=tuple(chunks))


@pytest.mark.parametrize(
    ("step", "rule"),
    [
        (replace(GOOD, version="w"), "made for weights w, and v are in place"),
        (replace(GOOD, chunks=GOOD.chunks * 2), "more than 16"),
        (replace(GOOD, chunks=(*GOOD.chunks[:2], GOOD.chunks[1])), "request 1 is named twice"),
        (replace(GOOD, frees=(1,)), "request 1 is named twice"),
        (_with(1, request=9), "request 9 is not there"),
        (_with(0, count=2), "positions 9 to 11 of 10"),
        (_with(0, count=0), "positions 9 to 9"),
        (_with(1, first=2, count=4), "begins at 2, and the keys before 0 are there"),
        (_with(2, first=5, count=4), "begins at 5, and the keys before 4 are there"),
        (_with(0, pages=(0, 1, 7)), "its table was changed"),
        (_with(2, pages=(0, 5)), "2 pages for 9 positions"),
        (_with(1, pages=(3, 3)), "writes to page 3, which another one reads"),
        (_with(1, pages=(3, 2)), "writes to page 2, which another one reads"),
        (_with(2, pages=(0, 5, 1)), "writes to page 1, which another one reads"),
    ],
)
def test_a_step_that_breaks_a_rule_is_refused(step, rule):
    budget = Budget(tokens=16, requests=4)
    check(GOOD, LIVE, budget, page_tokens=SIZE, version="v")
    with pytest.raises(InvalidStep, match=rule):
        check(step, LIVE, budget, page_tokens=SIZE, version="v")
