"""Drawing: the right distribution, told right, and a function of seed, position and logits alone."""

import math

import pytest
import torch

from superstep.serve.compute.sampler import (
    NO_CONTEXT,
    Draw,
    SamplingContext,
    change_logits,
    describe,
    draw,
    draw_plain,
    draw_tokens,
    gumbel,
    read_rows,
    read_totals,
    totals_of,
    truncate,
)
from superstep.serve.scheduling.request import Sampling

V = 50
LOGITS = torch.randn(V, generator=torch.Generator().manual_seed(0)) * 2
DRAWS = 2_000


def totals_read(logits):
    (rows,) = read_rows(totals_of(logits))
    return read_totals(rows)


def drawn(sampling, *, logits=LOGITS, seen=NO_CONTEXT, position=0):
    (totals,) = totals_read(logits[None].clone())
    return draw(logits, totals, Draw(sampling, seen, position))


def frequencies(sampling, *, draws=DRAWS, seen=NO_CONTEXT):
    counts = torch.zeros(V, dtype=torch.float64)
    for position in range(draws):
        counts[drawn(sampling, position=position, seen=seen).token] += 1
    return counts / draws


def expected(sampling, scores):
    kept, scores = truncate(scores / sampling.temperature, sampling)
    return torch.zeros(V, dtype=torch.float64).scatter(0, kept, scores.double().softmax(0))


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.5, seed=9),
        Sampling(top_k=5),
        Sampling(top_p=0.6, temperature=2.0),
        Sampling(min_p=0.1, seed=2**63),
        Sampling(top_k=20, top_p=0.9, min_p=0.02),
    ],
    ids=str,
)
def test_tokens_come_as_often_as_their_probability_says(sampling):
    p, seen = expected(sampling, LOGITS), frequencies(sampling)
    assert (seen[p == 0] == 0).all()
    # Pearson's chi-squared, against its mean and five standard deviations.
    likely = p > 1e-3
    chi = float((DRAWS * (seen[likely] - p[likely]) ** 2 / p[likely]).sum())
    freedom = int(likely.sum())
    assert chi < freedom + 5 * math.sqrt(2 * freedom)


def test_a_draw_depends_on_seed_and_position_and_on_nothing_else():
    again = [drawn(Sampling(seed=3), position=k).token for k in range(50)]
    assert again == [drawn(Sampling(seed=3), position=k).token for k in range(50)]
    assert again != [drawn(Sampling(seed=4), position=k).token for k in range(50)]
    assert len(set(again)) > 5


def test_noise_is_a_hash_that_any_machine_computes_alike():
    """Against the same arithmetic in Python's own integers."""
    import hashlib

    key = int.from_bytes(hashlib.blake2b(b"7:5", digest_size=8).digest(), "little")
    for token in (0, 1, 31_999):
        x = (token * (2**64 - 0x61C8864680B583EB) + key) % 2**64
        for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53, 1):
            x = ((x ^ (x >> 33)) * factor) % 2**64
        uniform = ((x >> 11) + 0.5) * 2.0**-53
        assert float(gumbel(7, 5, torch.tensor([token]))) == pytest.approx(-math.log(-math.log(uniform)), rel=1e-12)


def test_noise_of_a_token_does_not_depend_on_which_others_are_asked_for():
    whole = gumbel(1, 2, torch.arange(V))
    assert torch.equal(gumbel(1, 2, torch.tensor([40, 3])), whole[[40, 3]])


def test_log_probabilities_are_those_of_the_model_and_of_what_was_drawn_from():
    sampling = Sampling(temperature=0.7, top_k=8, top_logprobs=3)
    told = drawn(sampling)
    assert told.logprob == pytest.approx(float(LOGITS.log_softmax(0)[told.token]), abs=1e-6)
    assert told.drawn_logprob == pytest.approx(math.log(expected(sampling, LOGITS)[told.token]), abs=1e-6)
    assert told.kept == 8
    likeliest = LOGITS.log_softmax(0).topk(3)
    assert [token for token, _ in told.top] == likeliest.indices.tolist()
    assert [p for _, p in told.top] == pytest.approx(likeliest.values.tolist(), abs=1e-6)


