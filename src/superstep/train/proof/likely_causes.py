"""Likely causes of the first wrong value: a factor that gradients share, and instructions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median

from superstep.model.unit import UnitSpec
from superstep.program import instructions as ins
from superstep.program.instructions import Instruction, Program
from superstep.program.text import describe
from superstep.train.proof.compare import Difference

SAME_FACTOR = 1e-3
"""Relative distance of factors of tensors, and of a tensor from its multiple, that counts as one factor; in bf16 the
tolerance.
"""

MOST = 6
"""Most instructions that are named; more would hide that little is known."""


def hints(
    first: Difference, differences: Sequence[Difference], program: Program, specs: Sequence[UnitSpec]
) -> Iterator[str]:
    """Hints about the first wrong value, one line each."""
    same = [d for d in differences if (d.step, d.kind, d.against) == (first.step, first.kind, first.against)]
    wrong = {d.name for d in same if d.is_wrong}
    if first.name:
        yield _scale(same, wrong, first)
    elif first.kind == "scale":
        count = len({d.name for d in differences if (d.step, d.kind) == (first.step, "gradient")})
        yield f"all {count} gradients, ratio {first.ratio:.3f}"
    elif first.kind == "loss" and first.step == 0:
        yield from _most_wrong_unit(differences, specs)
    causes = list(dict.fromkeys(describe(i) for i in _producers(first, wrong, {d.name for d in same}, program, specs)))
    if causes:
        more = f" and {len(causes) - MOST} more" if len(causes) > MOST else ""
        yield f"made by: {', '.join(causes[:MOST])}{more}"


def _most_wrong_unit(differences: Sequence[Difference], specs: Sequence[UnitSpec]) -> Iterator[str]:
    """The unit with gradients that differ most where the first loss is wrong: near what made it."""
    by_name = {d.name: d for d in differences if (d.step, d.kind) == (0, "gradient")}
    shares: dict[str, float] = {}
    for spec in specs:
        own = [by_name[one.name] for param in spec.params.values() for one in param.each if one.name in by_name]
        if whole := sum(d.square for d in own):
            shares[spec.name] = math.sqrt(sum(d.relative**2 * d.square for d in own) / whole)
    if shares:
        unit = max(shares, key=lambda name: shares[name])
        yield f"gradients differ most in unit '{unit}', by {shares[unit]:.0%} of their size"


def _scale(same: Sequence[Difference], wrong: set[str], first: Difference) -> str:
    """How many tensors are wrong, and their common factor, if any."""
    names = {d.name for d in same}
    count = f"all {len(names)}" if wrong == names else f"{len(wrong)} of {len(names)}"
    what = {"gradient": "gradients", "moment": "first moments", "square": "second moments", "update": "updates"}
    text = f"{count} {what[first.kind]}"
    # Zeros have any factor; such pieces are left out.
    those = [d for d in same if d.name in wrong and d.ratio == d.ratio]
    within = max(SAME_FACTOR, first.allowed)
    if not those:
        return f"{text} differ"
    middle = median(d.ratio for d in those)
    if all(abs(d.ratio - middle) <= within * abs(middle) and d.beside <= within for d in those):
        return f"{text}, ratio {middle:.3f}"
    return f"{text} differ, by no common factor"


def _producers(
    first: Difference, wrong: set[str], names: set[str], program: Program, specs: Sequence[UnitSpec]
) -> Iterator[Instruction]:
    """Instructions that can have made it from correct inputs."""
    every = [i for rank in program.ranks for i in rank]
    match first.kind:
        case "gradient":
            yield from _of_gradients(every, wrong, names, specs)
        case "loss" if first.step > 0:
            # All weights were correct after the step before: only their gathers are left.
            yield from (i for i in every if isinstance(i, ins.Fetch))
        case "loss" | "scale":
            return
        case _:
            yield from (i for i in every if isinstance(i, ins.Step))


def _of_gradients(
    every: Sequence[Instruction], wrong: set[str], names: set[str], specs: Sequence[UnitSpec]
) -> Iterator[Instruction]:
    home: dict[str, int] = {}
    for number, spec in enumerate(specs):
        for param in spec.params.values():
            for one in param.each:
                home.setdefault(one.name, number)
    units = {home[name] for name in wrong}
    untouched = {home[name] for name in names} - units
    whole = {name for name in names if home[name] in units} == wrong
    if not whole and (partial := [i for i in every if isinstance(i, ins.ReducePartial)]):
        yield from partial
        return
    sums = [
        i for i in every if isinstance(i, ins.Reduce | ins.Settle | ins.ReduceReplicas | ins.Tie) and i.unit in units
    ]
    # A wrong backward pass affects all units below: report from the highest wrong unit on.
    if len(units) > 1 and untouched and max(units) < min(untouched):
        top = max(units)
        yield from (i for i in every if isinstance(i, ins.Backward | ins.BackwardInput) and i.unit == top)
    elif len(units) == 1:
        yield from sums
        yield from (i for i in every if isinstance(i, ins.Backward | ins.BackwardWeight) and i.unit in units)
    else:
        yield from sums
