"""Structured output: the allowed tokens after each token, by a JSON schema, a regular expression or a grammar.

llguidance does the work (Earley's parser over derivatives of regular expressions, along the trie of all tokens). Its
cost is limited by counts, so that a schema made to explode is refused on any machine.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from threading import Lock

import llguidance
import numpy as np
from numpy.typing import NDArray

from superstep.data.tokenizer import Tokenizer
from superstep.errors import ConfigError
from superstep.serve.scheduling.request import Constraint
from superstep.serve.text.detokenize import TokenTexts

MOST_CHARS = 262_144
"""Of a schema or a grammar."""

MOST_KEPT = 64
"""Cached compiled grammars."""

TRIED = 4
"""Tokens of a trial answer, before a grammar is accepted."""

SPACES = r"[ \n\t]{0,40}"
"""White space in JSON, limited so that a model cannot fill its answer with it."""

LIMITS = llguidance.LLParserLimits(
    max_items_in_row=2_000,
    initial_lexer_fuel=1_000_000,  # some 20 ms
    step_lexer_fuel=50_000,  # 0.15 s at the worst; the library's own 200,000 let an expression take 1.5 s
    step_max_items=50_000,
    max_lexer_states=50_000,  # some 100 MB
    max_grammar_size=100_000,
    verbose_errors=False,
)
"""Limits of one grammar, before its first token and at each token."""


class GrammarMatcher:
    """The grammar of one answer. Not thread-safe.

    Args:
        core: the library's matcher, owned by this object.
        vocab: of the model: bits of the mask.
    """

    def __init__(self, core: llguidance.LLMatcher, vocab: int) -> None:
        self._core = core
        self._mask = np.zeros((vocab + 31) // 32, dtype=np.int32)
        self._is_known = False

    @property
    def is_done(self) -> bool:
        """Whether the answer must end here."""
        return self._core.is_stopped()

    @property
    def may_end(self) -> bool:
        """Whether the answer may end here."""
        return self._core.is_accepting()

    def mask(self) -> NDArray[np.int32]:
        """Allowed next tokens: bit ``k % 32`` of word ``k // 32`` for token k. Valid until the next call.

        Where the answer may end, the end of text is allowed; where it must end, nothing else.

        Raises:
            ConfigError: the grammar is too costly here; the request cannot go on.
        """
        if not self._is_known:
            self._core.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
            self._refuse_error()
            self._is_known = True
        return self._mask

    def advance(self, token: int) -> bool:
        """Advance by a token; False, without a change, where it is not allowed.

        Raises:
            ConfigError: as ``mask``.
        """
        return self.advance_all([token]) == 1

    def advance_all(self, tokens: Sequence[int]) -> int:
        """Advance by the longest allowed prefix of some tokens; its length.

        Raises:
            ConfigError: as ``mask``.
        """
        taken = self._core.try_consume_tokens(list(tokens))
        self._refuse_error()
        self._is_known = self._is_known and taken == 0
        return taken

    def legal(self, tokens: Sequence[int]) -> int:
        """How many of some tokens, from the first on, are allowed; the state does not change."""
        return self._core.validate_tokens(list(tokens))

    def rollback(self, tokens: int) -> None:
        """Undo the last tokens: a rejected draft."""
        if tokens:
            is_back = self._core.rollback(tokens)
            assert is_back, self._core.get_error()
            self._is_known = False

    def fork(self) -> GrammarMatcher:
        """An independent copy with the same state."""
        return GrammarMatcher(self._core.deep_copy(), 32 * len(self._mask))

    def _refuse_error(self) -> None:
        if self._core.is_error():
            raise ConfigError(f"the answer's form cannot be kept to: {_line(self._core.get_error())}.")


class Grammars:
    """Makes matchers for one tokenizer. Thread-safe.

    Args:
        tokenizer: of the model.
        vocab: of the model, if larger than the tokenizer's; tokens beyond that are never allowed.
        ends: tokens that end an answer, besides the tokenizer's end of text.
    """

    def __init__(self, tokenizer: Tokenizer, *, vocab: int | None = None, ends: Iterable[int] = ()) -> None:
        self.vocab = max(vocab or 0, tokenizer.vocab)
        stops = list(dict.fromkeys([tokenizer.end_of_text, *ends]))
        self._tokenizer = _library_tokenizer(tokenizer, self.vocab, stops)
        self._lock = Lock()
        self._kept: OrderedDict[Constraint, llguidance.LLMatcher] = OrderedDict()

    def matcher(self, constraint: Constraint) -> GrammarMatcher:
        """A matcher at the start of an answer.

        Raises:
            ConfigError: a schema or grammar is invalid, not supported, or too large; the message says why.
        """
        with self._lock:
            core = self._kept.pop(constraint, None)
        if core is None:
            core = self._compile(constraint)
        with self._lock:
            self._kept[constraint] = core
            while len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
            copy = core.deep_copy()
        return GrammarMatcher(copy, self.vocab)

    def _compile(self, constraint: Constraint) -> llguidance.LLMatcher:
        if len(constraint.text) > MOST_CHARS:
            raise ConfigError(f"{constraint.kind} has {len(constraint.text)} characters; give at most {MOST_CHARS}.")
        core = llguidance.LLMatcher(self._tokenizer, _grammar(constraint), log_level=0, limits=LIMITS)
        error = core.get_error() or _try_grammar(core)
        if error:
            raise ConfigError(f"{constraint.kind} cannot be used: {_line(error)}.")
        return core


BAD_BYTE = b"\xff"
"""Occurs in no UTF-8; the library marks special tokens with it."""


class _Spelled:
    """A tokenizer for llguidance where it cannot read the JSON: each token's bytes, and an encoder."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        words = TokenTexts(tokenizer)
        self.eos_token_id = tokenizer.end_of_text
        self.bos_token_id = None
        self.tokens = [raw if BAD_BYTE not in raw else b"" for raw in map(words.bytes_of, range(vocab))]
        self.special_token_ids = [token for token in range(tokenizer.vocab) if words.is_special(token)]
        self._added = tokenizer.core.get_added_tokens_decoder()
        self._by_bytes: dict[bytes, int] = {}
        for token, raw in enumerate(self.tokens):
            if not words.is_special(token):
                self._by_bytes.setdefault(raw, token)
        self._longest = max(map(len, self.tokens))

    def plain(self) -> Iterator[tuple[int, bytes]]:
        """Tokens of plain text, with their bytes."""
        return ((token, raw) for token, raw in enumerate(self.tokens) if raw and token not in self._added)

    def __call__(self, text: bytes | str) -> list[int]:
        """Encode greedily by the longest token; the tokenizer itself would put a space before the text."""
        rest = text.encode() if isinstance(text, str) else text
        tokens = []
        while rest:
            size = next((n for n in range(self._longest, 0, -1) if rest[:n] in self._by_bytes and len(rest) >= n), 0)
            if not size:
                break
            tokens.append(self._by_bytes[rest[:size]])
            rest = rest[size:]
        return tokens


