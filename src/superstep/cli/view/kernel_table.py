"""The implementation of each layer of a run, and the reason, as ``superstep view --kernels`` prints it."""

from __future__ import annotations

from collections.abc import Iterator

from superstep.comm.device import pick
from superstep.engine.attention.choose_attention import kernel_of
from superstep.engine.layers.implementation import Choice
from superstep.engine.tracing.trace_units import layers_of
from superstep.plan.resolution.resolve import Resolved
from superstep.train.weights.model import units_of

HEADINGS = ("unit", "layer", "class", "computes with", "why")


def kernel_table(run: Resolved) -> str:
    """A row for each layer and implementation, from the inside out; layers with their own code are left out."""
    specs, device = units_of(run), pick(0, run.config.plan.device)
    names = {unit: specs[unit].name for unit in range(len(specs))}
    if run.decoder is not None and len(specs) > 3:
        names[1] = f"{specs[1].name} to {specs[-2].name}"
    rows = [HEADINGS]
    for unit, choices in layers_of(run, specs, device).items():
        rows += [(names[unit], *row) for choice in choices for row in _rows(choice)]
    rows.append(("all", "", "attention", kernel_of(run, device), "plan, numerics.kernels"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines) + "\n"


def _rows(choice: Choice) -> Iterator[tuple[str, str, str, str]]:
    for implementation in choice.chosen:
        yield choice.path or "(whole)", choice.layer, implementation.name, implementation.why
