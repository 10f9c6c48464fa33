"""Reads one answer: tokens in, text out, up to the stop text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from superstep.serve.text.detokenize import Detokenizer, TextDelta, TokenTexts
from superstep.serve.text.stop_strings import StopFinder


@dataclass(frozen=True, slots=True)
class TextUpdate:
    """Result of one more token.

    Attributes:
        text: new text; may be empty.
        tokens: number of tokens of this text. Log-probabilities are reported with the text.
        stop: the stop text that ended the answer; None while it goes on.
    """

    text: str = ""
    tokens: int = 0
    stop: str | None = None


class AnswerReader:
    """Detokenizes one answer and finds its stop texts. Not thread-safe.

    The arguments are those of ``Detokenizer`` and ``StopFinder``. Tokens wait while their text does. The last update
    counts the tokens of a stop text that is left out: they were drawn.
    """

    def __init__(
        self,
        words: TokenTexts,
        stops: Sequence[str] = (),
        *,
        include_stop: bool = False,
        skip_special: bool = False,
        is_amid: bool = False,
    ) -> None:
        self._detokenizer = Detokenizer(words, skip_special=skip_special, is_amid=is_amid)
        self._finder = StopFinder(stops, include_stop=include_stop)
        self._waiting = 0
        self._stop: str | None = None

    @property
    def stop(self) -> str | None:
        """The stop text of the answer; the engine then aborts the request, and no token may follow."""
        return self._stop

    def push(self, token: int) -> TextUpdate:
        """Read one more token."""
        return self._read(self._detokenizer.push(token))

    def end(self) -> TextUpdate:
        """The remaining text after the last token. A stop text that it completes is found here too."""
        if self._stop is not None:
            return TextUpdate()
        news = self._read(self._detokenizer.end())
        if self._stop is not None:
            return news
        waiting, self._waiting = self._waiting, 0
        return TextUpdate(news.text + self._finder.end().text, news.tokens + waiting)

    def _read(self, piece: TextDelta) -> TextUpdate:
        self._waiting += piece.tokens
        if not piece.text:
            return TextUpdate()
        match = self._finder.push(piece.text)
        self._stop = match.stop
        if not match.text and match.stop is None:
            return TextUpdate()
        tokens, self._waiting = self._waiting, 0
        return TextUpdate(match.text, tokens, match.stop)
