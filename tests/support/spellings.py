"""Tokenizers of every family that language models have, small enough to be made in a test."""

from functools import cache

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from superstep.data.tokenizer import END_OF_TEXT, Tokenizer, train_tokenizer

WORDS = (
    "the",
    "▁the",
    "▁",
    "▁▁",
    "▁a",
    "b",
    "é",
    "日本",
    "▁🙂",
    "<",
    ">",
    "{",
    "}",
    '"',
    ":",
    ",",
    "[",
    "]",
    "\n",
    "�",
)
SPECIAL = (END_OF_TEXT, "<|im_start|>", "<|im_end|>", "[TOOL_CALLS]")


def finished(core, added=()):
    core.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL])
    core.add_tokens([AddedToken(text, normalized=False) for text in ("<tool_call>", "é ", *added)])
    core.encode_special_tokens = True
    return Tokenizer(core, core.token_to_id(END_OF_TEXT), 1 + max(core.get_vocab(with_added_tokens=True).values()))


def pieces(decoder, *, byte_fallback=True):
    """A vocabulary as SentencePiece makes it, with a decoder."""
    names = [f"<0x{byte:02X}>" for byte in range(256)] if byte_fallback else []
    singles = [chr(code) for code in range(32, 127)]
    vocab = {name: k for k, name in enumerate(dict.fromkeys(["<unk>", *names, *WORDS, *singles]))}
    core = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=byte_fallback))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoder
    return finished(core)


@cache
def byte_level():
    """As GPT-2, Llama 3, Qwen: every byte is a character of its own alphabet."""
    return finished(train_tokenizer(["def add(a, b): return a + b\n" * 9, "the cat 日本 🙂 " * 9], 320).core)


@cache
def llama():
    """As Llama 2, Mistral 7B: bytes in a SentencePiece vocabulary, the first space put there by the tokenizer."""
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return pieces(decoders.Sequence(parts))


@cache
def gemma():
    """No space before the text."""
    return pieces(decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]))


@cache
def metaspace():
    """As T5."""
    return pieces(decoders.Metaspace(), byte_fallback=False)


@cache
def metaspace_fallback():
    """Bytes and a sign for the space, which is lost at the start alone."""
    parts = [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")]
    return pieces(decoders.Sequence(parts))


@cache
def metaspace_kept():
    """A sign for the space that is never put before the text."""
    return pieces(decoders.Metaspace(prepend_scheme="never"))


@cache
def undecoded():
    """No decoder at all: tokens are words."""
    core = tokenizers.Tokenizer(models.WordLevel({"<unk>": 0, "one": 1, "two": 2}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return finished(core)


@cache
def word_piece():
    """A decoder that looks at what follows."""
    return pieces(decoders.WordPiece(prefix="##"), byte_fallback=False)


@cache
def stripping():
    """A decoder that cuts off the start of each token, joins them and cuts off two spaces."""
    parts = [decoders.Replace("▁", " "), decoders.Strip("b", 1, 0), decoders.Fuse(), decoders.Strip(" ", 2, 0)]
    return pieces(decoders.Sequence(parts), byte_fallback=False)


FAMILIES = {
    make.__name__: make
    for make in (
        byte_level,
        llama,
        gemma,
        metaspace,
        metaspace_fallback,
        metaspace_kept,
        undecoded,
        word_piece,
        stripping,
    )
}
