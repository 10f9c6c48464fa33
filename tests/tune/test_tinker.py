"""Tinker's own client, unchanged, against our server: it learns, samples, saves, goes on, and is told what is wrong."""

import math
import os
import time

import httpx
import numpy as np
import pytest

from superstep.data.tokenizer import load_tokenizer
from superstep.http.body_validation import read_model
from superstep.model.files.peft_adapter import linears_of, read_adapter
from superstep.plan.config import ModelConfig
from superstep.plan.model.sizes.lookup import shape_of
from superstep.tune.tinker import futures as desks
from superstep.tune.tinker import request_schema
from superstep.tune.tinker import service as services
from superstep.tune.tinker.config import TinkerConfig
from superstep.tune.tinker.futures import QueueFull
from superstep.tune.tinker.saved_models import ABOUT
from superstep.tune.tinker.service import UnknownError

tinker = pytest.importorskip("tinker", reason="the official client is not installed")

from tinker import types  # noqa: E402

from tinkered import ADAM, TOKENS, WAIT_S, datum, learn, logprobs, quietly, running, write_base  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("tinker") / "base")


@pytest.fixture(scope="module")
def quiet():
    with quietly() as patch:
        yield patch


@pytest.fixture(scope="module")
def exact(folder, tmp_path_factory, quiet):
    """A client of a server in exact mode, found by the environment alone."""
    root = tmp_path_factory.mktemp("saved")
    config = TinkerConfig(
        folder=folder, name="base", root=root, compute="fp32", exact=True, context_tokens=96, models=3
    )
    with running(config) as (service, url):
        quiet.setenv("TINKER_BASE_URL", url)
        client = tinker.ServiceClient()
        client.root, client.server = root, service
        yield client
        client.close("success").result(timeout=WAIT_S)


@pytest.fixture
def make(exact, folder):
    """Makes models, which are gone after the test."""
    client = tinker.ServiceClient()

    def made(**how):
        asked = {"base_model": "base", "rank": 4, "seed": 7} | how
        return client.create_lora_training_client(**asked).result(timeout=WAIT_S)

    made.client = client
    yield made
    client.close("success").result(timeout=WAIT_S)
    deadline = time.monotonic() + WAIT_S
    while exact.server.models and time.monotonic() < deadline:
        time.sleep(0.05)  # they go once their turn comes
    assert not exact.server.models


def test_supervised_learning_lowers_the_loss(make):
    model = make()
    other = list(range(60, 75))
    weights = [0.0] * 6 + [1.0] * 8
    data = [datum(), datum(other, weights=weights)]
    losses = []
    for _ in range(16):
        found, updated = learn(model, data)
        first, second = (one["logprobs"].to_numpy() for one in found.loss_fn_outputs)
        assert (len(first), len(second)) == (len(TOKENS) - 1, len(other) - 1)
        said = -first.sum() - (second * np.array(weights)).sum()
        assert found.metrics["loss:sum"] == pytest.approx(said, rel=1e-5)
        assert updated.metrics["unclipped_grad_l2:mean"] > 0
        losses.append(found.metrics["loss:sum"])
    assert losses[-1] < losses[0] / 3, losses


def test_gradients_add_up_until_the_update(make):
    """Two requests and one update are what one request of both is; the client's own chunks are such requests."""
    together, apart = make(), make()
    data = [datum(TOKENS[:17]), datum(list(range(90, 107)))]
    learn(together, data)
    apart.forward_backward(data[:1], "cross_entropy")
    apart.forward_backward(data[1:], "cross_entropy")
    apart.optim_step(ADAM).result(timeout=WAIT_S)
    for mine, theirs in zip(logprobs(together, data), logprobs(apart, data), strict=True):
        assert np.allclose(mine, theirs, atol=1e-3)  # bits are those of a pass of as many rows
    many = [datum(list(range(n, n + 17))) for n in range(50)]
    before = learn(apart, many)[0].metrics["loss:sum"]
    assert learn(apart, many)[0].metrics["loss:sum"] < before


def test_a_loss_of_the_clients_own_is_learnt(make):
    """The client asks for log-probabilities and gives weights back: cross entropy in two passes."""
    one, other = make(), make()
    weights = [0.5] * (len(TOKENS) - 1)
    for _ in range(2):
        one.forward_backward_custom([datum()], lambda data, logp: (-0.5 * logp[0].sum(), {"mine:sum": 3.0}))
        one.optim_step(ADAM).result(timeout=WAIT_S)
        learn(other, [datum(weights=weights)])
    assert np.array_equal(logprobs(one, [datum()])[0], logprobs(other, [datum()])[0])


