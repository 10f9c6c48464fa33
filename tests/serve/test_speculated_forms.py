"""Answers of a form are the same with guesses and without, and are of that form."""

import json
from random import Random

import pytest

from paged_toy import SIZE, PagedToy
from schemas import SCHEMAS, composed, valid
from spellings import byte_level
from superstep.serve.batch_generate import generate
from superstep.serve.compute.draft_model import DraftModel
from superstep.serve.drafting.speculate import NgramDrafter, Speculation
from superstep.serve.engine import InferenceEngine
from superstep.serve.scheduling.kv_pages import Pages
from superstep.serve.scheduling.request import Constraint, ModelInfo, Sampling
from superstep.serve.scheduling.step import Budget
from superstep.serve.text.grammar import Grammars
from superstep.serve.text_backend import make_matchers

PAGES, CONTEXT = 1200, 200
CLOSERS = ("}", "]", '"')


def answered(schemas, guesser):
    """The answers to an empty question in each form, and the engine's counters."""
    tokenizer = byte_level()
    vocab, end = tokenizer.vocab, tokenizer.end_of_text
    closers = [end, *(tokenizer.core.token_to_id(name) for name in CLOSERS)]
    matchers = make_matchers(Grammars(tokenizer, vocab=vocab), vocab)
    info = ModelInfo(name="toy", vocab=vocab, context_tokens=CONTEXT, end_of_text=(end,), version="v")
    budget = Budget(tokens=256, requests=24)
    engine = InferenceEngine(
        PagedToy(PAGES, vocab=vocab), info, Pages(PAGES, SIZE), budget, matchers, Speculation(guesser, 4)
    )
    asked = [
        Sampling(
            max_tokens=150,
            seed=number,
            temperature=0.7,
            logit_bias=tuple((token, 6.0) for token in closers),
            constraint=Constraint(kind="json_schema", text=json.dumps(schema)),
        )
        for number, schema in enumerate(schemas)
    ]
    answers = generate(engine, [[1, number % 7 + 2] for number in range(len(schemas))], asked)
    engine.pages.check([])
    return answers, engine.counters


def assert_guesses_change_nothing(schemas):
    tokenizer = byte_level()
    plain, _ = answered(schemas, None)
    small = DraftModel(PagedToy(PAGES, vocab=tokenizer.vocab), vocab=tokenizer.vocab, page_tokens=SIZE)
    for guesser in (NgramDrafter(), small):
        found, counters = answered(schemas, guesser)
        assert [(one.tokens, one.finish) for one in found] == [(one.tokens, one.finish) for one in plain]
        assert counters.accepted_tokens > 0
    whole = [(schema, answer) for schema, answer in zip(schemas, plain, strict=True) if answer.finish == "stop"]
    assert len(whole) > 0.8 * len(schemas)
    for schema, answer in whole:
        text = tokenizer.decode([token for token in answer.ids if token != tokenizer.end_of_text])
        assert valid(json.loads(text), schema), text


def test_answers_of_a_schema_are_those_without_guesses():
    assert_guesses_change_nothing(SCHEMAS[::2])


@pytest.mark.slow
def test_answers_of_two_hundred_schemas_are_those_without_guesses():
    assert_guesses_change_nothing([composed(Random(number)) for number in range(200)])
