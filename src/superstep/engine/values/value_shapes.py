"""Shapes of what passes between units on a rank: fields of the batch, and what each unit returns."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from superstep.data.batch import TOKENS
from superstep.model.custom.inspect import UnitOutput, as_fields, pass_through
from superstep.model.custom.sample_groups import require_whole_groups
from superstep.model.unit import INPUT, Fields, UnitSpec, name_fields
from superstep.plan.model.axes import NEXT_TOKENS
from superstep.plan.resolution.resolve import Resolved


def example_rows(run: Resolved) -> dict[str, torch.Tensor]:
    """One row of the model's input and of each field, without memory."""
    if run.samples is None:
        tokens = torch.empty(1, run.config.data.sequence_tokens, dtype=torch.long, device="meta")
        return {INPUT: tokens, TOKENS: tokens}
    rows = {
        field.name: torch.empty(1, *field.dims, dtype=getattr(torch, field.dtype), device="meta")
        for field in run.samples.inputs
    }
    return {INPUT: rows[run.samples.reads], **rows}


def find_shapes(
    run: Resolved, specs: Sequence[UnitSpec], compute: torch.dtype, example: torch.Tensor | Fields | None
) -> tuple[dict[str, UnitOutput], tuple[UnitOutput, ...]]:
    """Shapes and dtypes on this rank, for one microbatch: of each field by name; and of each value, by its number.

    Value 0 is the input of the batch, value ``v`` the output of unit ``v - 1``. With sequence parallelism outputs have
    this rank's part of the sequence.

    Args:
        run: the resolved run.
        specs: the model's units.
        compute: the dtype of activations.
        example: one row of input, or of each field; None for the run's own data.

    Raises:
        ConfigError: a unit does not run on such fields.
    """
    plan = run.plan
    fields = example_rows(run) if example is None else name_fields(example)

    def own_rows(name: str, row: torch.Tensor) -> torch.Tensor:
        # Context-parallel ranks have a part of a sequence.
        is_shared = plan.mesh.cp > 1 and plan.shares(run.samples.reads if run.samples and name == INPUT else name)
        dims = (row.shape[1] // plan.mesh.cp, *row.shape[2:]) if is_shared else row.shape[1:]
        return torch.empty(plan.microbatch, *dims, dtype=row.dtype, device="meta")

    rows = {name: own_rows(name, row) for name, row in fields.items()}
    if run.decoder is not None:  # its shapes are known, and its routing depends on them
        tokens = rows[NEXT_TOKENS] = rows[INPUT]
        stream = torch.Size((*tokens.shape, run.decoder.width))
        outputs = (UnitOutput(tokens.shape, tokens.dtype), *[UnitOutput(stream, compute)] * len(specs))
    else:
        require_whole_groups(specs, run, "the model")
        with unset_fake_temporarily():  # meta tensors suffice, in a rehearsal too
            outputs = pass_through(specs, rows, compute, "the model")
    ways = plan.mesh.tp if plan.sequence_parallel else 1
    boundaries = outputs[0], *(UnitOutput(_sequence_part(x.shape, ways), x.dtype) for x in outputs[1:])
    return {name: UnitOutput(x.shape, x.dtype) for name, x in as_fields(rows, compute).items()}, boundaries


def _sequence_part(shape: torch.Size, ways: int) -> torch.Size:
    """[B, S, ...] with the sequence split."""
    return torch.Size((shape[0], shape[1] // ways, *shape[2:])) if ways > 1 else shape
