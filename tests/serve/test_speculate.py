"""Speculation changes speed alone: whoever guesses whatever, the answers are those without guesses, bit by bit."""

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_toy import SIZE, PagedToy, V
from superstep.serve.batch_generate import generate
from superstep.serve.compute.draft_model import DraftModel
from superstep.serve.compute.flat_batch import RequestRows
from superstep.serve.compute.kv_cache import together
from superstep.serve.drafting.ngram_drafter import LONGEST, SHORTEST, TRIED, PairLookup
from superstep.serve.drafting.speculate import MOST_MISSES, DraftPace, NgramDrafter, Speculation
from superstep.serve.engine import InferenceEngine
from superstep.serve.scheduling.kv_pages import Pages
from superstep.serve.scheduling.request import ModelInfo, Request, Sampling
from superstep.serve.scheduling.step import Budget

CONTEXT = 48


class Knowing:
    """Guesses what an answer is known to be, wrong now and then."""

    def __init__(self, answers, dice, wrong):
        self.answers, self.dice, self.wrong = answers, dice, wrong

    def offer(self, live, most, matcher):
        return self.dice.randint(0, most)

    def guess(self, asked):
        found = {}
        for request, count in asked.counts.items():
            one = asked.live[request]
            rest = [*self.answers[request][one.known - len(one.request.prompt) :], *[0] * count][:count]
            found[request] = [self.dice.randrange(V) if self.dice.random() < self.wrong else token for token in rest]
        return found

    def judge(self, request, guessed, stood):
        assert stood <= guessed

    def forget(self, request):
        pass


class Parity:
    """Odd and even tokens by turns, some of them."""

    def __init__(self, left, turn=0):
        self.left, self.turn = left, turn

    @property
    def is_done(self):
        return self.left == 0

    def compute_mask(self):
        return torch.arange(V) % 2 == self.turn

    def advance(self, token):
        assert token % 2 == self.turn
        self.left, self.turn = self.left - 1, 1 - self.turn

    def legal(self, tokens):
        for place, token in enumerate(tokens):
            if place >= self.left or token % 2 != (self.turn + place) % 2:
                return place
        return len(tokens)

    def fork(self):
        return Parity(self.left, self.turn)


def engine(guesser=None, *, pages=100, tokens=64, requests=6, most=4, ends=(19,), **other):
    info = ModelInfo(name="toy", vocab=V, context_tokens=CONTEXT, end_of_text=ends, version="v")
    made = InferenceEngine(
        PagedToy(pages, **other),
        info,
        Pages(pages, SIZE),
        Budget(tokens=tokens, requests=requests),
        # A form for who asks for it by a number that changes nothing else.
        lambda request: Parity(request.sampling.seed % 9 + 1) if request.sampling.top_k == V else None,
        Speculation(guesser, most),
    )
    return made


def small(pages, **other):
    """The same model, or one a little different, as the one that guesses."""
    return DraftModel(PagedToy(pages, **other), vocab=V, page_tokens=SIZE)


def samplings(dice):
    return Sampling(
        max_tokens=dice.randint(1, 40),
        temperature=dice.choice([0.0, 0.5, 1.0]),
        top_k=dice.choice([0, 5, V]),
        top_p=dice.choice([1.0, 0.9]),
        seed=dice.randrange(1000),
        presence_penalty=dice.choice([0.0, 0.5]),
        repetition_penalty=dice.choice([1.0, 1.2]),
        logit_bias=dice.choice([(), ((3, 2.0), (4, -2.0))]),
        stop_tokens=dice.choice([(), (7,)]),
        ignore_eos=dice.random() < 0.5,
        top_logprobs=2,
        prompt_logprobs=dice.random() < 0.3,
    )


def checked(made, prompts, asked):
    answers = generate(made, prompts, asked)
    made.pages.check([])
    return answers


def same(found, plain):
    return [replace(one, cached_tokens=0) for one in found] == [replace(one, cached_tokens=0) for one in plain]


