"""The output of superstep prove: a table, the faults, and what was and was not compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from superstep.run.reports.plan_line import layout_text
from superstep.train.proof.compare import KINDS, Difference, has_same_roundings
from superstep.train.proof.proof_inputs import ProofCase, unseen, write_compared_lines
from superstep.train.proof.verdict import ProofVerdict

HELD = {True: "the same bits", False: "OTHER BITS", None: "not asked"}
WIDTHS = (9, 10, 9, 9, 9, 9, 9)


def verdict_lines(case: ProofCase, verdict: ProofVerdict) -> Iterator[str]:
    """The verdict on one layout: the worst tensor of each kind first."""
    again = verdict.again
    wide = max(44, *(len(worst.name) + 1 for worst in verdict.worst))
    yield f"{'':2}{'':12}{'worst tensor':{wide}}{'difference':>12}{'allowed':>10}"
    against = verdict.worst[0].against
    for worst in verdict.worst:
        if worst.against != against:
            against = worst.against
            yield f"  beside {against} in {case.run.config.numerics.compute}"
        yield _row(worst, wide)
    yield f"  {'rerun':12}{HELD[again.is_rerun_same]}"
    yield f"  {'restart':12}{HELD[again.is_restart_same]}"
    yield f"  {'stream':12}{_beside(verdict.stream)}"
    yield f"  {'validation':12}{_validation_line(verdict.validation)}"
    yield f"  {'sampler':12}{_beside(verdict.sampler)}"
    yield from _wrong(verdict)
    yield "Compared:"
    yield from (f"  - {line}" for line in write_compared_lines(case, verdict))
    yield "Not covered by this proof:"
    yield from (f"  - {line}" for line in unseen(case))
    yield (
        f"{'PROVEN' if verdict.is_proven else 'NOT PROVEN'}: {layout_text(case.run)}: {verdict.compared} comparisons "
        f"over {len(case.batches)} steps, largest difference {_largest(verdict):.1%} of the tolerance, "
        f"rerun {HELD[again.is_rerun_same]}, restart {HELD[again.is_restart_same]}."
    )


def sweep_head() -> str:
    """The head of a sweep's table."""
    return f"  {'layout':74}" + "".join(f"{kind:>{w}}" for kind, w in zip(KINDS, WIDTHS, strict=True)) + "  rerun"


def sweep_row(case: ProofCase, verdict: ProofVerdict) -> str:
    """One layout of a sweep; of each kind the worst, over all yardsticks."""
    worst = [max((w for w in verdict.worst if w.kind == kind), key=lambda d: d.badness) for kind in KINDS]
    figures = "".join(f"{w.relative:>{width}.0e}" for w, width in zip(worst, WIDTHS, strict=True))
    held = "-" if verdict.is_deterministic is None else "same" if verdict.again.is_same else "DIFFERS"
    mark = "  " if verdict.is_proven else "✗ "
    return f"{mark}{layout_text(case.run):74}{figures}  {held}"


def sweep_lines(cases: Sequence[ProofCase], verdicts: Sequence[ProofVerdict]) -> Iterator[str]:
    """The summary of a sweep."""
    pairs = list(zip(cases, verdicts, strict=True))
    failed = [(case, verdict) for case, verdict in pairs if not verdict.is_proven]
    for case, verdict in failed:
        yield f"  {layout_text(case.run)}:"
        yield from _wrong(verdict)
    shown = next(((case, verdict) for case, verdict in pairs if has_same_roundings(case.run)), pairs[0])
    yield "Compared:"
    yield from (f"  - {line}" for line in write_compared_lines(*shown))
    yield "Not covered by this proof:"
    # All that one of the layouts does not cover.
    yield from dict.fromkeys(f"  - {line}" for case in cases if case.reruns for line in unseen(case))
    if not all(case.reruns for case in cases):
        yield "  - a second run and a restart of the layouts whose last column is -"
    world, steps = cases[0].run.plan.mesh.world, len(cases[0].batches)
    yield (
        f"{'NOT PROVEN' if failed else 'PROVEN'}: {len(cases) - len(failed)} of {len(cases)} layouts on {world} ranks, "
        f"{sum(v.compared for v in verdicts)} comparisons over {steps} steps, largest difference "
        f"{max(_largest(verdict) for verdict in verdicts):.1%} of the tolerance."
    )


def _beside(text: str | None) -> str:
    return "not asked" if text is None else "WRONG" if text else "the same as plain code"


def _validation_line(difference: Difference | None) -> str:
    if difference is None:
        return "not asked"
    return f"{'WRONG: ' if difference.is_wrong else ''}{difference.relative:.1e} of {difference.allowed:.0e}"


def _wrong(verdict: ProofVerdict) -> Iterator[str]:
    """The first wrong value, and hints about it."""
    yield from (f"  wrong: {text}" for text in verdict.wrong_beside)
    if verdict.first is not None:
        yield f"  first wrong: {verdict.first.describe()}"
        yield from (f"    {hint}" for hint in verdict.hints)
    if not verdict.again.is_same:
        yield f"  {'restart' if verdict.again.is_rerun_same else 'rerun'}: {verdict.again.first}"


def _row(worst: Difference, wide: int) -> str:
    name = worst.name or f"step {worst.step}"
    mark = "✗" if worst.is_wrong else " "
    return f"{mark:2}{worst.kind:12}{name:{wide}}{worst.relative:>12.1e}{worst.allowed:>10.0e}"


def _largest(verdict: ProofVerdict) -> float:
    return max(worst.badness for worst in verdict.worst)
