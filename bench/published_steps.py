"""Steps: published rows priced together, all readings of all rows in one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import numpy as np

from bench.published_rows import Change, IsNamed, Reading, Row, everyone, is_layer, readings
from superstep.cost.closed.efficiency import Efficiency
from superstep.cost.closed.estimate import Estimate, estimate
from superstep.cost.closed.framework import price_of, stack_fields, take
from superstep.errors import ConfigError
from superstep.hardware.units import Array


class Steps:
    """Rows that can be priced, and their readings.

    Attributes:
        rows: those that can.
        left_out: those that cannot, each with the reason.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        is_named: IsNamed = everyone,
        change: Change | None = None,
    ) -> None:
        self.rows: list[Row] = []
        self.left_out: list[tuple[Row, str]] = []
        self._readings: list[Reading] = []
        owner: list[int] = []
        for row in rows:
            try:
                found = readings(row, is_named=is_named(row))
            except ConfigError as error:
                self.left_out.append((row, str(error)))
                continue
            owner += [len(self.rows)] * len(found)
            self.rows.append(row)
            self._readings += [change(row, each) for each in found] if change else found
        self._owner = np.array(owner, dtype=int)
        if not owner:
            return
        self._is_layer = np.array([is_layer(self.rows[place]) for place in owner])
        self._decoders = stack_fields([each.decoder for each in self._readings])
        self._layouts = stack_fields([each.layout for each in self._readings])
        pairs = [(each.cluster, each.software) for each in self._readings]
        self._kinds = list(dict.fromkeys(pairs))
        places = {pair: place for place, pair in enumerate(self._kinds)}
        self._kind = np.array([places[pair] for pair in pairs], dtype=int)

    def estimates(self, efficiency: Efficiency) -> Estimate:
        """Every reading's step."""
        priced = [price_of(cluster, software, efficiency) for cluster, software in self._kinds]
        rates, stack = stack_fields([pair[0] for pair in priced]), stack_fields([pair[1] for pair in priced])
        return estimate(self._decoders, self._layouts, take(rates, self._kind), take(stack, self._kind))

    def parts(self, efficiency: Efficiency) -> Estimate:
        """Each row's step at its best reading, by part."""
        seconds, found = self._readings_s(efficiency), self.estimates(efficiency)
        order = np.lexsort((seconds, self._owner))
        best = order[np.searchsorted(self._owner[order], np.arange(len(self.rows)))]
        each = {part.name: np.broadcast_to(getattr(found, part.name), seconds.shape)[best] for part in fields(Estimate)}
        return Estimate(**each)

    def seconds(self, efficiency: Efficiency) -> Array:
        """Each row's step at its best reading."""
        each = self._readings_s(efficiency)
        best = np.full(len(self.rows), np.inf)
        np.minimum.at(best, self._owner, each)
        return best

    def _readings_s(self, efficiency: Efficiency) -> Array:
        if not self.rows:
            return np.zeros(0)
        found = self.estimates(efficiency)
        return found.step_s - np.where(self._is_layer, found.optimizer_s + found.data_s, 0.0)
