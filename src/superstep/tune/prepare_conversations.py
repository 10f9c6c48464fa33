"""Preparation of conversations: rendered by the model's template, encoded, masked, packed, and written to
files, once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Literal, TypeVar

from superstep.data.answer_writer import AnswerFiles
from superstep.data.preparation.corpus import source_files
from superstep.data.preparation.corpus_checks import refuse_settings
from superstep.data.preparation.prepare import PrepareProgress, Report, source_bytes, stamp, writing
from superstep.data.preparation.prepare_lock import ignore_line, take_turn
from superstep.data.sources.conversations import MediaSettings, read_settings
from superstep.data.token_files import FORMAT, Corpus, TokenKind, is_whole, open_corpus
from superstep.data.tokenizer import Tokenizer, load_tokenizer
from superstep.errors import ConfigError, DataError
from superstep.plan.config import RunConfig
from superstep.serve.build_engine import ends_of_text
from superstep.serve.text.chat_template import ChatTemplate
from superstep.tune.chat_template import template_of
from superstep.tune.config import SftConfig
from superstep.tune.conversation_records import preferences, record_error, records
from superstep.tune.loss_mask import Masker, TokenizedConversation
from superstep.tune.media_parts import ConversationMedia

T = TypeVar("T")

Kind = Literal["sft", "dpo"]

KINDS: Mapping[Kind, TokenKind] = {"sft": "answers", "dpo": "pairs"}
"""Kinds of token files."""

REPORT_EVERY = 64
"""Records between two reports."""

AT_ONCE = 64
"""Records that the template's process renders in one call: a call takes longer than a rendering."""


