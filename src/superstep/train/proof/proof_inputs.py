"""Inputs of a proof: batches, settings and yardsticks that make faults visible, and the faults that they
cannot show.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from superstep.data.batch import Batch
from superstep.data.sources.source import open_source, stream_of
from superstep.launch.ranks import World, launch_on
from superstep.numerics.loss import IGNORE
from superstep.plan.config import PlanConfig, RunConfig, TrainConfig
from superstep.plan.resolution.phase_settings import train_of_phase
from superstep.plan.resolution.resolve import Resolved
from superstep.train.proof.compare import has_same_roundings, reference_yardstick
from superstep.train.proof.ignored_targets import documents_begun, make_ragged_batches
from superstep.train.proof.prove_tolerance import prove, write_one_rank, write_reference
from superstep.train.proof.reference import reference_validation
from superstep.train.proof.stream import plain_split
from superstep.train.proof.verdict import ProofVerdict
from superstep.train.weights.model import resolve_config, units_of

DECAY = 20.0
"""Weight decay of proofs: against initial weights of 0.02 it makes 0.4 of Adam's update, where 0.1 would make a tenth
of an update's tolerance.
"""


MOST_VALIDATED = 2
"""Batches of a validation in proofs: two show whether one is left out, or has a wrong weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofCase:
    """A layout, and the inputs of its proof.

    Attributes:
        run: with clipping lowered and weight decay raised where a fault in them would not show.
        train: the run's own section.
        batches: one for each step, with ignored targets.
        folder: of the reference's files.
        one_rank: of the files of one rank of the engine in the same format; None in fp32.
        corpus: the folder of token files.
        reruns: whether it runs again, through the training loop and a restart.
        validation: the reference's loss on the held-out text, with the initial weights.
    """

    run: Resolved
    train: TrainConfig
    batches: tuple[Batch, ...]
    folder: Path
    one_rank: Path | None
    corpus: Path
    reruns: bool
    validation: float


