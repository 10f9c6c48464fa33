"""An engine with packed and quantized weights and compiled operations says what a plain one says."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from superstep.errors import ConfigError
from superstep.serve.compute.kernels.build import build
from superstep.serve.load import ServeConfig, open_engine
from superstep.serve.offline import generate
from superstep.serve.request import Sampling


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of random weights as Hugging Face writes it: with wide ones, so that attention matters."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=128,
            initializer_range=0.15,
            tie_word_embeddings=False,
        )
    )
    path = tmp_path_factory.mktemp("model")
    model.to(torch.bfloat16).save_pretrained(path)
    return path


PROMPTS = [[(7 * n + 3 * k) % 256 for k in range(length)] for n, length in enumerate((1, 15, 16, 17, 40))]
TOKENS = 20


def told(folder, **settings):
    """What is told of the first tokens, where answers cannot yet have gone apart, and the answers."""
    engine = open_engine(folder, ServeConfig(compute="bf16", step_tokens=24, requests=4, **settings))
    return generate(engine, PROMPTS, Sampling(max_tokens=TOKENS, temperature=0, ignore_eos=True, top_logprobs=3))


def far(one, other):
    """The largest difference of log-probabilities of tokens that follow the same tokens."""
    worst, compared = 0.0, 0
    for mine, theirs in zip(one, other, strict=True):
        for a, b in zip(mine.tokens, theirs.tokens, strict=True):
            tops = dict(b.top)
            worst = max([worst, *(abs(value - tops[token]) for token, value in a.top if token in tops)])
            compared += 1
            if a.token != b.token:
                break
    return worst, compared


def test_fast_ways_say_what_the_plain_one_says(folder, compiled, monkeypatch):
    monkeypatch.setattr("superstep.serve.compute.choice.make_fast", lambda *args, **given: None)
    plain = told(folder)
    monkeypatch.undo()
    for settings, most in (({}, 0.15), ({"kernels": compiled}, 0.15), ({"kernels": compiled, "quantize": "w8a8"}, 0.5)):
        worst, compared = far(told(folder, **settings), plain)
        assert worst < most, settings
        assert compared > len(PROMPTS), settings


@pytest.mark.parametrize("quantize", ["", "w8a8"])
def test_what_is_compiled_here_says_the_same_whoever_else_asks(folder, compiled, quantize):
    if build(compiled).library is None:
        pytest.skip("there is no compiled decoder here")
    serve = ServeConfig(compute="bf16", kernels=compiled, quantize=quantize, step_tokens=24, requests=4)
    ways = Sampling(max_tokens=TOKENS, temperature=0.8, ignore_eos=True, top_logprobs=3)
    together = generate(open_engine(folder, serve), PROMPTS, ways)
    for prompt, answer in zip(PROMPTS, together, strict=True):
        engine = open_engine(folder, replace(serve, step_tokens=512))
        assert generate(engine, [prompt], ways)[0].tokens == answer.tokens
        assert generate(engine, [prompt], ways)[0].tokens == answer.tokens  # from the cache


def test_a_step_without_a_draw_computes_no_logits(folder, compiled):
    """A prompt longer than a step, alone: none of the first step's rows is asked for its logits."""
    for settings in ({"kernels": compiled}, {"kernels": compiled, "quantize": "w8a8"}):
        engine = open_engine(folder, ServeConfig(compute="bf16", step_tokens=24, requests=4, **settings))
        (answer,) = generate(engine, [list(range(60))], Sampling(max_tokens=3, temperature=0, ignore_eos=True))
        assert len(answer.ids) == 3


def test_exact_answers_are_not_of_quantized_weights(folder):
    with pytest.raises(ConfigError, match=r"serve\.quantize = 'int8' with serve\.exact = true"):
        open_engine(folder, ServeConfig(compute="fp32", exact=True, quantize="int8"))


def test_an_unknown_format_is_refused(folder):
    with pytest.raises(ConfigError, match="use one of int8, w8a8, int4"):
        open_engine(folder, ServeConfig(quantize="q5"))
