"""The tokenizer gives back any text, is the same every time, and cuts long texts without a trace."""

import json

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from superstep.data.split_documents import spread_sample
from superstep.data.tokenizer import load_tokenizer, train_tokenizer
from superstep.errors import DataError

TEXT = [
    "def add(a, b):\n    return a + b\n\n\nclass Adder:\n    pass\n" * 20,
    "the cat sat on the mat. " * 30,
    *["a\n\n", "a\r\n", "a \n"] * 90,  # blanks that end a text are one word: a wrong cut would show
]
TRAINED = train_tokenizer(TEXT, 290)

texts = st.text(alphabet=st.one_of(st.sampled_from("ab'.1 \n\r\t\x85\u3000é🙂<|"), st.characters(codec="utf-8")))


@given(texts)
def test_decoding_gives_the_text_back(text):
    assert TRAINED.decode(TRAINED.encode(text)) == text


def test_a_batch_has_the_ids_of_each_text():
    assert TRAINED.encode_batch([TEXT[0], "", "a"]) == [TRAINED.encode(TEXT[0]), [], TRAINED.encode("a")]


@given(st.lists(st.text(alphabet="ab", min_size=1), max_size=60), st.integers(1, 40))
def test_a_sample_is_spread_evenly_and_keeps_to_its_size(documents, chars):
    kept = spread_sample(documents, chars)
    strides = [2**k for k in range(8)]
    fitting = [stride for stride in strides if sum(map(len, documents[::stride])) <= chars]
    expected = documents[:: fitting[0]] if fitting and documents[:: fitting[0]] else documents[:1]
    assert kept == expected


def test_training_is_deterministic_and_keeps_to_the_vocabulary():
    again = train_tokenizer(iter(TEXT), 290)
    assert again.core.to_str() == TRAINED.core.to_str()
    assert TRAINED.vocab == 290
    assert train_tokenizer(["ab"], 10_000).vocab == 258
    with pytest.raises(DataError, match=r"model.vocab = 256 is too small .* 257 or more"):
        train_tokenizer(TEXT, 256)


def test_no_text_becomes_a_special_token():
    assert TRAINED.end_of_text not in TRAINED.encode("a<|endoftext|>b")
    assert TRAINED.decode([TRAINED.end_of_text]) == "<|endoftext|>"


def test_saving_and_loading_keep_the_tokens(tmp_path):
    TRAINED.save(tmp_path / "tokenizer.json")
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert (loaded.vocab, loaded.end_of_text) == (TRAINED.vocab, TRAINED.end_of_text)
    assert loaded.encode_batch(TEXT) == TRAINED.encode_batch(TEXT)
    assert loaded.encode("<|endoftext|>") == TRAINED.encode("<|endoftext|>")


def test_truncation_and_padding_of_a_loaded_tokenizer_are_turned_off(tmp_path):
    core = tokenizers.Tokenizer.from_str(TRAINED.core.to_str())
    core.enable_truncation(3)
    core.enable_padding(length=8)
    core.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path / "tokenizer.json").encode(TEXT[0]) == TRAINED.encode(TEXT[0])


@pytest.mark.parametrize("end", ["<|endoftext|>", "</s>", "<|end_of_text|>", "<|im_end|>", None])
def test_the_end_of_text_of_a_loaded_tokenizer(tmp_path, end):
    core = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.add_special_tokens(["<|other|>"] if end is None else ["<|other|>", end])
    core.save(str(tmp_path / "t.json"))
    if end is None:
        with pytest.raises(DataError, match=r"t.json' has no end-of-text token; add one of <\|endoftext\|>"):
            load_tokenizer(tmp_path / "t.json")
    else:
        loaded = load_tokenizer(tmp_path / "t.json")
        assert (loaded.end_of_text, loaded.vocab) == (3, 4)


def test_what_is_no_tokenizer_is_an_error(tmp_path):
    TRAINED.save(tmp_path / "tokenizer.json")
    with pytest.raises(DataError, match=r"is not a file; did you mean '.*tokenizer.json'\?"):
        load_tokenizer(tmp_path)
    with pytest.raises(DataError, match=r"is not a file; name the path of a tokenizer.json"):
        load_tokenizer(tmp_path / "nowhere")
    (tmp_path / "bad.json").write_text(json.dumps({"version": "1.0"}))
    with pytest.raises(DataError, match="cannot be loaded"):
        load_tokenizer(tmp_path / "bad.json")