def _library_tokenizer(tokenizer: Tokenizer, vocab: int, stops: list[int]) -> llguidance.LLTokenizer:
    """The library's reading of the tokenizer's JSON if its bytes equal ours, else our own."""
    spelled = _Spelled(tokenizer, vocab)
    try:
        read = llguidance.LLTokenizer(tokenizer.core.to_str(), n_vocab=vocab, eos_token=stops)
    except ValueError:  # the library does not support the decoder
        read = None
    if read is not None and all(read.decode_bytes([token]) == raw for token, raw in spelled.plain()):
        return read
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(spelled), eos_token=stops)


def _try_grammar(core: llguidance.LLMatcher) -> str:
    """The error after the first tokens of a trial answer, as the library expands expressions lazily."""
    core = core.deep_copy()
    for _ in range(TRIED):
        mask = np.frombuffer(core.compute_bitmask(), dtype=np.uint8)
        legal = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        if core.is_error() or core.is_stopped() or not len(legal):
            break
        core.consume_token(int(legal[len(legal) // 2]))
    return core.get_error()


def _grammar(constraint: Constraint) -> str:
    """The grammar in llguidance's format."""
    match constraint.kind:
        case "json_object":
            return _schema({"type": "object"})
        case "json_schema":
            return _schema(_read(constraint.text))
        case "regex":
            if (len(constraint.text) - len(constraint.text.rstrip("\\"))) % 2:  # the library would drop it
                raise ConfigError("regex ends with a backslash that escapes nothing; write two of them, or none.")
            return llguidance.LLMatcher.grammar_from_regex(constraint.text)
        case "lark":
            return llguidance.LLMatcher.grammar_from_lark(constraint.text)


def _schema(schema: dict[str, object] | bool) -> str:
    wanted = schema if isinstance(schema, dict) else ({} if schema else {"not": {}})
    try:
        return llguidance.LLMatcher.grammar_from_json_schema(wanted, overrides={"whitespace_pattern": SPACES})
    except ValueError as error:
        raise ConfigError(f"json_schema cannot be used: {_line(str(error))}.") from None


def _read(text: str) -> dict[str, object] | bool:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"json_schema is no JSON ({_line(str(error))}); give a schema as a JSON object.") from None
    if not isinstance(schema, dict | bool):
        raise ConfigError(f"json_schema is of type {type(schema).__name__}; give a schema as a JSON object.")
    return schema


def _line(error: str) -> str:
    """A library's error in one line."""
    if error.startswith("NoExtension"):
        return "no token of this tokenizer can begin such a text"
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    first = lines[0] if lines else "no reason was given"
    # For an unreadable expression, the reason stands below a drawing of the place.
    reason = next((line for line in lines[1:] if first.endswith(":") and line.startswith("error:")), "")
    return f"{first[:300]} {reason[:300]}".rstrip(". ")
