"""A prepared folder of conversations with pictures or sounds, as samples: each conversation is one.

Beside the files of conversations of text (``data.conversation_stream``), each conversation alone in its sequence::

    media.json      the model's config.json and preprocessor_config.json, and the room of a row
    train.media     for each conversation a line of JSON: path and size of its pictures or sounds, in their order
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from superstep.data.batch import SPLITS, SplitName
from superstep.data.samples.ragged_rows import COUNTED
from superstep.data.samples.sample_file import SampleFile
from superstep.data.sources.media_input import TOKENS, MediaInput, Medium, row_fields, sample_sizes
from superstep.data.sources.picture_input import read_picture_input
from superstep.data.sources.sound_input import read_sound_input
from superstep.data.token_files import MEDIA_SETTINGS, Split, open_corpus
from superstep.errors import ConfigError, DataError
from superstep.numerics.loss import IGNORE
from superstep.plan.config import ModelConfig
from superstep.plan.model.hf_config import read_json
from superstep.plan.model.multimodal.audio_shape import AudioLanguageShape
from superstep.plan.model.multimodal.families import MultimodalShape, shape_in
from superstep.plan.sample_fields import TARGET

PREPROCESSOR = "preprocessor_config.json"


@dataclass(frozen=True, slots=True)
class MediaSettings:
    """How a folder was prepared.

    Attributes:
        config: the content of the model's ``config.json``.
        preprocessor: of its ``preprocessor_config.json``.
        tokens: of a row.
        media_tokens: those of them that may stand for pictures or sounds.
    """

    config: Mapping[str, Any]
    preprocessor: Mapping[str, Any]
    tokens: int
    media_tokens: int

    def open_input(self, place: str) -> MediaInput:
        """What the model reads.

        Args:
            place: the folder of these files, for errors.

        Raises:
            ConfigError: a file does not fit.
        """
        return make_input(shape_in(self.config, f"{place}/config.json: "), self.preprocessor, place)


def read_settings(model: ModelConfig, tokens: int, media_tokens: int | None) -> MediaSettings:
    """The settings of a model's conversations, from its folder.

    Args:
        model: named by its ``config.json``.
        tokens: of a row.
        media_tokens: those of them that may stand for pictures or sounds; None for all.

    Raises:
        ConfigError: a file cannot be read.
    """
    path = Path(model.name)
    beside, whole = path.with_name(PREPROCESSOR), path.with_name("processor_config.json")
    preprocessor: Mapping[str, Any] = read_json(beside) if beside.is_file() else {}
    if not preprocessor and whole.is_file():
        parts = read_json(whole)
        preprocessor = parts.get("image_processor") or parts.get("feature_extractor") or {}
    return MediaSettings(read_json(path), preprocessor, tokens, media_tokens or tokens)


def read_input(model: ModelConfig) -> MediaInput:
    """What the model of a folder reads; raises as ``read_settings`` and ``open_input`` do."""
    return read_settings(model, 1, 1).open_input(str(Path(model.name).parent))


def make_input(shape: MultimodalShape, preprocessor: Mapping[str, Any], place: str) -> MediaInput:
    """What a model of a shape reads; the arguments and errors are those of ``MediaSettings``."""
    where = f"{place}/preprocessor_config.json: "
    if isinstance(shape, AudioLanguageShape):
        return read_sound_input(shape, preprocessor, where)
    return read_picture_input(shape, preprocessor, where)


def open_conversations(folder: Path) -> SampleFile:
    """The samples of a prepared folder.

    Raises:
        DataError: it is not prepared, or its files differ.
    """
    corpus = open_corpus(folder)
    try:
        settings = MediaSettings(**json.loads((folder / MEDIA_SETTINGS).read_text(encoding="utf-8")))
        media = {split: (folder / f"{split}.media").read_text(encoding="utf-8").splitlines() for split in SPLITS}
        reads = settings.open_input(str(folder))
    except (OSError, TypeError, ValueError, ConfigError) as error:
        raise DataError(f"'{folder}' holds no whole conversations ({error}); prepare it again.") from None
    splits: dict[SplitName, Split] = {"train": corpus.train, "validation": corpus.validation}
    for split, lines in media.items():
        if len(lines) != len(splits[split].bounds) - 1:
            raise DataError(f"'{folder}' has {len(lines)} lines in {split}.media, and another number of conversations.")
    opened = _Conversations(folder, reads, splits, media)
    return SampleFile(
        path=folder,
        lengths={split: len(lines) for split, lines in media.items()},
        fields=row_fields(reads, settings.tokens, settings.media_tokens),
        function=opened.sample,
        size=opened.size,
    )


@dataclass(frozen=True, slots=True)
class _Conversations:
    """The conversations of both splits; a token's target is the next one, if that is learnt."""

    folder: Path
    reads: MediaInput
    splits: Mapping[SplitName, Split]
    media: Mapping[SplitName, Sequence[str]]

    def size(self, split: SplitName, index: int) -> dict[str, int]:
        start, stop = self.splits[split].bounds[index : index + 2].tolist()
        answers = self.splits[split].answers
        assert answers is not None
        counted = int(answers[start + 1 : stop].sum())
        return {**sample_sizes(self.reads, stop - start - 1, self._media(split, index)), COUNTED: counted}

    def sample(self, split: SplitName, index: int, noise: np.random.Generator) -> dict[str, Tensor]:
        del noise
        start, stop = self.splits[split].bounds[index : index + 2].tolist()
        answers = self.splits[split].answers
        assert answers is not None
        ids = torch.from_numpy(self.splits[split].tokens[start:stop].astype(np.int64))
        is_learnt = torch.from_numpy(answers[start + 1 : stop].astype(bool))
        tokens_S, targets_S = ids[:-1], torch.where(is_learnt, ids[1:], IGNORE)
        beside = self.reads.lay_out(tokens_S, self._media(split, index), self.folder)
        return {TOKENS: tokens_S, TARGET: targets_S, **beside}

    def _media(self, split: SplitName, index: int) -> list[Medium]:
        return [Medium(path, tuple(size)) for path, size in json.loads(self.media[split][index])]
