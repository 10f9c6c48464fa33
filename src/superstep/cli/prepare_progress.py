"""Preparation of tokens with progress output."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from rich.console import Console

from superstep.data.preparation.prepare import PrepareProgress, Report, prepare, refuse_others
from superstep.data.token_files import Corpus, CorpusManifest
from superstep.errors import Fault
from superstep.observe.number_format import bytes_text, count_text
from superstep.plan.config import DataConfig

LOG_S = 10.0
"""Seconds between two lines of a log."""

REDRAW_S = 0.2
"""Seconds between two drawings of the one line of a terminal."""


def prepare_with_progress(
    data: DataConfig,
    vocab: int,
    folder: Path,
    stream: TextIO,
    *,
    is_shared: bool = False,
    note: Callable[[str], None] = lambda text: None,
) -> Corpus:
    """``prepare`` with its progress on ``stream``: a line that redraws itself, or occasional lines in a log.

    ``note`` receives the same, for other processes.
    """
    if is_shared:
        refuse_others(data, vocab, folder)  # before any message of preparation
    return show(
        f"the text of {', '.join(data.corpus) or 'the standard library'}",
        folder,
        stream,
        lambda report, tell: prepare(data, vocab, folder, report, tell=tell, is_shared=is_shared),
        note,
    )


def show(
    what: str,
    folder: Path,
    stream: TextIO,
    work: Callable[[Report, Callable[[str], None]], Corpus],
    note: Callable[[str], None] = lambda text: None,
) -> Corpus:
    """Run ``work`` with a progress report and a function that shows a line."""
    _write(stream, f"Preparing {what} in {folder} ...\n")
    note(what)
    line = ProgressLine(stream, note=lambda text: note(f"{what}; {text}"))
    try:
        corpus = work(line.show, lambda text: _write(stream, f"{text}\n"))
    finally:
        line.close()
        note("")
    _write(stream, f"  {summary(corpus.manifest)}\n")
    return corpus


class ProgressLine:
    """The progress of a preparation."""

    def __init__(
        self,
        stream: TextIO,
        clock: Callable[[], float] = time.monotonic,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._stream = stream
        self._note = note
        self._clock = clock
        self._is_live = stream.isatty() and not Console(file=stream).is_dumb_terminal
        self._stage = ""
        self._shown_s = clock()

    def show(self, progress: PrepareProgress) -> None:
        """Show it if it is due; a stage without a share always gets a line."""
        now_s = self._clock()
        is_new = progress.stage != self._stage and (self._is_live or not progress.done_bytes)
        if not is_new and now_s - self._shown_s < (REDRAW_S if self._is_live else LOG_S):
            return
        self._stage, self._shown_s = progress.stage, now_s
        self._note(_text(progress))
        _write(self._stream, f"\r\x1b[K  {_text(progress)}" if self._is_live else f"  {_text(progress)}\n")

    def close(self) -> None:
        """Clear the line."""
        if self._is_live:
            _write(self._stream, "\r\x1b[K")


def _write(stream: TextIO, text: str) -> None:
    """Write at once.

    Raises:
        Fault: the reader has left, or the output is full; the message names the output, not the tokens' folder.
    """
    try:
        stream.write(text)
        stream.flush()
    except OSError as error:
        reason = "the program that reads it has ended" if isinstance(error, BrokenPipeError) else error.strerror
        raise Fault(f"standard output cannot be written: {reason}. Send it to a file, and start again.") from error


def _text(progress: PrepareProgress) -> str:
    if not progress.done_bytes:
        return f"{progress.stage} ..."
    share = min(progress.done_bytes / max(progress.total_bytes, 1), 1.0)
    return f"{progress.stage}: {share:.0%} of {bytes_text(progress.total_bytes)}"


def summary(manifest: CorpusManifest) -> str:
    """The prepared tokens, and the skipped records."""
    tokens = manifest.train_tokens + manifest.validation_tokens
    if manifest.kind != "text":
        conversations = manifest.train_documents + manifest.validation_documents
        too_long = [(manifest.dropped, "dropped"), (manifest.truncated, "truncated")]
        over = ", ".join(f"{count} {what}" for count, what in too_long if count)
        return f"{conversations:,} conversations of {count_text(tokens)} tokens, {_share(manifest)} of them learned" + (
            f"; too long: {over}" if over else ""
        )
    nulls = manifest.null_records
    over = f"; {nulls} record{'' if nulls == 1 else 's'} with null text skipped" if nulls else ""
    return f"{count_text(tokens)} tokens, {bytes_text(manifest.text_bytes)} of text{over}"


def _share(manifest: CorpusManifest) -> str:
    """Answer tokens as a share of all."""
    learnt = manifest.text_bytes / manifest.bytes_per_token
    return f"{learnt / max(manifest.train_tokens + manifest.validation_tokens, 1):.0%}"
