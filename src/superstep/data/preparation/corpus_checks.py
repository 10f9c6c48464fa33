"""Checks of corpora and their settings; each error is one line."""

from __future__ import annotations

from superstep.errors import ConfigError, DataError
from superstep.plan.config import DataConfig, setting_text


def refuse_settings(config: DataConfig) -> None:
    """Raise a ConfigError for settings without a valid corpus."""
    if not 0 < config.validation_fraction < 1:
        raise ConfigError(
            f"data.validation_fraction = {config.validation_fraction} is no share of the documents; "
            "set it between 0 and 1, for example 0.02."
        )
    if config.sequence_tokens < 1:
        raise ConfigError(f"data.sequence_tokens = {config.sequence_tokens} is no length; set it to 1 or more.")


def refuse_short(config: DataConfig, train_tokens: int, validation_tokens: int) -> None:
    """Raise a DataError for a split shorter than one sequence and the token after it."""
    length = config.sequence_tokens
    need = length + 1 if config.packed else 2
    for split, tokens, mend in (("train", train_tokens, "lower"), ("validation", validation_tokens, "raise")):
        if tokens < need:
            raise DataError(
                f"data.corpus has {tokens} {split} tokens, but {setting_text('data.sequence_tokens', length)} needs "
                f"{need} for a sequence and its targets; lower data.sequence_tokens, add text, or {mend} "
                f"data.validation_fraction = {config.validation_fraction}."
            )


def refuse_one_document(config: DataConfig, train_documents: int) -> None:
    """Raise a DataError for a document mask on a text of one document."""
    if config.is_masked and train_documents < 2:
        raise DataError(
            "data.document_mask = true keeps documents apart, and data.corpus is one document; give each its own file, "
            "or a line of a .jsonl file, or set data.document_mask = false."
        )
