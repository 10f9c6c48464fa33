"""The engine's books: every request ends once and for a reason, and its pages come back."""

import pytest
import torch

from superstep.errors import ConfigError
from superstep.serve.batch_generate import generate
from superstep.serve.compute.sampler import totals_of
from superstep.serve.engine import InferenceEngine
from superstep.serve.scheduling.kv_pages import Pages
from superstep.serve.scheduling.request import ModelInfo, Request, Sampling
from superstep.serve.scheduling.step import Budget

V = 20


class Counting:
    """A model whose likeliest next token is the last one plus one."""

    def __init__(self):
        self.rows = []

    def __call__(self, rows):
        self.rows.append(rows)
        logits = torch.zeros(len(rows.wanted), V)
        for row, at in enumerate(rows.wanted):
            logits[row, (rows.tokens[at] + 1) % V] = 10.0
        return logits

    def totals(self, logits):
        return totals_of(logits)

    def wait(self):
        pass

    def end(self):
        pass


def engine(*, pages=40, tokens=32, requests=4, context=64, ends=(19,), matchers=lambda request: None):
    info = ModelInfo(name="counting", vocab=V, context_tokens=context, end_of_text=ends, version="v")
    return InferenceEngine(Counting(), info, Pages(pages, 4), Budget(tokens=tokens, requests=requests), matchers)


GREEDY = Sampling(temperature=0.0, max_tokens=5)


def test_answers_go_on_from_their_prompts():
    answers = generate(engine(), [[3], [1, 2, 7], [0] * 50], GREEDY)
    assert [answer.ids for answer in answers] == [[4, 5, 6, 7, 8], [8, 9, 10, 11, 12], [1, 2, 3, 4, 5]]
    assert {answer.finish for answer in answers} == {"length"}
    assert {told.version for answer in answers for told in answer.tokens} == {"v"}


def test_an_answer_ends_at_its_end_of_text_a_stop_token_or_the_contexts_end():
    until = Sampling(temperature=0.0, max_tokens=30)
    (end,) = generate(engine(), [[15]], until)
    assert (end.ids, end.finish) == ([16, 17, 18, 19], "stop")
    (on,) = generate(engine(), [[15]], Sampling(temperature=0.0, max_tokens=6, ignore_eos=True))
    assert (on.ids, on.finish) == ([16, 17, 18, 19, 0, 1], "length")
    (stop,) = generate(engine(), [[3]], Sampling(temperature=0.0, max_tokens=30, stop_tokens=(6, 9)))
    assert (stop.ids, stop.finish) == ([4, 5, 6], "stop")
    (full,) = generate(engine(context=8), [[1] * 5], until)
    assert (full.ids, full.finish) == ([2, 3, 4], "length")


def test_a_prompt_has_its_tokens_told_in_whatever_chunks_it_comes():
    asked = Sampling(temperature=0.0, max_tokens=2, prompt_logprobs=True, top_logprobs=1)
    for tokens in (2, 3, 32):
        (answer,) = generate(engine(tokens=tokens), [[1, 2, 3, 9, 10, 11, 12]], asked)
        assert [told.token for told in answer.prompt] == [2, 3, 9, 10, 11, 12]
        assert [told.top[0][0] for told in answer.prompt] == [2, 3, 4, 10, 11, 12]
        assert answer.prompt[2].logprob < -5 < answer.prompt[0].logprob
        assert answer.ids == [13, 14]


def test_a_prompt_is_told_once_though_its_pages_are_taken_back():
    asked = Sampling(temperature=0.0, max_tokens=20, ignore_eos=True, prompt_logprobs=True)
    prompts = [[k + 1] * (6 + 3 * k) for k in range(6)]
    tight = engine(pages=16, tokens=7, requests=6)
    answers = generate(tight, prompts, asked)
    assert tight.counters.preemptions > 0
    assert [[told.token for told in answer.prompt] for answer in answers] == [prompt[1:] for prompt in prompts]


def test_a_second_prompt_alike_takes_what_is_there():
    served = engine()
    first, second = (generate(served, [[5] * 13], GREEDY)[0] for _ in range(2))
    assert (first.cached_tokens, second.cached_tokens) == (0, 12)
    assert first.ids == second.ids
    (salted,) = (served.add(Request(id=7, prompt=(5,) * 13, sampling=GREEDY, salt="mine")), served.step())[1:]
    assert salted[0].cached_tokens == 0