def test_the_likeliest_token_is_certain():
    told = drawn(Sampling(temperature=0.0))
    assert (told.token, told.drawn_logprob, told.kept) == (int(LOGITS.argmax()), 0.0, 1)


def test_penalties_and_biases_are_those_of_openai_and_keskar():
    seen = SamplingContext((1, 2), (2, 2, 3))
    sampling = Sampling(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.5, logit_bias=((9, 4.0),))
    scores = change_logits(LOGITS, sampling, seen)
    wanted = LOGITS.clone()
    for token in (1, 2, 3):
        wanted[token] = wanted[token] / 1.5 if wanted[token] > 0 else wanted[token] * 1.5
    wanted[2] -= 0.5 + 2 * 0.25
    wanted[3] -= 0.5 + 0.25
    wanted[9] += 4.0
    assert torch.allclose(scores, wanted)


def test_what_the_form_does_not_allow_is_never_drawn():
    allowed = torch.zeros(V, dtype=torch.bool)
    allowed[[7, 8]] = True
    seen = SamplingContext((), (), allowed)
    assert {drawn(Sampling(temperature=5.0), seen=seen, position=k).token for k in range(40)} == {7, 8}
    assert drawn(Sampling(temperature=0.0), seen=seen).token == (7 if LOGITS[7] > LOGITS[8] else 8)


def test_top_p_keeps_the_token_that_crosses_the_line_and_one_at_least():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()

    def kept(sampling):
        tokens, scores = truncate(logits, sampling)
        return tokens[scores.isfinite()].tolist()

    assert kept(Sampling(top_p=0.5)) == [0]
    assert kept(Sampling(top_p=0.51)) == [0, 1]
    assert kept(Sampling(top_p=1e-9)) == [0]
    assert kept(Sampling(min_p=0.5)) == [0, 1]
    assert kept(Sampling(top_k=3, top_p=0.7)) == [0, 1], "top-p of what top-k kept"


def test_rows_that_are_drawn_together_are_drawn_as_if_alone(monkeypatch):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(37, 301, generator=generator) * 3
    logits[5, 7:] = float("-inf")
    asked = [(Sampling(seed=row % 5, temperature=(1.0, 0.3, 1.7)[row % 3]), 100 + row) for row in range(len(logits))]
    monkeypatch.setattr("superstep.serve.compute.sampler.MOST_NOISE", 10 * 301)
    drawn = draw_plain(logits, asked)
    assert drawn[5].finite == 7
    for row, (sampling, position), each in zip(logits, asked, drawn, strict=True):
        (totals,) = totals_read(row[None])
        noise = gumbel(sampling.seed, position, torch.arange(301))
        assert each.token == int(((row / sampling.temperature).double() + noise).argmax())
        alone = Draw(sampling, NO_CONTEXT, position)
        assert describe(each, (), totals, vocab=301, version="") == draw(row, totals, alone)


def test_tokens_that_are_drawn_together_are_those_of_each_draw():
    logits = torch.randn(6, V, generator=torch.Generator().manual_seed(4)) * 3
    logits[5, 3] = float("nan")
    allowed = torch.arange(V) % 7 > 0
    draws = [
        Draw(Sampling(seed=1, top_p=0.8, repetition_penalty=1.4), SamplingContext((1, 2), (2, 3)), 9),
        Draw(Sampling(seed=2, temperature=0.7), NO_CONTEXT, 4),
        Draw(Sampling(temperature=0), NO_CONTEXT, 4),
        Draw(Sampling(seed=3), SamplingContext((), (), allowed), 5),
        Draw(Sampling(seed=4), NO_CONTEXT, 6),
        Draw(Sampling(seed=5), NO_CONTEXT, 6),
    ]
    alone = [draw(row, totals_read(row[None])[0], one).token for row, one in zip(logits[:5], draws[:5], strict=True)]
    assert draw_tokens(logits, draws) == [*alone, None]
