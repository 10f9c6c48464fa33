"""Checks of small units on a few rows of numbers, for errors that shapes do not show.

A row's output must depend on that row alone, and be the same each time; otherwise it would depend on the rows of a
layout's microbatch. Larger units are left to ``superstep prove``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from superstep.errors import ConfigError
from superstep.model.by_place.batch_norm import BatchNorm
from superstep.model.by_place.dropout import compute_by_place, run_with_noise
from superstep.model.meta import on_meta
from superstep.model.unit import UnitSpec, initial
from superstep.numerics.noise import SamplePlace

ROWS = 3
MOST_PARAMETERS = 2**18
MOST_NUMBERS = 2**16
"""Elements of an input; attention computes their square."""


def check_rows(spec: UnitSpec, likes: Sequence[Tensor], given: Mapping[str, object], where: str) -> None:
    """Check that a unit treats the rows of inputs like ``likes`` separately.

    Raises:
        ConfigError: it mixes them, or gives another output each time.
    """
    with on_meta():
        if any(isinstance(part, BatchNorm) for part in spec.build().modules()):
            return  # by design it mixes the rows of a group
    numbers = ROWS * max(like[:1].numel() for like in likes)
    with on_meta():
        parameters = sum(parameter.numel() for parameter in spec.build().parameters())
    if parameters > MOST_PARAMETERS or numbers > MOST_NUMBERS:
        return
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        outputs = _outputs(spec, likes, given)
    if outputs is None:
        return
    first, again, beside_others = outputs
    if not torch.allclose(first, again, rtol=1e-5, atol=1e-6):
        raise ConfigError(
            f"{where}: unit '{spec.name}' gives another output each time it runs on the same input, so that no two "
            "layouts would compute the same; leave out what it draws or counts."
        )
    if not torch.allclose(first[0], beside_others[0], rtol=1e-3, atol=1e-4):
        raise ConfigError(
            f"{where}: unit '{spec.name}' mixes the rows of a microbatch: the output of one changes with the others, "
            "so that the result would depend on the layout; let each row depend on itself alone."
        )


def _outputs(
    spec: UnitSpec, likes: Sequence[Tensor], given: Mapping[str, object]
) -> tuple[Tensor, Tensor, Tensor] | None:
    """The output of some rows, the same again, and that of the first among others; None where it cannot be computed."""
    generator = torch.Generator().manual_seed(0)
    with torch.device("cpu"):
        module = spec.build().to("cpu", torch.float32)
    for local, parameter in module.named_parameters():
        parameter.copy_(initial(spec.params[local], parameter.shape, 0))
    drawn = [_draw_rows(like, generator) for like in likes]
    rows, others = [rows for rows, _ in drawn], [others for _, others in drawn]
    current = compute_by_place(module)

    def run(inputs: Sequence[Tensor]) -> Tensor:
        return run_with_noise(module, current, inputs, given, SamplePlace(is_training=True), f"{spec.name}.")

    try:
        first, again = (run([x.clone() for x in rows]) for _ in range(2))
        outputs = first, again, run(others)
    except (RuntimeError, ValueError, IndexError, TypeError, AssertionError):  # the unit may not accept such numbers
        return None
    is_known = all(out.shape[:1] == (ROWS,) and bool(out.isfinite().all()) for out in outputs)
    return outputs if is_known else None


def _draw_rows(like: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Rows of numbers, and the first of them among others."""
    shape = (ROWS, *like.shape[1:])
    if like.is_floating_point():
        rows, others = torch.randn((2, *shape), generator=generator)
    else:
        rows = torch.randint(0, 2, shape, dtype=like.dtype, generator=generator)
        others = 1 - rows
    others[0] = rows[0]
    return rows, others
