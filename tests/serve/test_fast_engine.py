"""An engine with packed and quantized weights and compiled operations says what a plain one says."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import model_folder
from superstep.errors import ConfigError
from superstep.model.files.peft_adapter import Adapter, LoraFactors, linears_of, write_adapter
from superstep.plan.model.hf_config import from_hf_config
from superstep.serve.batch_generate import generate
from superstep.serve.build_engine import open_engine
from superstep.serve.compute.kernels.build import build
from superstep.serve.config import ServeConfig
from superstep.serve.scheduling.request import Request, Sampling


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
    monkeypatch.setattr("superstep.serve.compute.runner.choose_backend.make_fast", lambda *args, **given: None)
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


def test_compiled_operations_leave_room_for_adapters(folder, compiled, tmp_path):
    """No linear is passed over by what is fused, and each has its own factors."""
    torch.manual_seed(1)
    parts = {
        name: LoraFactors(torch.randn(2, inputs) * 0.3, torch.randn(outputs, 2) * 0.3, 3.0)
        for name, (outputs, inputs) in linears_of(from_hf_config(folder / "config.json")).items()
    }
    adapters = {"all": Adapter(parts=parts)} | {name: Adapter(parts={name: part}) for name, part in parts.items()}
    for name, adapter in adapters.items():
        write_adapter(tmp_path / name, adapter)
    plain, built = (open_engine(folder, ServeConfig(compute="bf16", kernels=kernels)) for kernels in (None, compiled))
    asked = Sampling(max_tokens=4, temperature=0, ignore_eos=True, top_logprobs=3)
    without = generate(built, PROMPTS, asked)
    for name in adapters:
        found, expected = [], []
        for engine, answers in ((built, found), (plain, expected)):
            engine.adapters.load(name, tmp_path / name)
            answers += generate(engine, PROMPTS, asked, adapter=name)
        worst, compared = far(found, expected)
        assert worst < 0.15, name
        assert compared > len(PROMPTS), name
        # Of a single token, queries and keys change nothing.
        assert all(a.tokens[0].top != b.tokens[0].top for a, b in zip(found[1:], without[1:], strict=True)), name


@pytest.mark.parametrize("quantize", ["", "w8a8"])
def test_what_is_compiled_here_says_the_same_whatever_adapters_are_beside(folder, compiled, tmp_path, quantize):
    if build(compiled).library is None:
        pytest.skip("there is no compiled decoder here")
    engine = open_engine(folder, ServeConfig(compute="bf16", kernels=compiled, quantize=quantize, step_tokens=24))
    names = ["", "low", "high"]
    for name, rank in (("low", 2), ("high", 19)):
        parts = {
            linear: LoraFactors(torch.randn(rank, inputs) * 0.1, torch.randn(outputs, rank) * 0.1, 2.0)
            for linear, (outputs, inputs) in linears_of(from_hf_config(folder / "config.json")).items()
        }
        write_adapter(tmp_path / name, Adapter(parts=parts))
        engine.adapters.load(name, tmp_path / name)
    ways = Sampling(max_tokens=6, temperature=0.8, ignore_eos=True, prompt_logprobs=True)
    alone = {name: [generate(engine, [prompt], ways, adapter=name)[0] for prompt in PROMPTS] for name in names}
    for number, prompt in enumerate(PROMPTS):
        for place, name in enumerate(names):
            engine.add(Request(id=3 * number + place, prompt=tuple(prompt), sampling=ways, adapter=name))
    told = {number: [] for number in range(3 * len(PROMPTS))}
    while not engine.is_idle:
        for news in engine.step():
            told[news.request] += [*news.prompt, *news.tokens]
    for number, found in told.items():
        one = alone[names[number % 3]][number // 3]
        assert found == [*one.prompt, *one.tokens]


def test_exact_steps_in_one_call_take_no_adapter(folder, compiled, tmp_path):
    """Those that are named at the start are: torch computes then. One that comes later is refused, not passed over."""
    (name, (outputs, inputs)), *_ = linears_of(from_hf_config(folder / "config.json")).items()
    part = LoraFactors(torch.randn(2, inputs), torch.randn(outputs, 2), 2.0)
    write_adapter(tmp_path, Adapter(parts={name: part}))
    serve = ServeConfig(compute="bf16", exact=True, kernels=compiled)
    asked = Sampling(max_tokens=4, ignore_eos=True)
    before = generate(open_engine(folder, serve), PROMPTS, asked)
    engine = open_engine(folder, serve)
    if engine.model._forward.adapters.refusal:
        with pytest.raises(ConfigError, match="start it with"):
            engine.adapters.load("one", tmp_path)
    named = open_engine(folder, replace(serve, adapters=(("one", tmp_path),)))
    assert [answer.tokens for answer in generate(named, PROMPTS, asked)] == [answer.tokens for answer in before]
    generate(named, PROMPTS, asked, adapter="one")


def test_guesses_change_no_answer_of_the_compiled_decoder(folder, compiled):
    """A row's bits are its own there, so that a guess that stands is what would have been drawn."""
    plain = told(folder, kernels=compiled)
    for speculate in ("ngram", str(folder)):
        assert [a.tokens for a in told(folder, kernels=compiled, speculate=speculate)] == [a.tokens for a in plain]


def test_guesses_change_no_answer_with_an_adapter(folder, tmp_path):
    """The small model guesses without it, and both keep their keys in the same pages."""
    torch.manual_seed(2)
    parts = {
        name: LoraFactors(torch.randn(2, inputs) * 0.05, torch.randn(outputs, 2) * 0.05, 2.0)
        for name, (outputs, inputs) in linears_of(from_hf_config(folder / "config.json")).items()
    }
    write_adapter(tmp_path, Adapter(parts=parts))
    serve = ServeConfig(compute="fp32", exact=True, step_tokens=24, requests=4, adapters=(("one", tmp_path),))
    asked = Sampling(max_tokens=24, temperature=0.2, ignore_eos=True)
    answers = []
    for speculate in ("", "ngram", str(folder)):
        engine = open_engine(folder, replace(serve, speculate=speculate))
        answers.append([a.tokens for name in ("", "one") for a in generate(engine, PROMPTS, asked, adapter=name)])
        assert not speculate or engine.counters.accepted_tokens > 0
        engine.pages.check([])
    assert answers[0] == answers[1] == answers[2]
    assert answers[0][: len(PROMPTS)] != answers[0][len(PROMPTS) :]


def test_a_small_model_of_another_vocabulary_is_refused(folder, tmp_path):
    other = model_folder.write_folder(tmp_path / "other")
    with pytest.raises(ConfigError, match="and the served one has 256; name one of the same vocabulary, or ngram"):
        open_engine(folder, ServeConfig(speculate=str(other)))


def test_exact_answers_are_not_of_quantized_weights(folder):
    with pytest.raises(ConfigError, match=r"serve\.quantize = 'int8' with serve\.exact = true"):
        open_engine(folder, ServeConfig(compute="fp32", exact=True, quantize="int8"))


def test_an_unknown_format_is_refused(folder):
    with pytest.raises(ConfigError, match="use one of int8, w8a8, int4"):
        open_engine(folder, ServeConfig(quantize="q5"))
