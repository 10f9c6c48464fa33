"""Tinker's clients get the log-probabilities that tokens were drawn with: exp(trainer's - sampler's) is an importance
weight at any temperature.
"""

from __future__ import annotations

import pytest
import torch

from superstep.model.axes import units
from superstep.model.decoder import Decoder
from superstep.model.files.hf import save_weights
from superstep.model.unit import global_tensors, initial, parameters
from superstep.plan.config import ModelConfig
from superstep.plan.model.sizes.lookup import shape_of
from superstep.serve.build_engine import open_engine
from superstep.serve.config import ServeConfig
from superstep.serve.scheduling.request import Sampling
from superstep.tune.tinker.sampler import PromptSampler, SampleRequest

V = 12
PROMPT = (3, 1, 4)
SAMPLES = 400


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """A sampler of a model with a small vocabulary, and the model's own log-probabilities behind the prompt, [V]."""
    folder, threads = tmp_path_factory.mktemp("small"), torch.get_num_threads()
    shape = shape_of(ModelConfig(name="tiny", vocab=V, layers=1))
    decoder = Decoder(shape).requires_grad_(False)
    for spec, param in parameters(decoder, units(shape)).values():
        # Larger than in training, so that one token is likelier than another.
        param.copy_(initial(spec, param.shape, 0) * (4 if param.dim() > 1 else 1))
    save_weights(folder, global_tensors(decoder, units(shape)), shape)
    engine = open_engine(folder, ServeConfig(context_tokens=16, compute="fp32", exact=True, pages=8))
    model_V = decoder(torch.tensor([PROMPT]))[0, -1].double().log_softmax(-1)
    yield PromptSampler(engine, None, most=1), model_V
    engine.end()
    torch.set_num_threads(threads)


def sampled(sampler, **how):
    """The log-probability that is given of each token, by token."""
    answered = []
    asked = SampleRequest(prompt=PROMPT, samples=SAMPLES, sampling=Sampling(max_tokens=1, **how))
    sampler.ask(asked, answered.append)
    while not sampler.is_idle:
        sampler.step()
    (answer,) = answered
    return {one.tokens[0]: one.logprobs[0] for one in answer.sequences}


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_importance_weights_turn_a_mean_over_samples_into_that_of_the_model(opened, temperature):
    sampler, model_V = opened
    given = sampled(sampler, temperature=temperature)
    assert sorted(given) == list(range(V)), "every token is drawn at least once"
    sampler_V = torch.tensor([given[token] for token in range(V)], dtype=torch.float64)
    drawn_V = (model_V / temperature).log_softmax(-1)
    assert torch.allclose(sampler_V, drawn_V, atol=1e-5)
    ratio_V, reward_V = (model_V - sampler_V).exp(), torch.arange(V, dtype=torch.float64)
    assert float(drawn_V.exp() @ ratio_V) == pytest.approx(1.0, abs=1e-5)
    assert float(drawn_V.exp() @ (ratio_V * reward_V)) == pytest.approx(float(model_V.exp() @ reward_V), abs=1e-4)


def test_what_was_cut_off_and_a_greedy_answer_count_too(opened):
    sampler, model_V = opened
    given, kept = sampled(sampler, temperature=0.7, top_k=3), model_V.topk(3).indices
    assert set(given) == set(kept.tolist())
    expected = (model_V[kept] / 0.7).log_softmax(-1).tolist()
    assert [given[token] for token in kept.tolist()] == pytest.approx(expected, abs=1e-5)
    assert sampled(sampler, temperature=0.0) == {int(model_V.argmax()): 0.0}, "it is certain"
