"""Tokens in, tokens out: whatever a model draws and an environment says, what is trained on is what was sampled."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spellings import byte_level, llama, metaspace
from superstep.grade.task import Message
from superstep.serve.scheduling.request import TokenOutput
from superstep.serve.text.chat_template import DEFAULT, ChatTemplate
from superstep.serve.text.chat_tokens import ChatEncoder
from superstep.tune.rl.rollout import Episode

PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETS = PLAIN.replace(
    "{{ m.content }}",
    "{% if not loop.last and '</think>' in m.content %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}",
)
TEMPLATES = {"plain": PLAIN, "forgets": FORGETS, "default": DEFAULT}
TOKENIZERS = {"byte level": byte_level, "llama": llama, "metaspace": metaspace}


@pytest.fixture(scope="module")
def encoders():
    templates = {name: ChatTemplate({"default": text}, {"bos_token": "<s>"}) for name, text in TEMPLATES.items()}
    found = {
        (template, tokenizer): ChatEncoder(templates[template], TOKENIZERS[tokenizer]())
        for template in TEMPLATES
        for tokenizer in TOKENIZERS
    }
    yield found
    for template in templates.values():
        template.close()


def told(ids):
    return [TokenOutput(token=token, drawn_logprob=-0.5 - at, logprob=0.0) for at, token in enumerate(ids)]


words = st.text(st.sampled_from("ab é日🙂<|im_end|>\n{}:"), max_size=12) | st.sampled_from(
    ["<|im_end|>", "</think>", " "]
)


@settings(max_examples=60)
@given(st.sampled_from(sorted(TEMPLATES)), st.sampled_from(sorted(TOKENIZERS)), words, st.data())
def test_ids_trained_are_ids_sampled_for_any_text_and_turns(encoders, template, tokenizer, said, data):
    tokens = TOKENIZERS[tokenizer]()
    end = tokens.core.token_to_id("<|im_end|>")
    now = Episode((Message("user", said),), encoders[template, tokenizer], tokens, [end])
    asked = []
    turns = data.draw(st.integers(1, 4))
    for turn in range(turns):
        # Any ids: bytes that are no text, control tokens in the middle, an answer that was cut off.
        ids = data.draw(st.lists(st.integers(0, tokens.vocab - 1).filter(lambda id: id != end), max_size=6))
        ids += tokens.encode(data.draw(words)) + ([end] if data.draw(st.booleans()) else [])
        ids = ids or [end]
        asked.append((now.prompt, tuple(ids)))
        message = now.answer(told(ids), "stop")
        assert message.content == tokens.decode(ids[:-1] if ids[-1] == end else ids)
        if turn + 1 < turns:
            now.observe([Message("user", data.draw(words))])
    answered = now.with_answer()
    trained = [
        (strand.tokens[:first], strand.tokens[first:last])
        for strand in answered.strands
        for first, last in strand.spans
    ]
    assert trained == asked
    assert [len(strand.logprobs) for strand in answered.strands] == [len(strand.drawn) for strand in answered.strands]
    assert answered.drawn_tokens == sum(len(ids) for _, ids in asked)
    # A strand only ever grows.
    for strand in answered.strands:
        prompts = [strand.tokens[:first] for first, _ in strand.spans]
        assert all(later[: len(sooner)] == sooner for sooner, later in pairwise(prompts))


def test_history_that_is_shown_as_it_was_goes_on_in_one_strand(encoders):
    tokens = byte_level()
    end = tokens.core.token_to_id("<|im_end|>")
    now = Episode((Message("user", "add"),), encoders["plain", "byte level"], tokens, [end])
    # A spelling that no tokenizer gives its own text: letter by letter.
    drawn = [id for letter in "the cat" for id in tokens.encode(letter)]
    assert drawn != tokens.encode("the cat")
    now.answer(told([*drawn, end]), "stop")
    now.observe([Message("tool", "<|im_end|>"), Message("user", "more")])
    now.answer(told(tokens.encode("b")), "length")
    (strand,) = now.with_answer().strands
    assert tokens.decode(list(strand.tokens)) == (
        "<|im_start|>user\nadd<|im_end|>\n<|im_start|>assistant\nthe cat<|im_end|>\n<|im_start|>tool\n<|im_end|>"
        "<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\nb"
    )
    # The end that the model drew is the template's; what the tool spelled is no control token.
    assert strand.tokens.count(end) == 4
    assert [turn.role for turn in now.with_answer().rollout.turns] == ["assistant", "tool", "user", "assistant"]
    assert now.with_answer().rollout.finish == "length"


def test_an_answer_that_was_cut_off_is_closed_by_the_template(encoders):
    tokens = byte_level()
    end = tokens.core.token_to_id("<|im_end|>")
    now = Episode((Message("user", "add"),), encoders["plain", "byte level"], tokens, [end])
    now.answer(told(tokens.encode("the")), "length")
    now.observe([Message("user", "on")])
    assert tokens.decode(list(now.prompt)).endswith(
        "the<|im_end|>\n<|im_start|>user\non<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_template_that_rewrites_history_starts_a_new_strand(encoders):
    tokens = byte_level()
    end = tokens.core.token_to_id("<|im_end|>")
    now = Episode((Message("user", "add"),), encoders["forgets", "byte level"], tokens, [end])
    now.answer(told([*tokens.encode("b</think>a"), end]), "stop")
    now.observe([Message("user", "more")])
    now.answer(told([*tokens.encode("a"), end]), "stop")
    now.observe([Message("user", "more")])
    now.answer(told([*tokens.encode("c"), end]), "stop")
    first, second = now.with_answer().strands
    assert tokens.decode(list(first.tokens)).endswith("assistant\nb</think>a<|im_end|>")
    assert tokens.decode(list(second.tokens)).startswith(
        "<|im_start|>user\nadd<|im_end|>\n<|im_start|>assistant\na<|im"
    )
    assert (len(first.spans), len(second.spans)) == (1, 2)


def test_the_space_that_a_template_puts_is_the_models_own(encoders):
    """Without a template of its own a model is told ``Assistant:`` and draws a space; the default one puts it there."""
    tokens = byte_level()
    now = Episode((Message("user", "add"),), encoders["default", "byte level"], tokens, [tokens.end_of_text])
    now.answer(told([*tokens.encode(" the cat"), tokens.end_of_text]), "stop")
    now.observe([Message("user", "more")])
    assert not now.with_answer().strands[1:]
    assert tokens.decode(list(now.prompt)) == (
        "User: add\n\nAssistant: the cat<|endoftext|>\n\nUser: more\n\nAssistant:"
    )


def test_attempts_at_a_task_share_its_prompt_and_nothing_else(encoders):
    tokens = byte_level()
    end = tokens.core.token_to_id("<|im_end|>")

    def attempt(now, said):
        now.answer(told([*tokens.encode(said), end]), "stop")
        now.observe([Message("user", f"more than {said}")])
        now.answer(told(tokens.encode("b")), "length")
        return now.with_answer()

    first = Episode((Message("user", "add"),), encoders["plain", "byte level"], tokens, [end])
    second = first.again()
    alone = Episode((Message("user", "add"),), encoders["plain", "byte level"], tokens, [end])
    assert first.prompt == second.prompt
    assert attempt(first, "the cat") != attempt(second, "a dog") == attempt(alone, "a dog")
