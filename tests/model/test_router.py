"""Routers, each held against its paper: who is chosen, who is turned away, what the losses are."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plans import examples
from superstep.model.mixture.router import (
    NOBODY,
    balance_loss,
    choices,
    expect_load,
    noise_width,
    route,
    within_capacity,
    z_loss,
)
from superstep.model.moe import LOAD_UNIT, Gate, with_load
from superstep.plan.config import ModelConfig
from superstep.plan.model.sizes.lookup import shape_of

ROUTERS = ["dropless", "switch", "top2", "noisy-topk"]


def moe_of(router, experts=4, **fields):
    return shape_of(ModelConfig(name="tiny", experts=experts, router=router, **fields)).moe


def draws(moe, B=3, S=12, seed=0, dtype=torch.float32):
    """Logits and noise for whole sequences."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(B, S, moe.logits, generator=generator, dtype=dtype)
    noise = torch.randn(B, S, noise_width(moe), generator=generator, dtype=dtype)
    return logits, noise


@st.composite
def choosing(draw):
    """Choices of whole sequences as a router may make them: no expert twice for a token, now and then nobody."""
    B, S, E = draw(st.integers(1, 3)), draw(st.integers(1, 20)), draw(st.integers(1, 6))
    k = draw(st.integers(1, E))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    # Skewed, so that some experts overflow and others stay empty.
    scores = torch.rand(B, S, E, generator=generator) + torch.linspace(0, draw(st.floats(0, 2)), E)
    choice = scores.topk(k).indices
    is_nobody = torch.rand(B, S, k, generator=generator) < draw(st.sampled_from([0.0, 0.3]))
    return choice.masked_fill(is_nobody, NOBODY), E, draw(st.integers(1, S + 1))


def turned_away_one_by_one(choice_Sk, experts, capacity):
    """The loops of Lepikhin 2020, algorithm 1, for any k."""
    taken = [0] * experts
    kept = choice_Sk.tolist()
    for j in range(choice_Sk.shape[1]):
        for s in range(choice_Sk.shape[0]):
            expert = kept[s][j]
            if expert == NOBODY:
                continue
            if taken[expert] >= capacity:
                kept[s][j] = NOBODY
            taken[expert] += 1
    return kept


@examples(150)
@given(choosing())
def test_room_goes_to_first_choices_then_to_earlier_positions_and_is_never_exceeded(case):
    choice, experts, capacity = case
    kept = within_capacity(choice, experts, capacity)
    assert kept.tolist() == [turned_away_one_by_one(row, experts, capacity) for row in choice]
    wanted, got = choices(choice, experts), choices(kept, experts)
    assert torch.equal(got, wanted.clamp(max=capacity))


def test_a_router_without_a_capacity_turns_nobody_away():
    for router in ("dropless", "noisy-topk"):
        moe = moe_of(router)
        routing = route(moe, *draws(moe))
        assert torch.equal(routing.expert, routing.choice)
        assert (routing.expert >= 0).all()


@pytest.mark.parametrize("router", ["switch", "top2"])
def test_capacity_is_held_within_each_sequence(router):
    moe = moe_of(router, capacity_factor=0.75)
    logits, noise = draws(moe, B=4, S=32)
    logits[..., 0] += 2.0  # a favourite
    routing = route(moe, logits, noise)
    held = choices(routing.expert, moe.experts)
    assert moe.capacity(32) == {"switch": 6, "top2": 12}[router]
    assert held.max() == moe.capacity(32)
    assert (choices(routing.choice, moe.experts) > held).any()
    assert (routing.weight[routing.expert == NOBODY] == 0).all()


@pytest.mark.parametrize("router", ROUTERS)
def test_a_sequence_is_routed_the_same_whatever_it_is_in_a_batch_with(router):
    moe = moe_of(router)
    logits, noise = draws(moe, B=6)
    whole = route(moe, logits, noise)
    for rows in ([0], [5, 2], [3, 4, 1]):
        part = route(moe, logits[rows], noise[rows])
        for name in ("choice", "expert", "weight", "balance", "z"):
            assert torch.equal(getattr(part, name), getattr(whole, name)[rows]), name


def test_dropless_weights_are_the_softmax_over_all_or_over_the_chosen():
    moe = moe_of("dropless", experts_per_token=2)
    logits, _ = draws(moe)
    ours = route(moe, logits, None)
    best, choice = logits.topk(2)
    assert torch.equal(ours.choice, choice)
    torch.testing.assert_close(ours.weight, best.softmax(-1))
    plain = route(replace(moe, renormalise=False), logits, None)
    torch.testing.assert_close(plain.weight, logits.softmax(-1).gather(-1, choice))


def test_switch_weighs_the_best_expert_by_its_probability():
    moe = moe_of("switch", capacity_factor=4.0)
    logits, _ = draws(moe)
    routing = route(moe, logits, None)
    torch.testing.assert_close(routing.weight[..., 0], logits.softmax(-1).amax(-1))


