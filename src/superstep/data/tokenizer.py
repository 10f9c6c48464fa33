"""Tokenizer: byte-level BPE through the ``tokenizers`` library.

Text never becomes a special token: a document that spells ``<|endoftext|>`` is encoded as those characters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from superstep.data.interruptible import run_aside
from superstep.data.split_documents import short_words, spread_sample
from superstep.errors import DataError

END_OF_TEXT = "<|endoftext|>"
ENDS_OF_TEXT = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<|im_end|>")
"""Possible end-of-text tokens of a loaded tokenizer; the first one in its vocabulary is used."""

SMALLEST_VOCAB = 257
"""The 256 bytes and the end of text."""

SAMPLE_CHARS = 16_000_000
"""The most text to train a tokenizer on: 3 s on two cores. A quarter of it costs 1 % of bytes per token."""


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """Text to token ids and back.

    Attributes:
        core: the library's tokenizer.
        end_of_text: the id that follows every document.
        vocab: one more than the largest id.
    """

    core: tokenizers.Tokenizer
    end_of_text: int
    vocab: int

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without any special token."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, on all cores; takes tens of bytes of memory for each character."""
        return [encoding.ids for encoding in self.core.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, tokens: list[int]) -> str:
        """The text of some ids, with special tokens spelled out. Invalid UTF-8 becomes U+FFFD."""
        return self.core.decode(tokens, skip_special_tokens=False)

    def save(self, path: Path) -> None:
        """Write a ``tokenizer.json`` that Hugging Face's libraries load too."""
        path.write_text(self.core.to_str(pretty=True), encoding="utf-8")


def train_tokenizer(texts: Iterable[str], vocab: int) -> Tokenizer:
    """Byte-level BPE of at most ``vocab`` ids: fewer if the text has too few repeated pairs.

    Equal texts give equal tokenizers. Trains on at most ``SAMPLE_CHARS`` characters, spread evenly over them. Can be
    interrupted at any time.

    Raises:
        DataError: the vocabulary cannot hold every byte.
    """
    if vocab < SMALLEST_VOCAB:
        raise DataError(
            f"model.vocab = {vocab} is too small for a byte-level tokenizer, which needs 256 bytes and an "
            f"end of text; set model.vocab to {SMALLEST_VOCAB} or more."
        )
    core = tokenizers.Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sample = list(short_words(spread_sample(texts, SAMPLE_CHARS)))
    run_aside(lambda: core.train_from_iterator(sample, trainer))
    return _wrap(core, END_OF_TEXT)


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a ``tokenizer.json``, without its truncation and padding.

    Raises:
        DataError: the file is no tokenizer, or has none of ``ENDS_OF_TEXT``.
    """
    if not path.is_file():
        inside = path / "tokenizer.json"
        hint = f"did you mean '{inside}'?" if inside.is_file() else "name the path of a tokenizer.json."
        raise DataError(f"data.tokenizer = '{path}' is not a file; {hint}")
    try:
        core = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - the library raises no narrower class
        reason = str(error).partition("\n")[0]
        raise DataError(
            f"data.tokenizer = '{path}' cannot be loaded ({reason}); name a tokenizer.json of the tokenizers library."
        ) from None
    end = next((text for text in ENDS_OF_TEXT if core.token_to_id(text) is not None), None)
    if end is None:
        raise DataError(
            f"data.tokenizer = '{path}' has no end-of-text token; add one of {', '.join(ENDS_OF_TEXT)} to it."
        )
    core.no_truncation()
    core.no_padding()
    return _wrap(core, end)


def _wrap(core: tokenizers.Tokenizer, end: str) -> Tokenizer:
    core.encode_special_tokens = True  # the library's option to encode their spelling as plain text
    end_of_text = core.token_to_id(end)
    assert end_of_text is not None
    return Tokenizer(core, end_of_text, 1 + max(core.get_vocab(with_added_tokens=True).values()))
