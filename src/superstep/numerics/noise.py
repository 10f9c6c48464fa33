"""Noise by place: random numbers that belong to a place in the training, not to a rank.

A number is a function of the run's seed, the step, the name of what draws it, the number of its sample in the global
batch, and the number of its element in the whole tensor of that sample. So every layout draws the same numbers, a
recomputed forward draws them again, and so does a run that resumes.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter as Counts
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from superstep.errors import ConfigError
from superstep.kernels.philox import Counter, drop, random_words


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplePlace:
    """The place of a microbatch in the training.

    Attributes:
        seed: of the run.
        step: of the run, from 0.
        sample: the number of the microbatch's first sample in the global batch; the others follow it.
        samples: of the global batch.
        is_training: whether dropout drops, and batch norm uses the statistics of its groups.
    """

    seed: int = 0
    step: int = 0
    sample: int = 0
    samples: int = 1
    is_training: bool = False

    def counter(self, name: str) -> Counter:
        """The counter of the random words with a name. Evaluations draw other words than training."""
        digest = hashlib.blake2b(f"{self.seed}:{self.is_training}:{name}".encode(), digest_size=8).digest()
        return Counter(key=int.from_bytes(digest, "little"), step=self.step, sample=self.sample)


EVALUATION = SamplePlace()
"""The place outside of training: nothing is dropped, and other draws are the same for every input."""


@dataclass(frozen=True, slots=True)
class HeldElements:
    """The elements of a whole sample's tensor that are held here, as rows of consecutive ones.

    Attributes:
        firsts: the first element of each row, int64 [R], on the tensor's device.
        width: elements of a row.
    """

    firsts: Tensor
    width: int


FindHeld = Callable[[str, torch.Size, torch.device], HeldElements]
"""Finds the elements that are held here, from a name, the shape of a sample's tensor as it is here, and a device."""


def hold_whole(name: str, shape: torch.Size, device: torch.device) -> HeldElements:
    """All elements, in one row: for a rank that holds the whole tensor."""
    return HeldElements(torch.zeros(1, dtype=torch.int64, device=device), math.prod(shape))


class Noise:
    """The random numbers of one forward of a unit. The second use of a name in a forward draws other numbers.

    Args:
        place: of the microbatch.
        prefix: of all names, such as a unit's name with a dot.
        held: finds the elements of each tensor that are here.
        samples: the number of samples in the microbatch, the first dim of every tensor; None allows any number.
    """

    def __init__(
        self, place: SamplePlace, prefix: str = "", held: FindHeld = hold_whole, samples: int | None = None
    ) -> None:
        self.place = place
        self._prefix = prefix
        self._held = held
        self._samples = samples
        self._uses: Counts[str] = Counts()

    def dropout(self, name: str, x: Tensor, p: float, *, dims: int | None = None) -> Tensor:
        """x / (1 - p) where kept, and 0 elsewhere; ``x`` itself in evaluation.

        Args:
            name: of this use.
            x: [B, ...], samples first.
            p: the share of zeros.
            dims: the first dims of ``x`` that have draws of their own, and share them over the others: 1 for one draw
                per sample (stochastic depth), 2 for one per channel; None for all.

        Raises:
            ConfigError: samples are not first, or it is not known which part of a whole tensor ``x`` is.
        """
        mask = self.mask(name, x, p, dims=dims)
        return x if mask is None else mask(x)

    def mask(self, name: str, like: Tensor, p: float, *, dims: int | None = None) -> Callable[[Tensor], Tensor] | None:
        """``dropout`` as a function, so that a backward pass can call it again; None if nothing is dropped."""
        if not self.place.is_training or p == 0:
            return None
        drawn, name = like.shape[1:dims], self._full_name(name, like)
        held, counter = self._held(name, drawn, like.device), self.place.counter(name)
        spread = math.prod(like.shape[1:]) // math.prod(drawn)
        return lambda x: drop(x, counter, held.firsts, p, spread=spread)

    def uniform(self, name: str, like: Tensor) -> Tensor:
        """Uniform numbers between 0 and 1, both excluded: fp32, with the shape and device of ``like``, samples first.
        Raises as ``dropout`` does.
        """
        return to_uniform(self._words(self._full_name(name, like), like)).view(like.shape)

    def normal(self, name: str, like: Tensor) -> Tensor:
        """Normal numbers with mean 0 and variance 1, by Box and Muller (1958): fp32, likewise.

        Logarithm and cosine differ in their last bits from one processor to another.
        """
        name = self._full_name(name, like)
        radius, angle = (to_uniform(self._words(f"{name}/{part}", like, of=name)) for part in ("radius", "angle"))
        return (torch.sqrt(-2 * torch.log(radius)) * torch.cos(2 * math.pi * angle)).view(like.shape)

    def _full_name(self, name: str, x: Tensor) -> str:
        name = f"{self._prefix}{name}"
        self._uses[name] += 1
        name = name if self._uses[name] == 1 else f"{name}#{self._uses[name]}"
        if self._samples not in (None, len(x)):
            raise ConfigError(
                f"'{name}' draws for a tensor {list(x.shape)} in a microbatch of {self._samples} samples; let the "
                "samples be its first dim."
            )
        return name

    def _words(self, name: str, like: Tensor, of: str | None = None) -> Tensor:
        held = self._held(of or name, like.shape[1:], like.device)
        return random_words(self.place.counter(name), held.firsts, len(like), held.width)


def to_uniform(words: Tensor) -> Tensor:
    """From random words, int32, to fp32 between 0 and 1: the middles of 2^23 equal parts."""
    return ((words >> 9 & 2**23 - 1).float() + 0.5) * 2.0**-23


class CurrentNoise:
    """The noise of the forward that runs now, for modules whose arguments are not ours to choose.

    Attributes:
        noise: None outside of a forward.
    """

    def __init__(self) -> None:
        self.noise: Noise | None = None

    @contextmanager
    def during(self, noise: Noise) -> Iterator[None]:
        """Set it for one forward."""
        before, self.noise = self.noise, noise
        try:
            yield
        finally:
            self.noise = before
