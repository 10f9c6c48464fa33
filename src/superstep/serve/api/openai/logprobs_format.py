"""Log-probs of tokens in OpenAI's forms and vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from superstep.serve.api.generation import finite
from superstep.serve.api.text_protocol import TextProtocol
from superstep.serve.scheduling.request import TokenOutput


def token_text(token: int, words: TextProtocol) -> str:
    """The text of one token alone; parts of a character become U+FFFD."""
    return words.token_bytes(token).decode("utf-8", "replace")


def chat_logprobs(tokens: Sequence[TokenOutput], top: int, words: TextProtocol) -> dict[str, Any]:
    """Each sampled token in chat's form, with those that ended the answer, so that the log-probs match ``token_ids``
    and the usage.
    """

    def one(token: int, logprob: float) -> dict[str, Any]:
        spelt = words.token_bytes(token)
        return {"token": spelt.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(spelt)}

    return {
        "content": [
            one(output.token, output.logprob) | {"top_logprobs": [one(*likely) for likely in output.top[:top]]}
            for output in tokens
        ],
        "refusal": None,
    }


class PlainLogprobs:
    """Each token in the form of plain completions, with its place in the text so far."""

    def __init__(self, top: int, words: TextProtocol) -> None:
        self._top, self._words = top, words
        self._characters = 0

    def to_json(self, tokens: Sequence[TokenOutput], *, first: int | None = None) -> dict[str, Any]:
        """The next tokens. ``first``: a token before them without output: a prompt's first."""
        rows: list[tuple[int, TokenOutput | None]] = [] if first is None else [(first, None)]
        rows += [(output.token, output) for output in tokens]
        return {
            "tokens": [token_text(token, self._words) for token, _ in rows],
            "token_logprobs": [None if output is None else finite(output.logprob) for _, output in rows],
            "top_logprobs": [None if output is None else self._likeliest(output) for _, output in rows],
            "text_offset": [self._place(token) for token, _ in rows],
        }

    def _likeliest(self, output: TokenOutput) -> dict[str, float]:
        """By text; of tokens with the same text, the likeliest. The sampled one is among them."""
        likeliest: dict[str, float] = {}
        for token, logprob in (*output.top[: self._top], (output.token, output.logprob)):
            likeliest.setdefault(token_text(token, self._words), finite(logprob))
        return likeliest

    def _place(self, token: int) -> int:
        """Where the token's first character begins: characters are counted by their first bytes."""
        spelt = self._words.token_bytes(token)
        continues = bool(spelt) and spelt[0] & 0xC0 == 0x80
        place = self._characters - continues
        self._characters += sum(byte & 0xC0 != 0x80 for byte in spelt)
        return max(0, place)


def prompt_logprobs(tokens: Sequence[TokenOutput], top: int, words: TextProtocol) -> list[dict[str, Any] | None]:
    """Each token of the prompt in vLLM's form: None for the first; for others, by token id."""
    rows: list[dict[str, Any] | None] = [None]
    for output in tokens:
        row = {
            str(token): {"logprob": finite(logprob), "rank": rank, "decoded_token": token_text(token, words)}
            for rank, (token, logprob) in enumerate(output.top[:top], start=1)
        }
        own = {"logprob": finite(output.logprob), "decoded_token": token_text(output.token, words)}
        row.setdefault(str(output.token), own)
        rows.append(row)
    return rows


def ids(tokens: Sequence[TokenOutput]) -> list[int]:
    return [output.token for output in tokens]