def test_a_request_that_is_taken_back_leaves_nothing():
    served = engine()
    for number in range(6):
        served.add(Request(id=number, prompt=(1, 2, 3, 4, 5), sampling=GREEDY))
    served.step()
    for number in (0, 5, 99):
        served.abort(number)
    news = served.step()
    assert [n.request for n in news if n.finish == "abort"] == [0, 5]
    ended = []
    while not served.is_idle:
        ended += [n.request for n in served.step() if n.finish]
    assert sorted(ended) == [1, 2, 3, 4]
    served.pages.check([])


def test_the_more_urgent_goes_first():
    served = engine(requests=1)
    for number, priority in enumerate([0, 5, -1]):
        served.add(Request(id=number, prompt=(1,), sampling=GREEDY, priority=priority))
    ended = []
    while not served.is_idle:
        ended += [n.request for n in served.step() if n.finish]
    assert ended == [2, 0, 1]


def test_few_pages_change_no_answer():
    prompts = [[k % 5] * (6 + k) for k in range(8)]
    asked = Sampling(temperature=0.0, max_tokens=20, ignore_eos=True)
    roomy, tight = engine(pages=200, requests=8), engine(pages=16, requests=8)
    assert [a.ids for a in generate(roomy, prompts, asked)] == [a.ids for a in generate(tight, prompts, asked)]
    assert roomy.counters.preemptions == 0 < tight.counters.preemptions
    tight.pages.check([])


def test_logits_that_are_no_numbers_end_their_request_and_no_other():
    served = engine()

    class Broken(Counting):
        def __call__(self, rows):
            logits = super().__call__(rows)
            for row, at in enumerate(rows.wanted):
                if rows.tokens[at] == 7:
                    logits[row] = float("nan")
            return logits

    served.model = Broken()
    bad, good = generate(served, [[6], [1]], GREEDY)
    assert (bad.ids, bad.finish) == ([7], "abort")
    assert good.ids == [2, 3, 4, 5, 6]
    served.pages.check([])


class Odd:
    """Odd tokens only, three of them."""

    def __init__(self):
        self.left = 3

    @property
    def is_done(self):
        return self.left == 0

    def compute_mask(self):
        return torch.arange(V) % 2 == 1

    def advance(self, token):
        assert token % 2 == 1
        self.left -= 1


def test_an_answer_keeps_its_form_and_ends_with_it():
    served = engine(matchers=lambda request: Odd() if request.sampling.top_k == 1 else None)
    asked = [Sampling(temperature=0.0, max_tokens=9, top_k=1), GREEDY]
    formed, free = generate(served, [[2], [2]], asked)
    assert formed.finish == "stop"
    assert formed.ids[0] == 3
    assert len(formed.ids) == 3
    assert all(token % 2 for token in formed.ids)
    assert free.ids == [3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("prompt", "sampling", "said"),
    [
        ([], {}, "prompt is empty"),
        ([1] * 64, {}, "prompt has 64 tokens, and the context has room for 64"),
        ([1, 20], {}, "prompt holds token 20; token ids of this model are 0 to 19"),
        ([-1], {}, "prompt holds token -1"),
        ([1], {"max_tokens": 0}, "max_tokens = 0 must be at least 1"),
        ([1], {"temperature": float("nan")}, "temperature = nan must be from 0 to 100"),
        ([1], {"temperature": -0.1}, "temperature = -0.1"),
        ([1], {"top_p": 0.0}, "top_p = 0.0 must be above 0"),
        ([1], {"top_k": -1}, "top_k = -1 must be at least 0"),
        ([1], {"min_p": 1.5}, "min_p = 1.5 must be from 0 to 1"),
        ([1], {"presence_penalty": 3.0}, "presence_penalty = 3.0 must be from -2 to 2"),
        ([1], {"repetition_penalty": 0.0}, "repetition_penalty = 0.0 must be above 0"),
        ([1], {"logit_bias": ((20, 1.0),)}, "logit_bias names token 20"),
        ([1], {"logit_bias": ((2, float("nan")),)}, "logit_bias of token 2 = nan"),
        ([1], {"stop_tokens": (33,)}, "stop_tokens names token 33"),
        ([1], {"seed": 2**64}, "seed = 18446744073709551616 must be from 0"),
        ([1], {"top_logprobs": 65}, "top_logprobs = 65 must be from 0 to 64"),
    ],
)
def test_what_cannot_be_answered_is_refused_and_touches_nothing(prompt, sampling, said):
    served = engine()
    with pytest.raises(ConfigError, match=said):
        generate(served, [[1, 2], prompt], Sampling(**sampling))
    assert served.is_idle
    served.pages.check([])


def test_memory_for_less_than_one_context_is_a_mistake():
    with pytest.raises(ValueError, match="3 pages of 4 do not hold 64 tokens"):
        engine(pages=3)