class Cases:
    """Makes cases; shared inputs are made once.

    Args:
        root: an empty folder for the files of references.
        corpus: the folder of token files.
        steps: to compare.
    """

    def __init__(self, root: Path, corpus: Path, *, steps: int) -> None:
        self._root = root
        self._corpus = corpus
        self._steps = steps
        self._known: dict[Path, tuple[float, float]] = {}

    def case(self, run: Resolved, *, reruns: bool) -> ProofCase:
        """The case of a layout. Writes its references' files once."""
        config = run.config
        validated = min(config.train.eval_batches, MOST_VALIDATED)
        train = replace(config.train, steps=max(config.train.steps, self._steps), eval_batches=validated)
        if train.weight_decay > 0:
            train = replace(train, weight_decay=max(train.weight_decay, min(DECAY, 0.1 / train.lr)))
        batches = make_ragged_batches(stream_of(config, open_source(self._corpus), "train"), self._steps)
        kind = f"tied={run.is_tied} packed={config.data.packed}"
        folder = self._root / kind
        if folder not in self._known:
            folder.mkdir(parents=True)
            model = units_of(run) if run.decoder is None or "frozen" in run.plan.families else run.decoder
            phases = {each.name: train_of_phase(train, config.phases, each.name) for each in run.plan.phases}
            # A phase with a setting of its own is clipped by that.
            clips = all(phase.clip_norm == train.clip_norm for phase in phases.values())
            clipped = write_reference(model, train, batches, folder, phases=phases, clips=clips)
            self._known[folder] = (
                clipped.clip_norm,
                reference_validation(model, train.seed, self._validation_batches(config, train)),
            )
        clip_norm, validation = self._known[folder]
        train = replace(train, clip_norm=clip_norm)
        lowered = replace(run, config=replace(config, train=train))
        return ProofCase(
            run=lowered,
            train=config.train,
            batches=batches,
            folder=folder,
            one_rank=self._one_rank(lowered, batches, folder),
            corpus=self._corpus,
            reruns=reruns,
            validation=validation,
        )

    def _validation_batches(self, config: RunConfig, train: TrainConfig) -> tuple[Batch, ...]:
        """Batches of a validation: as many as configured, or as there are."""
        plain, size = plain_split(config, open_source(self._corpus), "validation"), train.batch_sequences
        return plain.batches(size, max(1, min(train.eval_batches, plain.count // size)))

    def _one_rank(self, run: Resolved, batches: tuple[Batch, ...], beside: Path) -> Path | None:
        """But in fp32: the engine's results on one rank, at the same microbatch."""
        if run.config.numerics.compute == "fp32":
            return None
        folder = beside / f"one rank, microbatch={run.plan.microbatch}"
        if not folder.exists():
            folder.mkdir()
            alone = resolve_config(replace(run.config, plan=PlanConfig(microbatch=run.plan.microbatch)))
            launch_on(run.config.plan.device, 1, write_one_rank, alone, batches, folder)
        return folder


def prove_case(world: World, case: ProofCase) -> ProofVerdict:
    """``prove`` on one of the launched ranks."""
    return prove(
        world,
        case.run,
        case.batches,
        case.folder,
        reruns=case.reruns,
        one_rank=case.one_rank,
        corpus=case.corpus,
        validation=case.validation,
    )


def write_compared_lines(case: ProofCase, verdict: ProofVerdict) -> Iterator[str]:
    """What was compared, one line each."""
    steps, train = len(case.batches), case.run.config.train
    yield (
        f"losses, gradients, their norm, the optimizer's moments and updates of {steps} steps, on every rank that "
        "holds them, with one process in fp32"
    )
    if case.one_rank is not None and has_same_roundings(case.run):
        compute = case.run.config.numerics.compute
        yield f"the same with one rank of the engine in {compute}, which rounds alike: only the order of sums differs"
    counts = [int((row != IGNORE).sum()) for batch in case.batches for row in batch.targets_BS]
    row = "sequence" if case.run.samples is None else "row of samples" if case.run.samples.capacities else "sample"
    yield f"the divisor: a {row} has {min(counts)} to {max(counts)} valid targets, so ranks differ"
    if case.run.config.data.is_masked:
        begun = sum(documents_begun(batch) for batch in case.batches)
        yield f"the document mask: in the batches {begun} documents begin within a sequence, most added here"
    if case.run.samples is not None and case.run.samples.capacities:
        begun = sum(documents_begun(batch) for batch in case.batches)
        yield f"ragged samples: in the batches {begun} samples or paddings begin within a row"
    changes = [
        f"train.{name} {change} from {before:g} to {now:g}"
        for name, change, before, now in (
            ("clip_norm", "lowered", case.train.clip_norm, train.clip_norm),
            ("weight_decay", "raised", case.train.weight_decay, train.weight_decay),
        )
        if before != now
    ]
    yield f"clipping and weight decay{': ' + ', '.join(changes) + ', so that they have an effect' if changes else ''}"
    if verdict.again.is_restart_same is not None:
        yield "a second run by the training loop over its own stream, saved and resumed on the way: batches and bits"
    elif verdict.again.is_rerun_same is not None:
        yield "a second run by the training loop over its own stream: batches and bits"
    if verdict.stream is not None:
        read = "tokens, targets, documents" if case.run.samples is None else "fields, targets"
        kinds = "valid tokens; packed, masked and padded" if case.run.samples is None else "targets"
        yield f"the stream with plain code: {read}, the order, each rank's rows and the count of {kinds}"
    if verdict.validation is not None:
        yield f"the validation loss over {train.eval_batches} batches of held-out data, with one process in fp32"
    if verdict.sampler is not None:
        served = ", and answers of a server of the saved checkpoint" if verdict.again.served is not None else ""
        yield f"the sampler with plain code: what top-k, top-p, min-p and temperature leave, and the draw{served}"


def unseen(case: ProofCase) -> Iterator[str]:
    """What the verdict does not cover, one line each."""
    allowed, compute = reference_yardstick(case.run, case.folder).allowed, case.run.config.numerics.compute
    below = f"differences below {allowed.gradient:.0e} of a gradient, {allowed.update:.0e} of an update"
    if case.one_rank is None:
        yield below
    elif has_same_roundings(case.run):
        yield f"{below}, in mistakes that one rank in {compute} makes too: only the fp32 reference shows them"
    else:
        others = "in fp32" if compute == "fp16" else "in fp32, or with --exact"
        yield f"{below}. That is much: tp, cp and ep round otherwise in {compute}; also prove it {others}"
    yield f"effects that begin after step {len(case.batches)} (--steps), or need larger sizes than these"
    if not case.reruns or len(case.batches) < 2:
        left_out = "the second run, the restart, the stream, validation and the sampler: not run"
        yield left_out if not case.reruns else "a restart: --steps 1 leaves no step for it"
    else:
        yield "a restart on another layout (--exact compares that), a race that appeared in neither run"
    yield "the model's own code: the reference runs the same modules"
    yield "the text behind the token files" if case.run.samples is None else "what the file of samples reads"
