"""Where the host waits for an emulated GPU while a server computes a step of new tokens: once for what was drawn, and
once for each token that a draft model guesses.
"""

import re
from dataclasses import replace

import pytest
import torch

import low_rank
from served_ranks import served_by
from strict_ranks import device_module, gpu_of
from superstep.serve.compute.sampler import Draw, LogitTotals, SamplingContext, draw
from superstep.serve.compute.wanted import LogitsRow, read_known
from superstep.serve.config import NGRAM, ServeConfig
from superstep.serve.scheduling.request import Request, Sampling

pytestmark = pytest.mark.strict

WAYS = [
    Sampling(max_tokens=16, temperature=0, ignore_eos=True),
    Sampling(max_tokens=16, seed=1, ignore_eos=True),
    Sampling(max_tokens=16, seed=2, temperature=0.8, ignore_eos=True),
    Sampling(max_tokens=16, seed=3, ignore_eos=True),
]


PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.3, "logit_bias": ((5, 1.0),)}
CHANGED = [
    Sampling(max_tokens=16, seed=1, top_p=0.9, ignore_eos=True),
    Sampling(max_tokens=16, seed=2, top_logprobs=3, **PENALTIES, ignore_eos=True),
    Sampling(max_tokens=16, temperature=0, **PENALTIES, ignore_eos=True),
    Sampling(max_tokens=16, seed=3, top_logprobs=3, ignore_eos=True),
    Sampling(max_tokens=16, temperature=0, top_logprobs=2, ignore_eos=True),
    Sampling(max_tokens=16, seed=4, ignore_eos=True),
]


def waits_of_steps(rank, world, folder, serve, ways):
    """How often rank 0's host waited in some steps of new tokens for each request, by operator and line."""
    with gpu_of(rank, world) as (gpu, report), served_by(rank, folder, serve, gpu) as (engine, _):
        if engine is None:  # it has followed all of them
            return None
        for number, how in enumerate(ways):
            engine.add(Request(id=number, prompt=(3, 9, 3, 9, 3, *range(number)), sampling=how))
        engine.step()
        report()
        for _ in range(STEPS):
            engine.step()
        return report().host_waits


STEPS = 3
CASES = {
    "fast": ({}, {}),
    "bf16": ({"compute": "bf16"}, {}),
    "exact": ({"exact": True}, {}),
    "guesses": ({"speculate": NGRAM}, {}),
    "experts": ({"compute": "bf16"}, {"experts": 4, "router": "dropless"}),
    "tp": ({"tp": 2}, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_host_waits_once_for_what_was_drawn(pool, tmp_path, name):
    how, model = CASES[name]
    serve = ServeConfig(**{"compute": "fp32", "context_tokens": 64, "pages": 64} | how)
    waits, *_ = pool.run(serve.tp, waits_of_steps, low_rank.write_model(tmp_path, **model), serve, WAYS, timeout_s=60)
    found = {re.search(r"\((\S+?):\d+", where).group(1): count for where, count in waits.items()}
    assert found == {"superstep/serve/compute/sampler.py": STEPS}, waits


def test_draws_that_change_logits_wait_together(pool, tmp_path):
    serve = ServeConfig(compute="fp32", context_tokens=64, pages=64)
    (waits,) = pool.run(1, waits_of_steps, low_rank.write_model(tmp_path), serve, CHANGED, timeout_s=60)
    assert sum(waits.values()) == STEPS, waits


def test_the_host_waits_once_for_each_guess_of_a_draft_model(pool, tmp_path):
    model, guesses = low_rank.write_model(tmp_path), 3
    serve = ServeConfig(
        compute="fp32", context_tokens=64, pages=64, speculate=str(model), draft_tokens=guesses, page_tokens=32
    )
    ways = [replace(one, max_tokens=40) for one in (*WAYS, *CHANGED[:2])]
    (waits,) = pool.run(1, waits_of_steps, model, serve, ways, timeout_s=60)
    of_guesses = sum(count for where, count in waits.items() if "draft_model.py" in where)
    assert of_guesses == STEPS * guesses, waits


TOTALS = LogitTotals(2.0, 1.0, 0)
DRAWS = {
    "plain": Sampling(),
    "top-k and top-p": Sampling(top_k=5, top_p=0.9, min_p=0.01, top_logprobs=3),
    "penalties": Sampling(**PENALTIES),
    "greedy with penalties": Sampling(temperature=0, **PENALTIES, top_logprobs=3),
}


@pytest.mark.parametrize("name", DRAWS)
def test_the_host_waits_once_for_a_draw_of_its_own(name):
    logits = torch.linspace(-3, 2, 50)
    allowed = None if name == "plain" else torch.arange(50) % 7 > 0
    on_gpu, where = logits.cuda(), SamplingContext((3, 4), (7, 7, 9), allowed)
    device_module().take_host_waits()
    drawn = draw(on_gpu, TOTALS, Draw(DRAWS[name], where, 12))
    waits = device_module().take_host_waits()
    assert sum(waits.values()) == 1, waits
    assert drawn == draw(logits, TOTALS, Draw(DRAWS[name], where, 12))


def test_the_host_waits_once_for_the_log_probabilities_of_a_prompt():
    logits = torch.linspace(-3, 2, 150).view(3, 50)
    rows, on_gpu = ([LogitsRow(row, TOTALS, None) for row in each] for each in (logits, logits.cuda()))
    device_module().take_host_waits()
    found = read_known(on_gpu, (4, 7, 9), top=2, version="")
    waits = device_module().take_host_waits()
    assert sum(waits.values()) == 1, waits
    assert found == read_known(rows, (4, 7, 9), top=2, version="")


def test_a_form_that_the_host_keeps_holds_logits_of_a_gpu():
    logits, allowed = torch.tensor([3.0, 1.0, 2.0], device="cuda"), torch.tensor([False, True, True])
    told = draw(logits, LogitTotals(3.0, 0.4, 0), Draw(Sampling(temperature=0), SamplingContext((), (), allowed), 0))
    assert told.token == 2
