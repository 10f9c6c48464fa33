"""superstep prove: the layout against the reference, in one table."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from superstep.cli.arguments.prove import Options, read
from superstep.cli.describe import layout_text
from superstep.cli.options import settled
from superstep.cli.preparing import prepared
from superstep.cli.prove.exact import ExactCase, prove_bits
from superstep.data.prepare import is_prepared, prepare
from superstep.data.stream import Batch, Stream
from superstep.data.tokens import Corpus, open_corpus
from superstep.errors import ConfigError, StateError
from superstep.plan.config import RunConfig
from superstep.plan.resolve import Resolved
from superstep.runtime.device import choose
from superstep.runtime.launch import World, launch_on
from superstep.train.model import resolved, units_of, vocab_of
from superstep.train.proof.close import Difference, Verdict, prove, write_reference
from superstep.train.proof.sweep import layouts


@dataclass(frozen=True, slots=True)
class Case:
    """A layout, the batches it is fed, and the folder of the reference's results for them."""

    run: Resolved
    batches: tuple[Batch, ...]
    reference: Path
    reruns: bool


def main(argv: Sequence[str]) -> int:
    """Prove; the exit status is 0 where everything held."""
    options, yields_to = read(argv)
    if options.exact:
        options = replace(options, numerics=replace(options.numerics, exact=True))
    run = resolved(options) if yields_to is None else settled(options, yields_to, resolved)
    # Refused before the reference has run for minutes.
    choose(options.plan.device, options.world or run.plan.mesh.world)
    with _corpus(options, vocab_of(run)) as corpus:
        if options.exact:
            return _exact(options, run, corpus)
        if not options.all:
            return run_one(run, corpus, steps=options.steps)
        return _sweep(options, options.world or run.plan.mesh.world, corpus, steps=options.steps)


def _exact(options: Options, run: Resolved, corpus: Path) -> int:
    """Bits of one layout, or of every layout of a world."""
    if options.steps < 2:
        raise ConfigError("--steps = 1 leaves none after a restart; --exact needs at least 2.")
    world = options.world or run.plan.mesh.world
    runs = list(layouts(options, world)) if options.all else [run]
    if not runs:
        raise ConfigError(f"no layout of this model and batch fits {world} ranks; raise train.batch_sequences.")
    opened = open_corpus(corpus)
    with tempfile.TemporaryDirectory(prefix="superstep-prove-") as folder:
        return prove_bits(
            [ExactCase(run, _batches(run, opened, options.steps), Path(folder) / _kind(run)) for run in runs]
        )


def _kind(run: Resolved) -> str:
    """What a reference depends on beside the sizes: the model and the batches."""
    return f"tied={run.outline.is_tied} packed={run.config.data.packed}"


@contextmanager
def _corpus(config: RunConfig, vocab: int) -> Iterator[Path]:
    """The folder of tokens: where the run keeps them, else one made for now. A run's own tokens are not changed."""
    kept = Path(config.data.cache) if config.data.cache else Path(config.state.dir) / "data"
    if is_prepared(config.data, vocab, kept):
        prepare(config.data, vocab, kept)
        yield kept
        return
    with tempfile.TemporaryDirectory(prefix="superstep-prove-") as folder:
        prepared(config.data, vocab, Path(folder), sys.stdout)
        yield Path(folder)


def run_one(run: Resolved, corpus: Path, *, steps: int) -> int:
    """Prove one layout and print what was found."""
    _ask_for_one_order()
    with tempfile.TemporaryDirectory(prefix="superstep-prove-") as folder:
        batches = _batches(run, open_corpus(corpus), steps)
        _reference(run, batches, Path(folder))
        case = Case(run, batches, Path(folder), reruns=True)
        verdicts = launch_on(run.config.plan.device, run.plan.mesh.world, _rank, (case,))
    verdict = verdicts[0]
    _say(f"{'':2}{'':10}{'worst tensor':44}{'difference':>12}{'allowed':>10}")
    for worst in verdict.worst:
        _say(_row(worst))
    held = {True: "the same bits", False: "OTHER BITS", None: "not asked"}[verdict.is_deterministic]
    _say(f"  {'rerun':10}{held}")
    if verdict.first is not None:
        _say(f"  first wrong: {verdict.first.describe()}")
    _say(
        f"{'PROVEN' if verdict.is_proven else 'NOT PROVEN'}: {layout_text(run)}: {verdict.compared} comparisons over "
        f"{steps} steps, largest difference {_largest(verdict):.1%} of what is allowed, rerun {held}."
    )
    return 0 if verdict.is_proven else 1


