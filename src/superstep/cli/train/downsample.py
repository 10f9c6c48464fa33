"""A series of numbers of any length, in bounded memory."""

from __future__ import annotations

import math
from itertools import pairwise


class Curve:
    """The shape of a long series in bounded memory: means over intervals, which get longer with it."""

    CAPACITY = 1024

    def __init__(self) -> None:
        self._means: list[float] = []
        self._stretch: list[float] = []
        self._points_per_mean = 1

    def add(self, value: float) -> None:
        """Add a point; values that are not finite are skipped."""
        if not math.isfinite(value):
            return
        self._stretch.append(value)
        if len(self._stretch) == self._points_per_mean:
            self._means.append(sum(self._stretch) / len(self._stretch))
            self._stretch = []
        if len(self._means) == self.CAPACITY:
            pairs = zip(self._means[::2], self._means[1::2], strict=True)
            self._means = [(early + late) / 2 for early, late in pairs]
            self._points_per_mean *= 2

    def resample(self, count: int) -> list[float]:
        """At most ``count`` means, each over an equal interval of the whole series."""
        means = self._means
        count = min(count, len(means))
        edges = [len(means) * place // count for place in range(count + 1)] if count else []
        return [sum(means[start:end]) / (end - start) for start, end in pairwise(edges)]