@pytest.mark.long
def test_reinforcement_learning_raises_the_reward(make):
    """The reward is the share of ids below 200 among the answer's."""
    model = make(rank=8)
    prompt = types.ModelInput.from_ints(TOKENS[:8])
    rewards, bits = [], []
    for step in range(20):
        sampler = model.save_weights_and_get_sampling_client()
        sampler = sampler.result(timeout=WAIT_S) if hasattr(sampler, "result") else sampler
        how = types.SamplingParams(max_tokens=6, temperature=1.0, seed=1000 * step, stop=[])
        answers = sampler.sample(prompt=prompt, num_samples=24, sampling_params=how).result(timeout=WAIT_S).sequences
        reward = [sum(token < 200 for token in one.tokens) / len(one.tokens) for one in answers]
        rewards.append(sum(reward) / len(reward))
        spread = float(np.std(reward)) + 1e-6
        data = []
        for one, gain in zip(answers, reward, strict=True):
            known, drawn = prompt.length - 1, len(one.tokens)
            data.append(
                datum(
                    [*prompt.to_ints(), *one.tokens],
                    logprobs=[0.0] * known + list(one.logprobs),
                    advantages=[0.0] * known + [(gain - rewards[-1]) / spread] * drawn,
                )
            )
        found, _ = learn(
            model, data, *(("ppo", {"clip_high_threshold": 1.3}) if step % 2 else ("importance_sampling",))
        )
        # At the first step after a save the policy is the sampler, to the bit.
        assert found.metrics["ratio:mean"] == 1.0
        for one, came in zip(answers, found.loss_fn_outputs, strict=True):
            bits.append(np.array_equal(np.float32(one.logprobs), came["logprobs"].to_numpy()[prompt.length - 1 :]))
    assert all(bits)
    assert len(bits) == 20 * 24
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.12, rewards


def test_saved_states_go_on_to_the_same_numbers(make, exact):
    model, data = make(), [datum(), datum(TOKENS[::-1])]
    for _ in range(3):
        learn(model, data)
    path = model.save_state("third").result(timeout=WAIT_S).path
    model.forward_backward(data, "cross_entropy").result(timeout=WAIT_S)  # gradients are no part of it
    again = make.client.create_training_client_from_state_with_optimizer(path).result(timeout=WAIT_S)
    fresh = make.client.create_training_client_from_state(path).result(timeout=WAIT_S)
    assert again.get_info().lora_rank == 4
    with pytest.warns(FutureWarning):
        model.load_state_with_optimizer(path).result(timeout=WAIT_S)
    for _ in range(2):
        mine, other = learn(model, data), learn(again, data)
        assert mine[0].metrics == other[0].metrics
        assert mine[1].metrics == other[1].metrics
    learn(fresh, data)
    learn(fresh, data)
    for one, two, three in zip(logprobs(model, data), logprobs(again, data), logprobs(fresh, data), strict=True):
        assert np.array_equal(one, two)
        assert not np.array_equal(one, three)  # whose moments began anew
    with pytest.raises(tinker.RequestFailedError, match="name = 'third' is taken; choose another"):
        model.save_state("third").result(timeout=WAIT_S)
    assert again.save_state("third").result(timeout=WAIT_S).path != path
    model.save_state("third", overwrite=True).result(timeout=WAIT_S)
    about = exact.root / path.removeprefix("tinker://") / ABOUT
    about.write_text(about.read_text().replace('"version": "', '"version": "0'))
    with (
        pytest.warns(FutureWarning),
        pytest.raises(tinker.RequestFailedError, match=r"the saved weights add to 'base' of digest 0.*serve that one"),
    ):
        model.load_state(path).result(timeout=WAIT_S)
    about.unlink()
    with (
        pytest.warns(FutureWarning),
        pytest.raises(tinker.RequestFailedError, match=r"is damaged: tinker\.json cannot be read"),
    ):
        model.load_state(path).result(timeout=WAIT_S)


