"""One answer as it is read: tokens in, text that may be given out, and the stop text that ends it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from superstep.serve.text.detokenize import Detokenizer, TextDelta, TokenTexts
from superstep.serve.text.stop_strings import StopFinder


@dataclass(frozen=True, slots=True)
class TextUpdate:
    """What one more token brought.

    Attributes:
        text: to be given out; may be empty.
        tokens: that it covers, after those of the news before. Log-probabilities are told with the text.
        stop: the stop text that ended the answer; None while it goes on.
    """

    text: str = ""
    tokens: int = 0
    stop: str | None = None


class AnswerReader:
    """Detokenizes one answer and looks for its stop texts. Not to be shared by threads.

    The arguments are those of ``Detokenizer`` and ``StopFinder``. Tokens wait while their text does. The last news
    covers those of a stop text that is left out: they were drawn.
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
        """The stop text that was found; the engine is then told to abort, and no token may be pushed."""
        return self._stop

    def push(self, token: int) -> TextUpdate:
        """Reads one more token."""
        return self._read(self._detokenizer.push(token))

    def end(self) -> TextUpdate:
        """What still waited when no token follows. A stop text that the last characters complete is found here too."""
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