def _unheard(progress: PrepareProgress) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Conversations:
    """Settings of a preparation.

    Attributes:
        run: the run that will read it, with the initial model and tokenizer.
        sft: how records become sequences.
        vocab: of the model.
        kind: of records: answers to learn, or preferences between two.
    """

    run: RunConfig
    sft: SftConfig
    vocab: int
    kind: Kind = "sft"

    def prepare(
        self,
        folder: Path,
        report: Report = _unheard,
        *,
        tell: Callable[[str], None] = ignore_line,
        is_shared: bool = False,
    ) -> Corpus:
        """Make the files in a folder, or open those of an earlier equal call.

        One process at a time prepares a folder; another one waits and opens the result.

        Args:
            folder: for the files.
            report: receives the progress.
            tell: receives a line for the user while another process is waited for.
            is_shared: whether other runs may use the folder, so that it is not replaced.

        Raises:
            ConfigError, DataError: the settings, the tokenizer, the template or a record cannot be used, or a shared
                folder holds other tokens.
            Fault: the folder cannot be written, or the disk is full.
        """
        self._refuse_settings()
        tokenizer, template = self._tokenizer(), self._template()
        try:
            fingerprint = self._fingerprint(template)
            if not _holds(folder, fingerprint):
                with take_turn(folder, tell):
                    if not _holds(folder, fingerprint):  # no other process has made it meanwhile
                        if is_shared and is_whole(folder):
                            raise DataError(
                                f"data.cache = '{folder}' holds the tokens of other settings; name another folder, or "
                                "delete that one if no run needs it."
                            )
                        self._build(folder, tokenizer, template, fingerprint, report)
        finally:
            template.close()
        return open_corpus(folder)

    def is_prepared(self, folder: Path) -> bool:
        """Whether the folder holds the result of ``prepare``; raises as it does."""
        template = self._template()
        template.close()
        return _holds(folder, self._fingerprint(template))

    def _refuse_settings(self) -> None:
        refuse_settings(self.run.data)
        if not self.run.data.corpus:
            raise ConfigError("data.corpus is empty; name .jsonl or .parquet files of conversations.")
        if self.kind == "dpo" and self._reads_media:
            raise ConfigError(
                f"start = '{Path(self.run.model.name).parent}' reads more than text, and superstep tune dpo learns "
                "from text alone; name a decoder of text, or use superstep tune sft."
            )
        if self.kind == "dpo" and self.sft.too_long == "truncate":
            raise ConfigError(
                'sft.too_long = "truncate" would cut one answer of a preference and leave the other; set it to '
                '"refuse" or "drop".'
            )
        if self.kind == "dpo" and not self.run.data.packed:
            raise ConfigError(
                "data.packed = false gives each conversation a sequence, and the two of a preference share one; leave "
                "it out."
            )

    def _tokenizer(self) -> Tokenizer:
        named = self.run.data.tokenizer
        assert named is not None, "a start has a tokenizer"
        tokenizer = load_tokenizer(Path(named))
        if tokenizer.vocab > self.vocab:
            raise DataError(
                f"data.tokenizer = '{named}' has {tokenizer.vocab} ids, more than the model's vocabulary of "
                f"{self.vocab}; name the tokenizer.json of the model."
            )
        return tokenizer

    def _template(self) -> ChatTemplate:
        return template_of(Path(self.run.model.name).parent, self._tokenizer(), self.sft.template)

    def _fingerprint(self, template: ChatTemplate) -> str:
        data = self.run.data
        inputs = [stamp(file.path) for file in source_files(data.corpus)]
        shaped_by = [
            *(FORMAT, self.kind, template.sources, template.special, self._shaping()),
            *(self._ends(), stamp(Path(str(data.tokenizer))), data.sequence_tokens, data.packed),
            *(data.validation_fraction, inputs),
            *([asdict(self._media_settings())] if self._reads_media else []),
        ]
        return hashlib.sha256(json.dumps(shaped_by).encode()).hexdigest()

    def _shaping(self) -> dict[str, object]:
        """Settings that tokens depend on, without the template, which is hashed by its text."""
        return {name: value for name, value in asdict(replace(self.sft, template=None)).items() if name != "epochs"}

    @property
    def _reads_media(self) -> bool:
        """Whether the model reads pictures or sounds."""
        return self.run.data.source is not None

    def _media_settings(self) -> MediaSettings:
        data = self.run.data
        return read_settings(self.run.model, data.sequence_tokens, data.media_tokens)

    def _ends(self) -> tuple[int, ...]:
        return ends_of_text(Path(self.run.model.name).parent)

    def _build(
        self, folder: Path, tokenizer: Tokenizer, template: ChatTemplate, fingerprint: str, report: Report
    ) -> None:
        data = self.run.data
        settings = self._media_settings() if self._reads_media else None
        reads = None if settings is None else settings.open_input(str(Path(self.run.model.name).parent))
        masker = Masker(template, tokenizer, self._ends(), self.sft.history, ConversationMedia(reads, folder))
        written = None if settings is None else json.dumps(asdict(settings), indent=2) + "\n"
        is_packed = data.packed and settings is None  # samples are packed as they are read
        files = AnswerFiles(
            folder, tokenizer, data.sequence_tokens, packed=is_packed, kind=KINDS[self.kind], media=written
        )
        with writing(files, data):
            with ExitStack() as stack:
                files.open(stack)
                for number, item in self._items(masker, files, report):
                    parts = [(sample.ids, sample.is_answer) for sample in item]
                    answer_bytes = sum(sample.answer_bytes for sample in item)
                    media = json.dumps([(medium.path, medium.size) for medium in item[0].media])
                    files.append(number, parts, data.validation_fraction, answer_bytes, media)
                files.hold_out_one()
            for split in ("train", "validation"):
                if not files.items(split):
                    raise DataError(
                        f"data.corpus has no {split} conversation that fits: {files.summary()}; add conversations, or "
                        "raise data.sequence_tokens."
                    )
            files.arrange()
            chat = {"sources": template.sources, "special": template.special, "ends": sorted(masker.ends)}
            files.finish(fingerprint, chat)
            files.publish()

    def _items(
        self, masker: Masker, files: AnswerFiles, report: Report
    ) -> Iterator[tuple[int, list[TokenizedConversation]]]:
        """Units that stay in one sequence, with the number of their record: a sample, or the two of a preference."""
        total, read = source_bytes(self.run.data), 0
        for number, (where, items, read_bytes) in enumerate(self._records(masker)):
            read += read_bytes
            for item in items:
                fitting = self._fitting(item, where, files)
                if fitting is not None:
                    yield number, fitting
            if number % REPORT_EVERY == 0:
                report(PrepareProgress("encoding", read, total))

    def _records(self, masker: Masker) -> Iterator[tuple[str, list[list[TokenizedConversation]], int]]:
        """The place of each record, its units, and its bytes."""
        if self.kind == "sft":
            for some in _several(records(self.run.data.corpus)):
                for (record, read_bytes), samples in zip(some, masker.many([one for one, _ in some]), strict=True):
                    yield record.where, [[sample] for sample in samples], read_bytes
            return
        for pairs in _several(preferences(self.run.data.corpus)):
            each = masker.many([one for chosen, rejected, _ in pairs for one in (chosen, rejected)])
            for (chosen, _, read_bytes), one, other in zip(pairs, each[::2], each[1::2], strict=True):
                pair = [one[-1], other[-1]]
                if pair[0].ids == pair[1].ids:
                    raise record_error(chosen.where, "prefers an answer to itself", "leave the record out")
                yield chosen.where, [pair], read_bytes

    def _fitting(
        self, item: list[TokenizedConversation], where: str, files: AnswerFiles
    ) -> list[TokenizedConversation] | None:
        """A unit cut to a sequence, if it fits; a sample takes one place less than it has tokens."""
        room, needed = self.run.data.sequence_tokens, sum(len(sample.ids) - 1 for sample in item)
        media_room = self.run.data.media_tokens or room
        if needed <= room and item[0].media_tokens <= media_room:
            return item
        if self.sft.too_long == "refuse":
            refuse_large_media(item[0], where, media_room)
            what = f"{len(item[0].ids)} tokens" if len(item) == 1 else f"two answers of {needed} tokens together"
            raise record_error(
                where,
                f"has {what}, and data.sequence_tokens = {room} has no room for them",
                f'set data.sequence_tokens to {needed} or more, or sft.too_long to "drop"'
                + (' or "truncate"' if len(item) == 1 else ""),
            )
        cut = item[0].cut(room + 1, media_room)
        if self.sft.too_long == "drop" or not any(cut.is_answer):
            files.dropped += 1
            return None
        files.truncated += 1
        return [cut]


def refuse_large_media(sample: TokenizedConversation, where: str, room: int) -> None:
    """Check that the pictures or sounds of a conversation fit in a row; raises DataError otherwise."""
    counts = [stop - start for start, stop in sample.places]
    if sum(counts) <= room:
        return
    largest = max(range(len(counts)), key=counts.__getitem__)
    if counts[largest] > room:
        what, mend = f"'{sample.media[largest].path}', which takes {counts[largest]} tokens", "make it smaller"
    else:
        what, mend = f"pictures or sounds of {sum(counts)} tokens together", "cut the conversation"
    raise record_error(
        where,
        f"has {what}, and a row has room for {room} of them",
        f"{mend}, or raise data.media_tokens or data.sequence_tokens",
    )


def _several(every: Iterable[T]) -> Iterator[list[T]]:
    """Batches of records for one call of the template."""
    rest = iter(every)
    while some := list(islice(rest, AT_ONCE)):
        yield some


def _holds(folder: Path, fingerprint: str) -> bool:
    return is_whole(folder) and open_corpus(folder).manifest.fingerprint == fingerprint