def test_top2_takes_its_second_expert_with_twice_its_weight_as_the_chance():
    moe = moe_of("top2", capacity_factor=4.0)
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0]).expand(1, 20000, 4)
    noise = torch.randn(1, 20000, 1, generator=torch.Generator().manual_seed(0))
    routing = route(moe, logits, noise)
    second = 1 / (1 + math.e)
    torch.testing.assert_close(routing.weight[0, 0, 0], torch.tensor(1 - second))
    taken = (routing.expert[0, :, 1] == 1).float().mean()
    # 20000 draws of chance 0.54 stray by 0.0035.
    assert abs(taken - 2 * second) < 0.015
    assert (route(moe, logits, None).choice[..., 1] == 1).all()  # nothing is left to chance in evaluation


def test_what_chance_leaves_out_takes_no_room():
    moe = moe_of("top2", experts=2, capacity_factor=0.5)  # room for 2 of 4 tokens
    logits = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]])
    never, always = torch.full((1, 4, 1), 9.0), torch.full((1, 4, 1), -9.0)
    assert route(moe, logits, never).expert.tolist() == [[[0, -1], [0, -1], [1, -1], [1, -1]]]
    # First choices fill both experts, so that every second one is turned away.
    assert route(moe, logits, always).expert.tolist() == [[[0, -1], [0, -1], [1, -1], [1, -1]]]
    assert (route(moe, logits, always).choice >= 0).all()


def test_the_balance_loss_of_a_case_by_hand():
    # Three tokens, two experts: f = (2/3, 1/3); P is (1.5, 1.5) / 3 first, then (1.8, 1.2) / 3.
    probability = torch.tensor([[[0.8, 0.2], [0.6, 0.4], [0.1, 0.9]]], dtype=torch.float64)
    choice = torch.tensor([[[0], [0], [1]]])
    expected = 2 * (2 / 3 * 1.5 / 3 + 1 / 3 * 1.5 / 3)
    torch.testing.assert_close(balance_loss(probability, choice), torch.tensor([expected], dtype=torch.float64))
    skewed = torch.tensor([[[0.9, 0.1], [0.7, 0.3], [0.2, 0.8]]], dtype=torch.float64)
    expected = 2 * (2 / 3 * 1.8 / 3 + 1 / 3 * 1.2 / 3)
    torch.testing.assert_close(balance_loss(skewed, choice), torch.tensor([expected], dtype=torch.float64))


@examples(50)
@given(st.lists(st.integers(0, 12), min_size=2, max_size=6).filter(any))
def test_the_balance_loss_is_least_and_one_where_the_load_is_even(counts):
    def loss(counts):
        choice = torch.tensor([e for e, n in enumerate(counts) for _ in range(n)])
        sure = torch.nn.functional.one_hot(choice, len(counts)).double()
        return float(balance_loss(sure[None], choice[None, :, None]))

    assert loss([3] * len(counts)) == pytest.approx(1.0)
    assert loss(counts) >= 1.0 - 1e-12
    assert loss([sum(counts)] + [0] * (len(counts) - 1)) == pytest.approx(len(counts))


def test_every_choice_counts_for_dropless_and_the_first_alone_for_top2():
    logits, _ = draws(moe_of("dropless"))
    probability, best = logits.softmax(-1), logits.topk(2).indices
    torch.testing.assert_close(route(moe_of("dropless"), logits, None).balance, balance_loss(probability, best))
    first = balance_loss(probability, best[..., :1])
    torch.testing.assert_close(route(moe_of("top2"), logits, None).balance, first)
    torch.testing.assert_close(route(moe_of("switch"), logits, None).balance, first)


def test_the_z_loss_is_the_mean_square_of_the_log_of_the_partition():
    logits = torch.tensor([[[0.0, 0.0], [math.log(3.0), 0.0]]], dtype=torch.float64)
    expected = (math.log(2) ** 2 + math.log(4) ** 2) / 2
    torch.testing.assert_close(z_loss(logits), torch.tensor([expected], dtype=torch.float64))


@pytest.mark.parametrize("router", ROUTERS)
def test_the_z_loss_is_of_the_logits_without_noise(router):
    moe = moe_of(router)
    logits, noise = draws(moe)
    torch.testing.assert_close(route(moe, logits, noise).z, z_loss(logits[..., : moe.experts]))


