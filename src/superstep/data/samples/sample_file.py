"""A user's file of samples: named tensors, by split and number.

    def length(split): ...                   "train" or "validation" to the number of samples
    def sample(split, index, noise): ...     {"pixels": float32 [1, 28, 28], "target": int64 []}
    INPUT = "pixels"                         the field that the first unit reads, where there are several

Both are functions of their arguments alone. All samples of a run have the same fields, of the same shapes, unless the
file has CAPACITY and ``size(split, index)``: then the first dim of a field may be any (``ragged_rows``). With
PLACEHOLDERS some tokens stand for rows of another field (``placeholders``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from superstep.data.batch import SPLITS, TOKENS, SplitName
from superstep.data.samples.noise import noise_of
from superstep.data.samples.placeholders import NAME as PLACEHOLDERS
from superstep.data.samples.placeholders import check_placeholders, find_placeholders
from superstep.data.samples.ragged_rows import Sizes, as_field, check_ragged, check_sizes, find_row_fields
from superstep.errors import DataError, did_you_mean
from superstep.numerics.loss import IGNORE
from superstep.plan.sample_fields import TARGET, SampleFields
from superstep.plan.user_file import first_line, load_functions, place_in

FORMS = {"length": "length(split)", "sample": "sample(split, index, noise)"}
"""The functions that a file must have, and how they are called."""

PROBES = 4
"""Samples of a split that are read twice."""

Sample = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFile:
    """A file of samples that has been run.

    Attributes:
        path: of the file.
        lengths: samples of each split.
        fields: of each row: one sample, or several ragged ones.
        function: the file's ``sample``.
        size: the file's ``size``; None where each row is one sample.
    """

    path: Path
    lengths: Mapping[SplitName, int]
    fields: SampleFields
    function: Callable[[SplitName, int, np.random.Generator], Sample]
    size: Callable[[SplitName, int], object] | None = None

    def read(self, split: SplitName, index: int, *, seed: int, epoch: int) -> Sample:
        """A sample of an epoch.

        Raises:
            DataError: the file's function fails, or this sample has other fields or shapes than the first.
        """
        sample = _call(self.path, self.function, f"sample('{split}', {index})", split, index, seed, epoch)
        where = f"data.source: {self.path}: sample('{split}', {index})"
        if (missing := [each.name for each in self.fields.fields if each.name not in sample]) or len(sample) > len(
            self.fields.fields
        ):
            known = ", ".join(each.name for each in self.fields.fields)
            what = f"has no field '{missing[0]}'" if missing else f"has the fields {', '.join(sample)}"
            raise DataError(f"{where} {what}, and the first sample has {known}; give every sample the same fields.")
        counted = int((sample[TARGET] != IGNORE).sum())
        if self.size is not None:
            check_ragged(sample, self.measure(split, index), self.fields, counted, where)
            check_placeholders(sample, self.fields, where)
            return sample
        for wanted in self.fields.fields:
            given = as_field(wanted.name, sample[wanted.name])
            if given != wanted:
                raise DataError(
                    f"{where} has '{wanted.name}' as {given}, and the first sample as {wanted}; give all samples of a "
                    "run one shape and dtype, or the file a CAPACITY and size(split, index)."
                )
        if counted < sample[TARGET].numel():
            raise DataError(f"{where} has the target {IGNORE}, which no loss counts; leave such samples out.")
        return sample

    def measure(self, split: SplitName, index: int) -> Sizes:
        """The first dim of each field of a ragged sample; raises DataError where ``size`` gives something else."""
        assert self.size is not None
        called = f"size('{split}', {index})"
        try:
            given = self.size(split, index)
        except (Exception, SystemExit) as error:
            raise DataError(
                f"data.source: {place_in(self.path, error)}: {called} fails: {first_line(error)}."
            ) from error
        return check_sizes(given, self.fields.capacities, f"data.source: {self.path}: {called}")

    def sizes(self, split: SplitName) -> list[Sizes]:
        """What ``measure`` gives for each sample of a split; empty where each row is one sample."""
        return [] if self.size is None else [self.measure(split, index) for index in range(self.lengths[split])]

    def digest(self) -> str:
        """A hash of the lengths and of some samples (``probes``) with seed 0, to detect that the data has changed."""
        whole = hashlib.sha256(repr(sorted(self.lengths.items())).encode())
        whole.update("".join(map(repr, sorted(self.fields.capacities.items()))).encode())
        whole.update(b"".join(repr(sorted(sizes.items())).encode() for split in SPLITS for sizes in self.sizes(split)))
        for split, index in self.probes():
            for name, values in sorted(self.read(split, index, seed=0, epoch=0).items()):
                whole.update(name.encode() + _bytes(values))
        return whole.hexdigest()[:16]

    def probes(self) -> Iterator[tuple[SplitName, int]]:
        """Some samples of each split: the first, the last, and between."""
        for split in SPLITS:
            last = self.lengths[split] - 1
            yield from ((split, index) for index in sorted({last * n // (PROBES - 1) for n in range(PROBES)}))


def open_samples(source: str | Path) -> SampleFile:
    """Run a file of samples, and read its first one.

    Raises:
        ConfigError: the file cannot be run, or lacks a function.
        DataError: its functions give something else than lengths and samples.
    """
    path = Path(source)
    names = load_functions(path, FORMS, kind="data", field="data.source")
    lengths = {split: _length(path, names["length"], split) for split in SPLITS}
    first = _call(path, names["sample"], "sample('train', 0)", "train", 0, 0, 0)
    fields = tuple(as_field(name, values) for name, values in first.items())
    reads = _reads(path, [each.name for each in fields if each.name != TARGET], names.get("INPUT"))
    whole, size = SampleFields(fields=fields, reads=reads), None
    if "CAPACITY" in names:
        size = names.get("size")
        whole = find_row_fields(whole, size, names["CAPACITY"], f"data.source: {path}")
    whole = find_placeholders(whole, names.get(PLACEHOLDERS), f"data.source: {path}")
    return SampleFile(path=path, lengths=lengths, fields=whole, function=names["sample"], size=size)


def check_pure(samples: SampleFile, seed: int) -> None:
    """Read some samples, then all of them again in another order from the file run anew, and compare.

    Raises:
        DataError: names the sample and the field that differs.
    """
    again = open_samples(samples.path)
    for split in SPLITS:
        if samples.lengths[split] != again.lengths[split]:
            raise DataError(
                f"data.source: {samples.path}: length('{split}') is {samples.lengths[split]}, and "
                f"{again.lengths[split]} when the file is run again; let it depend on the split alone."
            )
        for index, (size, new) in enumerate(zip(samples.sizes(split), again.sizes(split), strict=True)):
            if size != new:
                raise DataError(
                    f"data.source: {samples.path}: size('{split}', {index}) is {size}, and then {new}; let it "
                    "depend on split and index alone."
                )
    places = [
        (split, index, epoch) for split, index in samples.probes() for epoch in (0, 1) if split == "train" or not epoch
    ]
    before = [samples.read(split, index, seed=seed, epoch=epoch) for split, index, epoch in places]
    for (split, index, epoch), one in reversed(list(zip(places, before, strict=True))):
        other = again.read(split, index, seed=seed, epoch=epoch)
        for name in one:
            if _bytes(one[name]) != _bytes(other[name]):
                raise DataError(
                    f"data.source: {samples.path}: sample('{split}', {index}) gives another '{name}' when it is read "
                    "again; let it depend on split, index and noise alone, and draw all random numbers from noise."
                )


def _length(path: Path, function: Callable[[str], Any], split: SplitName) -> int:
    try:
        length = function(split)
    except (Exception, SystemExit) as error:
        raise DataError(
            f"data.source: {place_in(path, error)}: length('{split}') fails: {first_line(error)}."
        ) from error
    if not isinstance(length, int) or length < 1:
        raise DataError(
            f"data.source: {path}: length('{split}') gives {length!r}; return the number of its samples, at least 1."
        )
    return length


def _call(
    path: Path, function: Callable[..., Any], called: str, split: SplitName, index: int, seed: int, epoch: int
) -> Sample:
    try:
        sample = function(split, index, noise_of(seed, split, epoch if split == "train" else 0, index))
    except (Exception, SystemExit) as error:
        raise DataError(f"data.source: {place_in(path, error)}: {called} fails: {first_line(error)}.") from error
    if not isinstance(sample, Mapping) or not all(isinstance(values, Tensor) for values in sample.values()):
        got = type(sample).__name__
        if isinstance(sample, Mapping):
            name, values = next((n, v) for n, v in sample.items() if not isinstance(v, Tensor))
            got = f"'{name}' as {type(values).__name__}"
        raise DataError(f"data.source: {path}: {called} gives {got}; return a dict of tensors by their fields' names.")
    if TARGET not in sample:
        raise DataError(
            f"data.source: {path}: {called} has no field '{TARGET}'{did_you_mean(TARGET, list(sample))} "
            "The loss compares the model's output with it."
        )
    return sample


def _reads(path: Path, names: list[str], chosen: object) -> str:
    """The field that the first unit reads."""
    if chosen is not None:
        if chosen not in names:
            raise DataError(f"data.source: {path}: INPUT = {chosen!r} is no field{did_you_mean(str(chosen), names)}")
        return str(chosen)
    if TOKENS in names:
        return TOKENS
    if len(names) != 1:
        known = ", ".join(names) or "none"
        raise DataError(
            f"data.source: {path}: samples have these fields besides '{TARGET}': {known}. The first unit reads one; "
            "name it in the file, as INPUT = 'pixels'."
        )
    return names[0]


def _bytes(values: Tensor) -> bytes:
    return values.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if values.numel() else b""