@given(st.integers(0, 10_000))
@settings(max_examples=12)
@pytest.mark.long
def test_answers_do_not_depend_on_guesses(seed):
    dice = Random(seed)
    prompts = [[dice.randrange(dice.choice([3, V])) for _ in range(dice.randint(1, 20))] for _ in range(6)]
    asked = [samplings(dice) for _ in prompts]
    plain = checked(engine(), prompts, asked)
    tight = {
        "pages": dice.randint(-(-CONTEXT // SIZE), 30),
        "tokens": dice.randint(1, 20),
        "requests": dice.randint(1, 6),
        "most": dice.randint(1, 9),
    }
    known = [answer.ids for answer in plain]
    guessers = (
        NgramDrafter(),
        Knowing(known, dice, 0.2),
        Knowing(known, dice, 1.0),
        small(tight["pages"], sharpness=2.9),
    )
    for guesser in guessers:
        made = engine(guesser, **tight)
        assert same(checked(made, prompts, asked), plain)
        # Once more, with what the first time left in the cache: no page of it holds a key of a refused guess.
        assert same(checked(made, prompts, asked), plain)


@given(st.integers(0, 10_000))
@settings(max_examples=12)
def test_a_small_model_that_is_the_large_one_is_always_right(seed):
    """Whatever is drawn how, found in the cache, taken back and cut: it has every key that the large one has."""
    dice = Random(seed)
    prompts = [[dice.randrange(3) for _ in range(dice.randint(1, 20))] for _ in range(6)]
    # What was guessed behind the end of an answer would be a miss.
    free = {"ignore_eos": True, "stop_tokens": ()}
    asked = [replace(samplings(dice), top_k=dice.choice([0, 5]), **free) for _ in prompts]
    pages, other = dice.randint(-(-CONTEXT // SIZE), 40), {"whole": 3.0}
    made = engine(small(pages, **other), pages=pages, tokens=dice.randint(4, 30), most=dice.randint(1, 9), **other)
    plain = engine(**other)
    for _ in range(3):
        found = checked(made, prompts, asked)
        assert same(found, checked(plain, prompts, asked))
        prompts = [[*p, *answer.ids][: CONTEXT - 9] for p, answer in zip(prompts, found, strict=True)]
    now = made.counters
    assert now.drafted_tokens == now.accepted_tokens > 0


def test_guesses_that_stand_save_steps_and_are_counted():
    asked = Sampling(temperature=0.0, max_tokens=30, ignore_eos=True)
    plain = engine()
    (answer,) = checked(plain, [[1, 2, 3]], asked)
    made = engine(Knowing([answer.ids], Random(0), 0.0))
    made.speculation._guesser.offer = lambda live, most, matcher: most
    (again,) = checked(made, [[1, 2, 3]], asked)
    assert again.ids == answer.ids
    assert len(plain.model.steps) == 30
    assert len(made.model.steps) == 1 + 6, "the first draws one, each of the others five, the last four"
    now = made.counters
    assert (now.drafts, now.drafted_tokens, now.accepted_tokens) == (6, 4 * 5 + 3, 4 * 5 + 3)
    assert plain.counters.drafted_tokens == 0


def test_several_tokens_come_as_one_piece_of_news_and_none_after_the_last():
    asked = Sampling(temperature=0.0, max_tokens=30, ignore_eos=True)
    (answer,) = generate(engine(), [[1, 2, 3]], asked)
    stop = answer.ids[7]
    made = engine(Knowing([answer.ids], Random(0), 0.0), most=30)
    made.speculation._guesser.offer = lambda live, most, matcher: most
    made.add(Request(id=0, prompt=(1, 2, 3), sampling=replace(asked, stop_tokens=(stop,))))
    news = [one for _ in range(2) for one in made.step()]
    assert [told.token for one in news for told in one.tokens] == answer.ids[: answer.ids.index(stop) + 1]
    assert [one.finish for one in news] == [None, "stop"]
    assert made.is_idle
    made.pages.check([])


def test_rows_of_guesses_are_computed_side_by_side():
    parts = [
        RequestRows(first=4 + n, count=count, pages=(2 * n, 2 * n + 1, 90))
        for n, count in enumerate((3, 1, 3, 17, 3, 1))
    ]
    groups = together(parts, 8, 16, torch.device("cpu"))
    assert sorted(group.rows.shape for group in groups) == [(1, 17), (2, 1), (3, 3)]
    (threes,) = [group for group in groups if group.rows.shape == (3, 3)]
    assert threes.rows.tolist() == [[0, 1, 2], [4, 5, 6], [24, 25, 26]]
    assert threes.ends.tolist() == [[5, 6, 7], [7, 8, 9], [9, 10, 11]]
    assert threes.slots[1].tolist() == [*range(32, 41), *[32] * 7], "pages 4 and 5, and the first place again"


def test_a_poor_guesser_rests_and_a_good_one_does_not():
    pace, guessed = DraftPace(), []
    for known in range(300):
        if not pace.is_resting(known):
            guessed.append(known)
            pace.judge(known + 1, 0)
    gaps = [after - before for before, after in pairwise(guessed)]
    assert gaps == sorted(gaps)
    assert gaps[0] < 4
    assert gaps[-1] == 2**MOST_MISSES + 1
    for _ in range(MOST_MISSES):
        pace.judge(1000, 1)
        assert not pace.is_resting(1000)
    pace.judge(1000, 0)
    assert pace.is_resting(1001)
    assert not pace.is_resting(1002)


def searched(tokens, most):
    """The guess by looking everywhere."""
    best, at = 0, 0
    tried = 0
    for place in range(len(tokens) - 1, SHORTEST - 1, -1):
        if tokens[place - SHORTEST : place] != tokens[-SHORTEST:]:
            continue
        tried += 1
        size = SHORTEST
        while size < min(place, LONGEST) and tokens[place - size - 1] == tokens[len(tokens) - size - 1]:
            size += 1
        if size > best and tried <= TRIED:
            best, at = size, place
    copied = list(tokens)
    for _ in range(most if at else 0):
        copied.append(copied[at + len(copied) - len(tokens)])
    return tuple(copied[len(tokens) :])


@given(st.lists(st.integers(0, 3), min_size=1, max_size=80), st.integers(1, 8))
@settings(max_examples=60)
def test_a_text_is_looked_up_where_its_end_stood_before(tokens, most):
    lookup = PairLookup()
    for size in range(1, len(tokens) + 1):
        assert lookup.guess(tokens[:size], most) == searched(tokens[:size], most)


@pytest.mark.parametrize(
    ("text", "guess"),
    [
        ([5], ()),
        ([5, 5], ()),
        ([5, 5, 5], (5, 5, 5, 5)),
        ([1, 2, 3, 1, 2], (3, 1, 2, 3)),
        ([1, 2, 9, 8, 1, 2, 7, 7, 1, 2], (7, 7, 1, 2)),
        ([3, 1, 2, 9, 4, 1, 2, 7, 3, 1, 2], (9, 4, 1, 2)),
    ],
)
def test_a_guess_is_what_followed(text, guess):
    assert PairLookup().guess(text, 4) == guess