def test_saved_weights_are_an_adapter_of_peft(make, exact, folder):
    model = make(train_mlp=False)
    for _ in range(3):
        learn(model, [datum()])
    path = model.save_weights_for_sampler("tuned").result(timeout=WAIT_S).path
    place = exact.root / path.removeprefix("tinker://")
    adapter = read_adapter(place, linears_of(shape_of(ModelConfig(name=str(folder / "config.json")))))
    assert {name.rpartition(".")[2] for name in adapter.parts} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    sampler = make.client.create_sampling_client(model_path=path).result(timeout=WAIT_S)
    base = make.client.create_sampling_client(base_model="base").result(timeout=WAIT_S)
    prompt = types.ModelInput.from_ints(TOKENS)
    tuned = sampler.compute_logprobs(prompt).result(timeout=WAIT_S)
    plain = base.compute_logprobs(prompt).result(timeout=WAIT_S)
    assert tuned[0] is None
    assert sum(tuned[1:]) > sum(plain[1:]) + 1
    assert np.array_equal(np.float32(tuned[1:]), logprobs(model, [datum()])[0])
    rest, state = tinker.RestClient(), model.save_state("state").result(timeout=WAIT_S).path
    listed = rest.list_checkpoints(model.model_id).result(timeout=WAIT_S).checkpoints
    assert [(one.checkpoint_type, one.tinker_path) for one in listed] == [("sampler", path), ("training", state)]
    assert rest.get_weights_info_by_tinker_path(state).result(timeout=WAIT_S).train_mlp is False
    rest.delete_checkpoint(model.model_id, "weights/state").result(timeout=WAIT_S)
    (left,) = rest.list_checkpoints(model.model_id).result(timeout=WAIT_S).checkpoints
    assert left.tinker_path == path
    part = sampler.compute_logprobs(prompt, prompt_logprobs_last_n=3).result(timeout=WAIT_S)
    assert part == [None] * (len(TOKENS) - 3) + tuned[-3:]


def test_sampling_does_what_it_is_told(make, folder):
    sampler = make.client.create_sampling_client(base_model="base").result(timeout=WAIT_S)
    prompt = types.ModelInput.from_ints(TOKENS[:4])

    def sample(samples=1, more=None, **how):
        told = types.SamplingParams(**({"max_tokens": 12, "seed": 5, "stop": []} | how))
        return sampler.sample(prompt, samples, told, **(more or {})).result(timeout=WAIT_S)

    one = sample().sequences[0]
    assert (len(one.tokens), one.stop_reason) == (12, "length")
    assert list(sample(3).sequences[0].tokens) == list(one.tokens)
    assert len({tuple(s.tokens) for s in sample(3).sequences}) == 3
    stopped = sample(stop=[int(one.tokens[3])]).sequences[0]
    first = list(one.tokens).index(one.tokens[3])
    assert list(stopped.tokens) == list(one.tokens)[: first + 1]
    assert stopped.stop_reason == "stop"
    text = load_tokenizer(folder / "tokenizer.json")
    word = text.decode([int(one.tokens[5])])
    spelt = sample(stop=[word]).sequences[0]
    assert word in text.decode(list(spelt.tokens))
    assert word not in text.decode(list(spelt.tokens[:-1]))
    assert list(spelt.tokens) == list(one.tokens)[: len(spelt.tokens)]
    assert spelt.stop_reason == "stop"
    told = sample(temperature=0.0, more={"topk_sample_logprobs": 3, "include_prompt_logprobs": True}).sequences[0]
    assert [row[0][0] for row in told.topk_logprobs] == list(told.tokens)
    assert all(len(row) == 3 for row in told.topk_logprobs)


BAD = [
    (lambda make: make(base_model="bas"), r"base_model = 'bas' is not served; did you mean 'base'\?"),
    (lambda make: make(rank=500), "lora_config.rank = 500 must be from 1 to 128"),
    (lambda make: make(train_mlp=False, train_attn=False), "the head takes no adapter here"),
    (lambda make: make(optimizer=types.DimuonOptimizerConfig()), "optimizer_config.type = 'dimuon' is not here"),
    (lambda make: make.client.create_training_client_from_state("tinker://a/weights/b").result(WAIT_S), "is not there"),
]


@pytest.mark.parametrize(("ask", "told"), BAD)
def test_a_model_that_cannot_be_is_refused(make, ask, told):
    with pytest.raises(tinker.RequestFailedError, match=told) as error:
        ask(make)
    assert error.value.category == types.RequestErrorCategory.User


