"""Refusal of settings that have no meaning for a run on samples of a user's own file."""

from __future__ import annotations

from superstep.errors import ConfigError
from superstep.plan.config import DataConfig, RunConfig
from superstep.plan.model.multimodal.families import has_own_units
from superstep.plan.sample_fields import is_prepared_folder

OF_TEXT = {
    "corpus": "names text",
    "tokenizer": "makes tokens of text",
    "text_field": "is of text",
    "nulls": "is of text",
    "sequence_tokens": "cuts text into sequences",
    "packed": "packs documents of text",
    "document_mask": "masks documents of text",
    "media_tokens": "is of conversations",
    "validation_fraction": "holds out documents of text",
    "cache": "keeps token files",
}
"""What each field of [data] does with text."""


def check_samples(config: RunConfig) -> None:
    """Check the settings of a run with ``data.source``.

    Raises:
        ConfigError: names the first field that has no meaning there.
    """
    source = config.data.source
    _check_media_tokens(config)
    if source is None:
        return
    if not has_own_units(config.model):
        raise ConfigError(
            f"data.source = '{source}' with model.name = '{config.model.name}': the decoder reads tokens of text; set "
            "model.source to a Python file with a model of these samples."
        )
    about = f"and the samples of data.source = '{source}' are no text; "
    default = DataConfig()
    for name, what in () if is_prepared_folder(source) else OF_TEXT.items():
        value = getattr(config.data, name)
        if value != getattr(default, name):
            raise ConfigError(f"data.{name} = {_text(value)} {what}, {about}leave it out.")
    if config.plan.tp > 1 and config.plan.sequence_parallel:
        raise ConfigError(
            f"plan.sequence_parallel = true splits sequences of tokens over plan.tp = {config.plan.tp}, {about}set "
            "plan.sequence_parallel to false."
        )
    if config.observe.sample is not None:
        raise ConfigError(f"observe.sample = '{config.observe.sample}' is a prompt of text, {about}leave it out.")


def _check_media_tokens(config: RunConfig) -> None:
    """Check that a row has room for its pictures or sounds, where it may hold any."""
    room, tokens, source = config.data.media_tokens, config.data.sequence_tokens, config.data.source
    if room is None or (source is not None and not is_prepared_folder(source)):
        return
    if source is None:
        raise ConfigError(
            f"data.media_tokens = {room} is of conversations with pictures or sounds, and model.name = "
            f"'{config.model.name}' reads text alone; leave it out."
        )
    if not 1 <= room <= tokens:
        raise ConfigError(
            f"data.media_tokens = {room} must be at least 1 and at most data.sequence_tokens = {tokens}: it is a part "
            "of a row."
        )


def _text(value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
        case tuple():
            return str(list(value))
        case _:
            return repr(value)
