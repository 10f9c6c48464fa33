"""A model served on emulated GPUs says what it says on a CPU: the same tokens, as likely."""

from dataclasses import replace

import pytest

import low_rank
from served_ranks import served_by
from strict_ranks import gpu_of
from superstep.comm.device import Device
from superstep.serve.batch_generate import generate
from superstep.serve.config import NGRAM, ServeConfig
from superstep.serve.scheduling.engine_messages import ChangeWeights
from superstep.serve.scheduling.request import Request, Sampling

pytestmark = pytest.mark.strict

LONG = [(7 * k) % low_rank.VOCAB for k in range(33)]
PROMPTS = [LONG[:1], LONG[:15], LONG[:16], LONG, [*LONG[:32], 5], [3, 9] * 9]
"""Of lengths around a page's; the fifth begins as the fourth does, the last one repeats itself, as guesses need."""
GREEDY = Sampling(max_tokens=12, temperature=0, ignore_eos=True)
WAYS = [
    GREEDY,
    Sampling(max_tokens=12, seed=1, temperature=0.8, ignore_eos=True),
    Sampling(max_tokens=12, seed=2, top_k=8, repetition_penalty=1.2, ignore_eos=True, logit_bias=((5, 1.0),)),
    Sampling(max_tokens=12, seed=3, ignore_eos=True, top_logprobs=2, prompt_logprobs=True),
    Sampling(max_tokens=12, seed=4, top_p=0.9, presence_penalty=0.5, ignore_eos=True),
    GREEDY,
]
FP32 = ServeConfig(compute="fp32", context_tokens=64, pages=64)


def answers(rank, folder, serve, device):
    """To all prompts at once, and then to each of the long ones, whose first pages are there; and what was shared and
    guessed.
    """
    with served_by(rank, folder, serve, device) as (engine, _):
        if engine is None:
            return None
        found = [*generate(engine, PROMPTS, WAYS), *generate(engine, PROMPTS[3:5], GREEDY)]
        counters = engine.counters
    return found, counters.prefix_hit_tokens, counters.accepted_tokens


def serve_on_cpu(rank, world, folder, serve):
    return answers(rank, folder, serve, Device("cpu"))


def serve_on_gpus(rank, world, folder, serve):
    """What it says, and what the device saw."""
    with gpu_of(rank, world) as (gpu, report):
        return answers(rank, folder, serve, gpu), report()


CASES = {
    "exact": (replace(FP32, exact=True), {}),
    "exact tp": (replace(FP32, exact=True, tp=2), {}),
    "guesses": (replace(FP32, speculate=NGRAM), {}),
    "guesses tp": (replace(FP32, speculate=NGRAM, tp=2), {}),
    "experts tp": (replace(FP32, tp=2), {"experts": 4, "router": "dropless"}),
}


def numbers(answer):
    """Of each token and of each of the prompt's, its log-probabilities."""
    return [x for told in (*answer.tokens, *answer.prompt) for x in (told.logprob, *(p for _, p in told.top))]


@pytest.mark.parametrize("name", CASES)
def test_the_answers_are_those_of_a_cpu(pool, tmp_path, name):
    serve, model = CASES[name]
    folder = low_rank.write_model(tmp_path, **model)
    ((wanted, shared_tokens, _),) = pool.run(1, serve_on_cpu, folder, replace(serve, tp=1))
    found = pool.run(serve.tp, serve_on_gpus, folder, serve, timeout_s=60)
    (told, same_tokens, stood), _ = found[0]
    assert [answer.ids for answer in told] == [answer.ids for answer in wanted]
    closely = {"abs": 0, "rel": 0} if serve.exact else {"abs": 1e-4}
    for one, other in zip(told, wanted, strict=True):
        assert numbers(one) == pytest.approx(numbers(other), **closely)
    assert same_tokens == shared_tokens > 0
    assert (stood > 0) == bool(serve.speculate)
    for rank, (_, observed) in enumerate(found):
        assert observed.races == {}
        assert observed.contexts == {rank}


def change_under_way(rank, folder, other, serve, requests, device):
    """Of each request the tokens with their versions and log-probabilities, and why it ended: four steps, beside the
    last of which other weights are read, then the rest.
    """
    with served_by(rank, folder, serve, device) as (engine, steward):
        if engine is None:
            return None
        for number, (prompt, how) in enumerate(zip(PROMPTS, WAYS, strict=True)):
            engine.add(Request(id=number, prompt=tuple(prompt), sampling=replace(how, prompt_logprobs=False)))
        news = [one for _ in range(3) for one in engine.step()]
        steward.ask(1, ChangeWeights(str(other), requests))
        done = steward.tick()
        news += engine.step()
        while not done:
            steward.rest()
            if requests == "wait":
                news += engine.step()
            done = steward.tick()
        while not engine.is_idle:
            news += engine.step()
    found = {number: ([], [], []) for number in range(len(PROMPTS))}
    for one in news:
        tokens, logprobs, ends = found[one.request]
        tokens += [(told.token, told.version) for told in one.tokens]
        logprobs += [told.logprob for told in one.tokens]
        ends += [one.finish] if one.finish else []
    return found


def change_on_cpu(rank, world, *given):
    return change_under_way(rank, *given, Device("cpu"))


def change_on_gpus(rank, world, *given):
    with gpu_of(rank, world) as (gpu, look):
        return change_under_way(rank, *given, gpu), look()


@pytest.mark.parametrize(
    ("requests", "versions", "tp"), [("recompute", 2, 2), ("keep", 2, 1), ("wait", 1, 2), ("abort", 1, 1)]
)
def test_weights_change_under_requests_as_on_a_cpu(pool, tmp_path, requests, versions, tp):
    """The tokens of a request are of so many versions."""
    folder, other = (
        low_rank.write_model(tmp_path / "a"),
        low_rank.write_model(tmp_path / "b", low_rank.random_adapter(1)),
    )
    (wanted,) = pool.run(1, change_on_cpu, folder, other, FP32, requests)
    ((found, observed), *others) = pool.run(
        tp, change_on_gpus, folder, other, replace(FP32, tp=tp), requests, timeout_s=60
    )
    for number, (tokens, logprobs, ends) in wanted.items():
        assert len({version for _, version in tokens}) == versions
        assert found[number] == (tokens, pytest.approx(logprobs, abs=1e-4), ends)
    assert [observed.races, *(each.races for _, each in others)] == [{}] * tp