def test_requests_that_cannot_be_are_refused_and_the_next_is_served(make):
    model = make()
    nan = datum(weights=[math.nan] * (len(TOKENS) - 1))
    cases = [
        (lambda: model.forward_backward([datum()], "dro"), "loss_fn = 'dro' is not here"),
        (
            lambda: model.forward_backward([datum([5, 900, 5])], "cross_entropy"),
            r"data\[0\].model_input holds token 900",
        ),
        (lambda: model.forward_backward([datum([5] * 200)], "cross_entropy"), "has 199 tokens; give 1 to 96"),
        (lambda: model.forward_backward([nan], "cross_entropy"), "holds NaN or infinity"),
        (lambda: model.forward_backward([datum()], "ppo"), "lacks 'logprobs', which ppo reads"),
        (
            lambda: model.optim_step(types.AdamParams(beta1=1.5)),
            "adam_params.beta1 = 1.5 must be at least 0 and below 1",
        ),
        (lambda: model.optim_step(types.DimuonParams(learning_rate=0.1)), "AdamW is the one optimizer here"),
        (lambda: model.save_state("../../etc"), r"name = '../../etc' must be letters"),
    ]
    for ask, told in cases:
        with pytest.raises(tinker.RequestFailedError, match=told):
            ask().result(timeout=WAIT_S)
    before = learn(model, [datum()])[0].metrics["loss:sum"]
    assert before > 0
    with pytest.raises(tinker.RequestFailedError, match="The gradients since the last update are gone") as error:
        model.forward_backward([datum(), datum(weights=[1e30] * 23)], "cross_entropy").result(timeout=WAIT_S)
    assert error.value.category == types.RequestErrorCategory.Server
    assert model.optim_step(types.AdamParams(learning_rate=0.0)).result(timeout=WAIT_S).metrics == {
        "unclipped_grad_l2:mean": 0.0
    }
    sampler = make.client.create_sampling_client(base_model="base").result(timeout=WAIT_S)
    how = types.SamplingParams(max_tokens=4)
    long = types.ModelInput.from_ints([5] * 96)
    with pytest.raises(tinker.RequestFailedError, match="prompt has 96 tokens, and the context has room for 96"):
        sampler.sample(long, 1, how).result(timeout=WAIT_S)
    with pytest.raises(tinker.RequestFailedError, match="prompt_alt_tokens_k is not here"):
        sampler.sample(types.ModelInput.from_ints([5, 6]), 1, how, prompt_alt_tokens_k=2).result(timeout=WAIT_S)
    with pytest.raises(tinker.BadRequestError, match="is none of tinker://MODEL/weights/NAME"):
        make.client.create_sampling_client(model_path="tinker://../../etc").result(timeout=WAIT_S)


def test_several_models_stand_side_by_side(make):
    """They share the base, and nothing else; a fourth has no room until a client is done."""
    one, two = make(seed=1), make(seed=2, rank=2)
    before = logprobs(two, [datum()])[0]
    base = make.client.create_sampling_client(base_model="base").result(timeout=WAIT_S)
    plain = base.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result(timeout=WAIT_S)
    assert np.array_equal(np.float32(plain[1:]), before)  # an adapter begins by adding nothing
    learn(one, [datum()])
    assert np.array_equal(logprobs(two, [datum()])[0], before)
    assert not np.array_equal(logprobs(one, [datum()])[0], before)
    make()
    with pytest.raises(tinker.RequestFailedError, match="3 models are there, as many as may be at once"):
        make()


def sample_body(number, **more):
    chunks = [{"type": "encoded_text", "tokens": [number + 1]}]
    told = {"prompt": {"chunks": chunks}, "sampling_params": {"max_tokens": 1}, "seq_id": 1} | more
    return read_model(request_schema.SampleBody, told)


def test_without_a_session_no_client_is_given_the_answer_of_another(exact):
    asked = [exact.server.sample(sample_body(number, base_model="base"), 100)[0] for number in range(2)]
    assert asked[0] != asked[1]
    results = [exact.server.desk.future(name).result(timeout=WAIT_S) for name in asked]
    assert all(result.body for result in results)


def test_in_a_session_a_request_that_comes_again_is_the_same(exact):
    service = exact.server
    session = service.create_session()
    number = service.create_sampling(
        request_schema.CreateSampling(session_id=session, sampling_session_seq_id=0, base_model="base")
    )
    again = [service.sample(sample_body(1, sampling_session_id=number), 100)[0] for _ in range(2)]
    assert again[0] == again[1]
    service.finish(session)
    with pytest.raises(UnknownError, match="it has ended, or was never begun"):
        service.sample(sample_body(1, sampling_session_id=number), 100)


def test_sessions_are_bounded_and_silent_ones_go_first(exact, monkeypatch):
    service = exact.server
    monkeypatch.setattr(services, "MOST_SESSIONS", len(service._sessions) + 2)
    first, second = service.create_session(), service.create_session()
    with pytest.raises(QueueFull, match="as many as may be at once"):
        service.create_session()
    service._sessions[first].heard_s -= 2 * services.SILENT_S
    third = service.create_session()
    with pytest.raises(UnknownError):
        service.hear(first)
    for session in (second, third):
        service.finish(session)


def test_a_full_server_answers_429_with_the_reason(exact, monkeypatch):
    monkeypatch.setattr(desks, "MOST_WAITING", 0)
    url = f"{os.environ['TINKER_BASE_URL']}/api/v1/asample"
    headers = {"X-API-Key": "tml-any", "Content-Type": "application/json"}
    chunks = [{"type": "encoded_text", "tokens": [1]}]
    body = {"prompt": {"chunks": chunks}, "sampling_params": {"max_tokens": 1}, "base_model": "base"}
    response = httpx.post(url, json=body, headers=headers)
    assert response.status_code == 429
    assert "requests of 0 bytes wait already" in response.json()["detail"]