def _sweep(config: RunConfig, world: int, corpus: Path, *, steps: int) -> int:
    runs = list(layouts(config, world))
    if not runs:
        raise ConfigError(f"no layout of this model and batch fits {world} ranks; raise train.batch_sequences.")
    opened = open_corpus(corpus)
    _ask_for_one_order()
    with tempfile.TemporaryDirectory(prefix="superstep-prove-") as folder:
        cases = []
        for number, run in enumerate(runs):
            # The reference depends on the model and on the batches alone.
            reference = Path(folder) / _kind(run)
            batches = _batches(run, opened, steps)
            if not reference.exists():
                reference.mkdir()
                _reference(run, batches, reference)
            cases.append(Case(run, batches, reference, reruns=number % 4 == 0))
        _say(f"  {'layout':74}{'loss':>9}{'gradient':>10}{'norm':>9}{'update':>9}  rerun")
        verdicts = launch_on(config.plan.device, world, _rank, tuple(cases))
    failed = [(run, v) for run, v in zip(runs, verdicts, strict=True) if not v.is_proven]
    for run, verdict in failed:
        _say(f"  {layout_text(run)}: {verdict.first.describe() if verdict.first else 'a rerun gave other bits'}")
    worst = max(_largest(verdict) for verdict in verdicts)
    _say(
        f"{'NOT PROVEN' if failed else 'PROVEN'}: {len(runs) - len(failed)} of {len(runs)} layouts on {world} ranks, "
        f"{sum(v.compared for v in verdicts)} comparisons over {steps} steps, largest difference {worst:.1%} of what "
        "is allowed."
    )
    return 1 if failed else 0


def _ask_for_one_order() -> None:
    """Of cuBLAS, in the ranks that are launched from here on: its choice of a workspace decides the order of sums."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def _rank(world: World, cases: tuple[Case, ...]) -> list[Verdict]:
    found = []
    for case in cases:
        verdict = prove(world, case.run, case.batches, case.reference, reruns=case.reruns)
        found.append(verdict)
        if world.rank == 0 and len(cases) > 1:
            figures = "".join(
                f"{w.relative:>{width}.0e}" for w, width in zip(verdict.worst, (9, 10, 9, 9), strict=True)
            )
            held = {True: "same", False: "DIFFERS", None: "-"}[verdict.is_deterministic]
            mark = "  " if verdict.is_proven else "✗ "
            _say(f"{mark}{layout_text(case.run):74}{figures}  {held}")
    return found


def _batches(run: Resolved, corpus: Corpus, steps: int) -> tuple[Batch, ...]:
    config = run.config
    stream = Stream(
        corpus,
        "train",
        sequence_tokens=config.data.sequence_tokens,
        packed=config.data.packed,
        batch_sequences=config.train.batch_sequences,
        seed=config.train.seed,
        document_mask=config.data.document_mask,
    )
    size = config.train.batch_sequences
    return tuple(stream.batch(step * size, slice(0, size)) for step in range(steps))


def _reference(run: Resolved, batches: tuple[Batch, ...], folder: Path) -> None:
    try:
        write_reference(run.decoder or units_of(run), run.config.train, batches, folder)
    except OSError as error:
        raise StateError(f"{folder} cannot hold the reference: {error.strerror}; free space there.") from error


def _row(worst: Difference) -> str:
    name = worst.name or f"step {worst.step}"
    mark = "✗" if worst.is_wrong else " "
    return f"{mark:2}{worst.kind:10}{name:44}{worst.relative:>12.1e}{worst.allowed:>10.0e}"


def _largest(verdict: Verdict) -> float:
    return max(w.relative / w.allowed for w in verdict.worst)


def _say(text: str) -> None:
    print(text, flush=True)
