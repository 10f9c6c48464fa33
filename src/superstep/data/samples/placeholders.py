"""Tokens that stand for rows of another field of the same sample, such as the patches of a picture.

    PLACEHOLDERS = {"pixels": (60, 4)}        in a file of samples: each token 60 of ``tokens`` stands for 4 patches

An encoder makes one row of the decoder's stream of these rows (``model.multimodal.place_rows``), so a sample must have
as many of the tokens as its other field fills.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from superstep.data.batch import TOKENS
from superstep.errors import DataError, did_you_mean
from superstep.plan.sample_fields import TARGET, Placeholder, SampleFields

NAME = "PLACEHOLDERS"


def find_placeholders(fields: SampleFields, given: object, about: str) -> SampleFields:
    """The fields of a row with a file's PLACEHOLDERS.

    Args:
        fields: of a row.
        given: the file's; None for none.
        about: the file.

    Raises:
        DataError: they do not fit the fields.
    """
    if given is None:
        return fields
    if not isinstance(given, Mapping) or not all(_is_pair(pair) for pair in given.values()):
        raise DataError(
            f"{about}: {NAME} is {given!r}; give for each field a token, at least 1, and the number of rows that it "
            'stands for: {"pixels": (60, 4)}.'
        )
    if not fields.capacities:
        raise DataError(f"{about} has {NAME} and no CAPACITY; let it give the first dim of each field in a row.")
    names = [each.name for each in fields.fields if each.name not in (TARGET, TOKENS)]
    for name, (token, rows) in given.items():
        if name not in names:
            raise DataError(f"{about}: {NAME} has '{name}', which is no field{did_you_mean(name, names)}")
        if fields.capacities[name] % rows:
            raise DataError(
                f"{about}: CAPACITY['{name}'] = {fields.capacities[name]} is no multiple of the {rows} rows that "
                f"{NAME}['{name}'] gives to a token; make it one."
            )
        if sum(token == other for other, _ in given.values()) > 1:
            raise DataError(f"{about}: {NAME} gives token {token} to two fields; give each its own.")
    if TOKENS not in (each.name for each in fields.fields) or fields[TOKENS].dtype != "int64":
        raise DataError(f"{about} has {NAME} and no field '{TOKENS}' of whole numbers; give the samples one.")
    return replace(fields, placeholders={name: Placeholder(*pair) for name, pair in given.items()})


def check_placeholders(sample: Mapping[str, Tensor], fields: SampleFields, where: str) -> None:
    """Check that a sample has a token for each of its encoder's rows; raises DataError."""
    for name, (token, rows) in fields.placeholders.items():
        tokens, places = int((sample[TOKENS] == token).sum()), len(sample[name])
        if tokens * rows == places:
            continue
        what = "no token" if not tokens else f"{tokens} token{'s' if tokens > 1 else ''}"
        mend = f"{places // rows or 'none'} of these tokens, or {tokens * rows or 'no'} rows"
        raise DataError(
            f"{where} has {places} rows of '{name}' and {what} {token} in '{TOKENS}', and each stands for {rows} rows; "
            f"give it {f'a multiple of {rows} rows' if places % rows else mend}."
        )


def require_placeholders(read: Mapping[int, int], fields: SampleFields, where: str) -> None:
    """Check that a model reads encoders at the tokens that its samples have for them, and a row for each token.

    Args:
        read: for each token that the model reads an encoder at, the rows that the encoder gives of a whole row.
        fields: of a row of samples.
        where: the model's unit.

    Raises:
        DataError: both differ.
    """
    given = {
        placeholder.token: fields.capacities[name] // placeholder.rows
        for name, placeholder in fields.placeholders.items()
    }
    if sorted(read) != sorted(given):
        raise DataError(
            f"{where} reads encoders at the tokens {sorted(read)}, and the samples' {NAME} has {sorted(given)}; give "
            "both the same."
        )
    for token, rows in read.items():
        if rows != given[token]:
            raise DataError(
                f"{where} reads {rows} rows of an encoder at the tokens {token}, and CAPACITY and {NAME} of the "
                f"samples have room for {given[token]} of these tokens; let {NAME} give the number of rows that "
                "the encoder makes one of."
            )


def _is_pair(pair: object) -> bool:
    return isinstance(pair, tuple) and len(pair) == 2 and all(type(each) is int and each > 0 for each in pair)
