"""Events: what a run reports, as values, and the sink that they all go to.

    RunStarted  [Resumed]  (StepDone | LossDetails | RouterStats | RolloutStats | Retried | Evaluated | Saved
                            | RolledBack | Fingerprinted | Corrupted | Goodput | Warned)*
        │                                                                             (RunFinished | RunStopped)
        ▼
      Sink.write        a display, metrics.jsonl, TensorBoard, ... or a Fanout over several of them

``step`` counts finished steps: a run's first step reports 1, and an event of step k describes the state after k steps.
A run that is resumed at step k continues with step k + 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol

from superstep.plan.sample_fields import Counts


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted:
    """A run begins, or continues in a new process."""

    name: ClassVar[str] = "started"
    run: str
    """The run directory."""
    plan: str
    """The plan on one line."""
    parameters: int
    counts: Counts = "tokens"
    """What the run counts: tokens, samples, or the targets of samples that have several."""
    world: int
    """The number of ranks."""
    transport: str
    """How ranks reach each other; empty if there is only one rank."""
    attention: str = ""
    """What computes attention."""
    layers: str = ""
    """What computes the layers of rank 0; ``superstep view --kernels`` says which layer has which, and why."""
    steps: int
    """Steps of the whole run."""
    unigram_entropy: float | None = None
    """Nats per token of the validation text under its token frequencies: the best loss without context."""
    predicted_step_s: float | None = None
    predicted_ettr: float | None = None
    """The share of time that will advance the run if nothing fails; compare it with ``goodput``."""
    predicted_memory_bytes: int | None = None
    """The highest predicted peak of tensors on any rank."""
    predicted_spent_s: Mapping[str, float] = field(default_factory=dict)
    """``predicted_step_s`` in parts that add up to it: compute, waits for each lane, bubble, and the log-probabilities
    that a loss needs first; means over the ranks.
    """
    predicted_bytes: Mapping[str, int] = field(default_factory=dict)
    """``predicted_memory_bytes`` by kind: parameters, gradients, optimizer, and temporary memory of a step."""
    predicted_traffic_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes of a step's collectives by mesh axis, on the rank that sends most."""
    snapshot_bytes: int = 0
    """Host memory for snapshots on the rank that needs most."""
    snapshots_unpinned: str = ""
    """Why rank 0's GPU cannot copy straight into snapshot memory, and copies through the driver's; empty where
    it can.
    """
    memory: Literal["allocated", "resident"] = "allocated"
    """What ``memory_bytes`` of a step measures: tensors, or the whole process (on a CPU)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """The run continues from the state after ``step`` steps; reports of later steps are void."""

    name: ClassVar[str] = "resumed"
    step: int
    path: str
    """The checkpoint; empty if there was none and the run starts again at step 0."""
    passed_over: tuple[str, ...] = ()
    """Why each newer checkpoint or snapshot was not used, and where it is now."""
    lost: str = ""
    """The lost rank or host, for a run that continues from a snapshot in memory."""
    lost_at_s: float | None = None
    """When the loss was noticed, on the host's clock."""
    joined: str = ""
    """The host that joined, if the run continues with a larger plan because of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledBack:
    """A step was refused. The run continues from the state after ``step`` steps; reports of later steps are void."""

    name: ClassVar[str] = "rolled_back"
    step: int
    """Finished steps of the state that the run continues from."""
    refused: int
    """The refused step; or the step after which the state was corrupt."""
    why: str
    """The rule that the step broke, with its figures."""
    loss: float
    """The loss of the refused step."""
    grad_norm: float
    """The gradient norm of the refused step, before clipping."""
    source: str
    """Where the state is from: ``memory``, or the path of a checkpoint."""
    passed_over: tuple[str, ...] = ()
    """Why each newer state, in memory or on disk, was not used."""
    skip: str
    """The data that the run skips from here on, as a value of ``train.skip``: a new run with this value computes the
    same. Empty if the same data is used again.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprinted:
    """Sums of the bits of the state after a step; in exact mode they are the same on every layout."""

    name: ClassVar[str] = "fingerprint"
    step: int
    """Finished steps."""
    weights: str
    """The sum of the master weights."""
    exp_avg: str
    """The sum of the first moments."""
    exp_avg_sq: str = ""
    """The sum of the second moments; empty if the optimizer has none."""
    gradients: str
    """The sum of the gradients of the step's update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrupted:
    """Bits of some ranks have changed. If the state changed, the run continues from an earlier one. If only a snapshot
    changed, it is not saved, and the state is copied again.
    """

    name: ClassVar[str] = "corrupted"
    step: int
    """Finished steps when the ranks were identified."""
    found: int
    """The step in which, or after which, the change was detected."""
    ranks: tuple[int, ...]
    """The ranks with changed bits."""
    hosts: tuple[str, ...]
    """The hosts of these ranks."""
    what: str
    """The changed tensors."""
    how: Literal["majority", "replay", "at rest", "recomputed", "checksum"]
    """How the ranks were identified: a majority of copies, repeated steps, sums that changed between steps, a second
    computation by other ranks, or the checksum of a snapshot.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """One optimizer step."""

    name: ClassVar[str] = "step"
    step: int
    loss: float
    """Nats per valid token, mean over the global batch."""
    lr: float
    grad_norm: float
    """The global norm before clipping."""
    tokens: int
    """Valid tokens of this step's global batch; on samples, its samples or targets, as ``counts`` says."""
    counts: Counts = "tokens"
    """What ``tokens``, ``tokens_per_s`` and ``tokens_seen`` count."""
    tokens_per_s: float
    step_s: float
    """The whole step, with the wait for its batch."""
    data_s: float
    """The part of ``step_s`` that waited for the batch."""
    mfu: float | None
    """Model FLOPs over peak FLOPs, as a share of 1; null if the peak is unknown."""
    memory_bytes: int
    """The highest peak of any rank so far; ``memory`` of ``started`` says of what."""
    elapsed_s: float
    """Seconds since this process began to train."""
    tokens_seen: int
    """Valid tokens since step 0, resumed or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossDetails:
    """Further numbers of a step's loss, such as the share of preferences that the model ranks right."""

    name: ClassVar[str] = "measures"
    step: int
    """Finished steps, this one included."""
    names: tuple[str, ...]
    """The names of the numbers."""
    values: tuple[float, ...]
    """The number for each name: a mean over the tokens or pairs of the loss, or a maximum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterStats:
    """The choices of the routers of a mixture of experts, in training since the last report."""

    name: ClassVar[str] = "router"
    step: int
    """The last counted step."""
    steps: int
    """The number of counted steps."""
    chosen: tuple[tuple[int, ...], ...]
    """For each layer and expert, how many (token, choice) pairs chose it."""
    dropped: tuple[tuple[int, ...], ...]
    """For each layer and expert, how many of these pairs found no room."""
    balance: tuple[float, ...]
    """For each layer the balance loss, mean over sequences, not weighted; 1 where the load is even (noisy-topk: 0)."""
    z: tuple[float, ...]
    """For each layer the z-loss, mean over sequences, not weighted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutStats:
    """The rollouts that a step of reinforcement learning trained on."""

    name: ClassVar[str] = "rolled"
    step: int
    reward: float
    """The mean reward of all graded answers."""
    answers: int
    """Graded answers."""
    lost: int
    """Answers without a grade, because their grader failed."""
    cut: int
    """Answers that were cut at the token limit."""
    uniform: int
    """Groups of answers with equal rewards."""
    lag: int
    """By how many steps the weights that sampled are older than those that were trained."""
    drawn_tokens: int
    """Sampled tokens."""
    seconds: float
    """Seconds of the whole iteration, since the step before."""
    measures: Mapping[str, float]
    """Numbers of the loss over these tokens: ratios, clipped shares, distances."""
    at_s: float
    """When the step was done, in seconds since 1970."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retried:
    """A grader failed, was late or was stopped, and its answer is graded again."""

    name: ClassVar[str] = "retried"
    step: int
    """Finished steps."""
    why: str
    """What happened to the grader."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """The validation loss after ``step`` steps."""

    name: ClassVar[str] = "evaluated"
    step: int
    loss: float
    """Nats per valid token."""
    bits_per_byte: float | None
    accuracy: float | None = None
    """The share of targets whose class has the highest logit; null for text, and for a loss of the model's own."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A checkpoint is complete on disk."""

    name: ClassVar[str] = "saved"
    step: int
    path: str
    seconds: float
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Warned:
    """Something failed, but the run continues: a checkpoint that could not be written, for example."""

    name: ClassVar[str] = "warning"
    step: int
    """Finished steps."""
    text: str
    """What failed, where, what would help, and what the run does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """The share of the run's time that has advanced it so far; reported after each checkpoint and at the end."""

    name: ClassVar[str] = "goodput"
    step: int
    """Finished steps."""
    ettr: float
    """The effective training time ratio: ``steps_s`` over ``wall_s``."""
    wall_s: float
    """Seconds since the run's first start, without the time in which it did not run."""
    steps_s: float
    """Seconds of the steps that count: they were not repeated later."""
    validation_s: float
    """Seconds of the validations that count. The rest is starts, waits for checkpoints, and lost work."""
    at_s: float
    """The time of this report, in seconds since 1970."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFinished:
    """The last step is done, evaluated and saved."""

    name: ClassVar[str] = "finished"
    step: int
    elapsed_s: float
    tokens_seen: int
    step_s: float | None = None
    """The median of this process's steps, without its first two; null if it took fewer than three. Compare it with
    ``predicted_step_s``.
    """
    peak_bytes: int | None = None
    """The highest peak of tensors on any rank, to compare with ``predicted_memory_bytes``; null on a CPU, where only
    the whole process is measured.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStopped:
    """The run stopped at a request before its last step; its state is saved."""

    name: ClassVar[str] = "stopped"
    step: int
    elapsed_s: float
    tokens_seen: int


Event = (
    RunStarted
    | Resumed
    | RolledBack
    | Fingerprinted
    | Corrupted
    | Goodput
    | StepDone
    | LossDetails
    | RouterStats
    | RolloutStats
    | Retried
    | Evaluated
    | Saved
    | Warned
    | RunFinished
    | RunStopped
)


class Sink(Protocol):
    """Receives events."""

    def write(self, event: Event) -> None:
        """Take one event; a sink ignores events that it does not need. Raises Fault if it cannot store the event."""

    def close(self) -> None:
        """Release the sink's files. A second call does nothing."""


class Fanout:
    """One sink made of several, written in order and closed in reverse."""

    def __init__(self, sinks: Iterable[Sink]) -> None:
        self._sinks = tuple(sinks)

    def write(self, event: Event) -> None:
        for sink in self._sinks:
            sink.write(event)

    def close(self) -> None:
        """Close every sink, even if one raises."""
        with ExitStack() as stack:
            for sink in self._sinks:
                stack.callback(sink.close)