def test_the_expected_load_is_the_mean_over_an_experts_own_noise():
    """Shazeer 2017, eq. 8: the noise of one expert is drawn anew, that of the others stays."""
    k, experts, times = 2, 5, 40000
    generator = torch.Generator().manual_seed(0)
    clean, spread, noise = (torch.randn(1, 1, experts, generator=generator, dtype=torch.float64) for _ in range(3))
    spread = spread.exp()
    noisy = clean + noise * spread
    ours = expect_load(clean, noisy, spread, noisy.topk(k + 1).values)[0]
    for expert in range(experts):
        again = noisy.expand(times, 1, experts).clone()
        fresh = torch.randn(times, generator=generator, dtype=torch.float64)
        again[:, 0, expert] = clean[0, 0, expert] + fresh * spread[0, 0, expert]
        is_chosen = (again.topk(k).indices == expert).any(-1)
        # 40000 draws stray by at most 0.0025.
        assert abs(float(ours[expert]) - float(is_chosen.double().mean())) < 0.01


def test_the_noisy_balance_loss_is_nought_where_importance_and_load_are_even():
    moe = moe_of("noisy-topk", experts=4, experts_per_token=1)
    # Each token sure of its own expert, all experts in turn: the same importance and load for each.
    logits = torch.cat((40 * torch.eye(4, dtype=torch.float64).repeat(2, 1), torch.zeros(8, 4).double()), -1)[None]
    even = route(moe, logits, torch.zeros(1, 8, 4, dtype=torch.float64))
    torch.testing.assert_close(even.balance, torch.zeros(1, dtype=torch.float64), rtol=0, atol=1e-9)
    # All for one expert: CV² of (8, 0, 0, 0) is 3, for importance and for load.
    logits[..., :4] = torch.tensor([40.0, 0, 0, 0])
    one = route(moe, logits, torch.zeros(1, 8, 4, dtype=torch.float64))
    torch.testing.assert_close(one.balance, torch.full((1,), 6.0, dtype=torch.float64), rtol=1e-6, atol=0)


def test_in_evaluation_noisy_top_k_is_the_best_k_and_its_load_a_count():
    moe = moe_of("noisy-topk", experts_per_token=2)
    logits, _ = draws(moe)
    routing = route(moe, logits, None)
    best, choice = logits[..., :4].topk(2)
    assert torch.equal(routing.choice, choice)
    torch.testing.assert_close(routing.weight, best.softmax(-1))
    assert routing.balance.isfinite().all()


@pytest.mark.parametrize("router", ROUTERS)
def test_the_gradient_of_the_routers_weights_is_that_of_finite_differences(router):
    shape = shape_of(ModelConfig(name="tiny", width=16, experts=4, router=router))
    gate = Gate(shape).double()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 6, 16, generator=generator, dtype=torch.float64)
    noise = torch.randn(2, 6, noise_width(shape.moe), generator=generator, dtype=torch.float64)
    towards = torch.randn(2, 6, shape.moe.experts_per_token, generator=generator, dtype=torch.float64)
    names, weights = zip(*gate.named_parameters(), strict=True)

    def loss(*weights):
        logits = torch.func.functional_call(gate, dict(zip(names, weights, strict=True)), (x,))
        routing = route(shape.moe, logits, noise)
        return (routing.weight * towards).sum() + routing.balance.sum() + routing.z.sum()

    assert shape.moe.logits == sum(len(w) for w in weights)
    assert torch.autograd.gradcheck(loss, weights)


@pytest.mark.parametrize("router", ROUTERS)
def test_descending_the_balance_loss_spreads_the_tokens(router):
    shape = shape_of(ModelConfig(name="tiny", experts=8, router=router))
    moe = replace(shape.moe, capacity_factor=8.0 if shape.moe.capacity_factor else None)
    torch.manual_seed(0)
    gate = Gate(shape)
    x = torch.randn(4, 64, shape.width) + 1.0
    with torch.no_grad():
        gate.weight[0] += 0.1  # a favourite, since the inputs have a mean
    optimizer = torch.optim.Adam(gate.parameters(), lr=0.01)

    def most(routing):
        return float(choices(routing.choice, 8).sum(0).max() / (routing.choice >= 0).sum())

    before = most(route(moe, gate(x), None))
    for step in range(100):
        noise = torch.randn(4, 64, noise_width(moe), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        route(moe, gate(x), noise).balance.sum().backward()
        optimizer.step()
    after = most(route(moe, gate(x), None))
    assert before > 0.35
    assert after < 0.25


def test_a_bias_of_the_choice_gets_what_its_experts_load_lacks_and_no_gradient_of_the_loss():
    weight = torch.rand(6, 2, requires_grad=True)
    bias = torch.zeros(4, requires_grad=True)
    expert = torch.tensor([[0, 1], [0, 1], [0, 1], [0, 2], [0, 2], [0, 1]])
    out = with_load(weight, bias, expert)
    assert torch.equal(out, weight)
    out.backward(torch.ones_like(out))
    assert torch.equal(weight.grad, torch.ones(6, 2))
    # Six, four, two and none of twelve rows: three are even.
    assert bias.grad.sign().tolist() == [-1.0, -1.0, 1.0, 1.0]
    assert torch.equal(bias.grad / LOAD_UNIT, torch.tensor([12.0 - 24.0, 12.0 - 16.0, 12.0 - 8.0, 12.0]))
