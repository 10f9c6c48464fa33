"""What is learnt of a conversation: its answers with their ends, found by rendering prefixes under any template."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from chats import CHATML, CONTROL, ENDLESS, FORGETFUL, HEADERS
from spellings import byte_level, gemma, llama
from superstep.data.preparation.records import RecordFields
from superstep.data.tokenizer import END_OF_TEXT, Tokenizer
from superstep.errors import DataError
from superstep.serve.text.chat_template import Chat, ChatTemplate
from superstep.serve.text.chat_tokens import ChatEncoder
from superstep.tune.chat_template import PLAIN
from superstep.tune.conversation_records import record_of
from superstep.tune.loss_mask import Masker

SOURCES = {"chatml": CHATML, "headers": HEADERS, "plain": PLAIN}


@cache
def with_control(make):
    """A tokenizer that has the control tokens of every template."""
    made = make()
    core = type(made.core).from_str(made.core.to_str())
    core.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in CONTROL])
    core.encode_special_tokens = True
    return Tokenizer(core, core.token_to_id(END_OF_TEXT), 1 + max(core.get_vocab(with_added_tokens=True).values()))


@cache
def template(source):
    return ChatTemplate({"default": source}, {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT})


def masker(source, make=byte_level, **rest):
    return Masker(template(source), with_control(make), **rest)


def record(**values):
    return record_of(RecordFields("chats.jsonl:7", values, 0))


def talk(*texts, system=None):
    messages = [{"role": ("user", "assistant")[k % 2], "content": text} for k, text in enumerate(texts)]
    return ([{"role": "system", "content": system}] if system else []) + messages


# Whitespace alone is no answer; a message may spell what a control token is written like.
words = st.sampled_from([*"ab <|>_é日\n:", "<|im_end|>", "the ", END_OF_TEXT])
texts = st.lists(words, max_size=9).map("".join)
answers = texts.filter(str.strip)


@settings(max_examples=40)
@given(st.sampled_from([byte_level, llama, gemma]), st.sampled_from(sorted(SOURCES)), st.data())
def test_answers_and_their_ends_are_learnt_and_nothing_else(make, name, data):
    # Where a later answer begins is found by the text before it, which this tokenizer alone gives back to the letter.
    turns = data.draw(st.integers(1, 3)) if make is byte_level else 1
    said = [data.draw(answers if k % 2 else texts) for k in range(2 * turns)]
    weights = [data.draw(st.sampled_from([0, 1])) for _ in range(turns)]
    messages = talk(*said, system=data.draw(st.sampled_from([None, "Be <|im_end|> brief."])))
    begin = len(messages) - len(said)
    for turn, weight in enumerate(weights):
        messages[begin + 2 * turn + 1]["weight"] = weight
    if not any(weights):
        with pytest.raises(DataError, match="no assistant turn"):
            record(messages=messages)
        return
    tokenizer = with_control(make)
    (sample,) = masker(SOURCES[name], make).samples(record(messages=messages))
    assert len(sample.ids) == len(sample.is_answer)
    plain = [{key: value for key, value in message.items() if key != "weight"} for message in messages]
    encoder = ChatEncoder(template(SOURCES[name]), tokenizer)
    end = {"chatml": "<|im_end|>", "headers": "<|eot_id|>", "plain": END_OF_TEXT}[name]
    place = 0
    for turn, weight in enumerate(weights):
        # A server gives the model exactly the tokens before the first answer.
        if turn == 0:
            prompt = encoder.tokens(Chat(messages=plain[: begin + 1]))
            assert list(sample.ids[: len(prompt)]) == prompt
            place = len(prompt)
        else:
            place += _told(sample, place, weights, encoder, plain[: begin + 2 * turn + 1])
        rest = list(sample.ids[place:])
        stop = place + rest.index(tokenizer.core.token_to_id(end)) + 1
        assert set(sample.is_answer[place:stop]) == {weight}
        learnt = tokenizer.decode(list(sample.ids[place : stop - 1]))
        expected = said[2 * turn + 1].strip() if name == "headers" else said[2 * turn + 1]
        if make is byte_level:  # others cannot spell every character
            assert learnt.removeprefix(" " if name == "plain" else "") == expected
        place = stop
    assert not any(sample.is_answer[place:]), "nothing behind the last end of turn is learnt"
    assert sum(sample.is_answer) == sum(sample.is_answer[1:]), "the first token is nobody's target"


def _told(sample, place, weights, encoder, messages):
    """How many tokens lead from an answer to the next one: those that a prompt of the whole has there, and no more."""
    text = encoder.template.render(Chat(messages=messages))
    opens = {"<|im_start|>assistant\n": 0, "<|start_header_id|>assistant<|end_header_id|>\n\n": 0, "Assistant:": 0}
    (opening,) = (word for word in opens if text.endswith(word))
    size = 1
    while not encoder_text(encoder, sample.ids[place : place + size]).endswith(opening):
        size += 1
        assert place + size < len(sample.ids)
    assert not any(sample.is_answer[place : place + size])
    return size


def encoder_text(encoder, ids):
    return encoder._tokenizer.decode(list(ids))


def test_a_template_that_rewrites_history_is_refused_with_the_turn_or_split():
    messages = talk("a", "<think>b</think>c", "d", "<think>e</think>f")
    with pytest.raises(DataError) as caught:
        masker(FORGETFUL).samples(record(messages=messages))
    assert str(caught.value) == (
        "data.corpus: 'chats.jsonl:7' has turns before messages[3] that the chat template then shows otherwise: it "
        'rewrites history; give another template (sft.template), or learn each turn by itself (sft.history = "split").'
    )
    first, second = masker(FORGETFUL, history="split").samples(record(messages=messages))
    decode = with_control(byte_level).decode
    texts = [decode([i for i, is_answer in zip(s.ids, s.is_answer, strict=True) if is_answer]) for s in (first, second)]
    assert texts == ["<think>b</think>c<|im_end|>", "<think>e</think>f<|im_end|>"]
    assert "b</think>" not in decode(list(second.ids))
    # One turn has no history to rewrite.
    assert len(masker(FORGETFUL).samples(record(messages=messages[:2]))) == 1
    assert len(masker(FORGETFUL, history="split").samples(record(messages=talk("a", "b", "c", "d")))) == 1


REFUSED = {
    "no assistant turn to learn": {"messages": talk("a")},
    "begins with an answer, to nothing": {"messages": [{"role": "assistant", "content": "a"}]},
    r"has an empty answer, messages\[3\]": {"messages": talk("a", "b", "c", " ")},
    r"cannot be shown: messages\[0\].role = 'robot' is no role": {"messages": [{"role": "robot"}, *talk("a", "b")]},
    "has tools, which the chat template does not show": {"messages": talk("a", "b"), "tools": [{"type": "function"}]},
    "has no messages, and no prompt with a completion": {"text": "a"},
    "has text and messages in prompt and completion": {"prompt": "a", "completion": talk("a", "b")},
    "has an empty completion": {"prompt": "a", "completion": ""},
    "has messages that are a number": {"messages": 4},
    "has messages that are no JSON": {"messages": "["},
    "a weight is 0 or 1": {"messages": [*talk("a"), {"role": "assistant", "content": "b", "weight": 0.5}]},
}


@pytest.mark.parametrize("told", REFUSED)
def test_what_cannot_be_learnt_is_refused_by_its_line(told):
    with pytest.raises(DataError, match=r"^data.corpus: 'chats.jsonl:7' .*" + told) as caught:
        masker(CHATML).samples(record(**REFUSED[told]))
    assert "\n" not in str(caught.value)


def test_an_answer_that_no_token_ends_is_refused():
    with pytest.raises(DataError, match=r"messages\[1\], that the chat template does not end with a token"):
        masker(ENDLESS).samples(record(messages=talk("a", "b")))
    # Nor is it ended by a client who spells one.
    with pytest.raises(DataError, match="does not end with a token"):
        masker(ENDLESS).samples(record(messages=talk("a", "b<|im_end|>")))


def test_prompt_and_completion_are_learnt_as_they_are():
    tokenizer = with_control(byte_level)
    found = masker(CHATML)
    (sample,) = found.samples(record(prompt="2 + 2 =", completion=" 4<|im_end|>"))
    prompt, said = tokenizer.encode("2 + 2 ="), tokenizer.encode(" 4<|im_end|>")
    assert list(sample.ids) == [*prompt, *said, tokenizer.end_of_text]
    assert sample.is_answer == bytes([0] * len(prompt) + [1] * (len(said) + 1))
    assert found.ends == {tokenizer.end_of_text}
    (bare,) = found.samples(record(prompt="", completion="a"))
    assert bare.is_answer[0] == 0
    # As messages they are a conversation of which the completion is learnt.
    asked, answered = talk("a", "b", "c", "d")[:3], talk("", "d")[1:]
    (split,) = found.samples(record(prompt=asked, completion=answered))
    (whole,) = found.samples(record(messages=[*asked, *answered]))
    assert split.ids == whole.ids
    assert 0 < sum(split.is_answer) < sum(whole.is_answer)
    assert found.ends == {tokenizer.end_of_text, tokenizer.core.token_to_id("<|im_end|>")}
