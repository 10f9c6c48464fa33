"""Events: what a run reports, as values, and the sink that they all go to.

    RunStarted  [Resumed]  (StepDone | LossTold | RouterSeen | Rolled | Retried | Evaluated | Saved | RolledBack
                            | Fingerprinted | Corrupted | Goodput | Warned)*
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted:
    """A run begins, or continues in a new process."""

    name: ClassVar[str] = "started"
    run: str
    """The run directory."""
    plan: str
    """The plan on one line."""
    parameters: int
    world: int
    """The number of ranks."""
    transport: str
    """How ranks reach each other; empty where there is one."""
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
    """That peak by kind: parameters, gradients, optimizer, and what is temporary within a step."""
    predicted_traffic_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes of a step's collectives by mesh axis, on the rank with most."""
    snapshot_bytes: int = 0
    """The most host memory of snapshots, on the fullest rank."""
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
    """The checkpoint; empty where there was none, and the run begins again."""
    passed_over: tuple[str, ...] = ()
    """The fault of each newer checkpoint or copy in memory, and where it is now."""
    lost: str = ""
    """The lost rank or host, for a run that continues from a snapshot in memory."""
    lost_at_s: float | None = None
    """When the loss was noticed, on the host's clock."""
    joined: str = ""
    """The host that came, where nothing was lost and the run continues under a larger plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledBack:
    """A step was not taken, and the run continues from the state after ``step`` steps; reports of later steps
    are void.
    """

    name: ClassVar[str] = "rolled_back"
    step: int
    """Finished steps of the state that the run continues from."""
    refused: int
    """The step that was not taken, or after which the state was found corrupt."""
    why: str
    """The rule that it broke, with the figures."""
    loss: float
    """The loss of the step that was not taken."""
    grad_norm: float
    """Its gradient norm before clipping."""
    source: str
    """Where the state is from: ``memory``, or the path of a checkpoint."""
    passed_over: tuple[str, ...] = ()
    """The fault of each newer state, in memory or on disk, that was passed over."""
    skip: str
    """The data that is left out from here on, as a value of ``train.skip``: a run that starts with it computes the
    same. Empty where the same data is used again.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprinted:
    """The state after a step, as sums of its bits: in exact mode the same on every layout."""

    name: ClassVar[str] = "fingerprint"
    step: int
    """Finished steps."""
    weights: str
    """Of the master weights."""
    exp_avg: str
    """Of the first moments."""
    exp_avg_sq: str = ""
    """Of the second moments; empty where the optimizer has none."""
    gradients: str
    """Of the gradients of the step's update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrupted:
    """Ranks whose state was not what they had computed, so that the run continues from an earlier state. Or whose copy
    in memory was damaged, so that it was not saved; the state is copied again.
    """

    name: ClassVar[str] = "corrupted"
    step: int
    """Finished steps when the ranks were known."""
    found: int
    """The step after which, or in which, it was found."""
    ranks: tuple[int, ...]
    """The ranks."""
    hosts: tuple[str, ...]
    """The hosts of these ranks."""
    what: str
    """The tensors."""
    how: Literal["majority", "replay", "at rest", "recomputed", "checksum"]
    """How it is known: copies outvoted them, the steps were repeated, their own sums changed at rest, other ranks
    computed another result, or a copy's checksum differs from its source's.
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
    """Valid tokens of this step's global batch."""
    tokens_per_s: float
    step_s: float
    """The whole step, with the wait for its batch."""
    data_s: float
    """The part of ``step_s`` that waited for the batch."""
    mfu: float | None
    """Model FLOPs over peak FLOPs, as a share of 1; none where the peak is unknown."""
    memory_bytes: int
    """The highest peak of any rank so far, of its tensors or of its whole process: see ``started``."""
    elapsed_s: float
    """Seconds since this process began to train."""
    tokens_seen: int
    """Valid tokens since step 0, resumed or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossDetails:
    """Further numbers of a step's loss: with preferences, for example, the share that was ranked right."""

    name: ClassVar[str] = "measures"
    step: int
    """Finished steps, this one included."""
    names: tuple[str, ...]
    """The names."""
    values: tuple[float, ...]
    """The number of each name: a mean over what counts, or a maximum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterStats:
    """What the routers of a mixture of experts did in training since their last report."""

    name: ClassVar[str] = "router"
    step: int
    """The last counted step."""
    steps: int
    """The number of counted steps."""
    chosen: tuple[tuple[int, ...], ...]
    """For each layer and expert, the (token, choice) pairs that chose it."""
    dropped: tuple[tuple[int, ...], ...]
    """For each layer and expert, the chosen pairs without room."""
    balance: tuple[float, ...]
    """For each layer the balance loss, mean over sequences, not weighted; 1 where the load is even (noisy-topk: 0)."""
    z: tuple[float, ...]
    """For each layer the z-loss, mean over sequences, not weighted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutStats:
    """What a step of reinforcement learning learnt from."""

    name: ClassVar[str] = "rolled"
    step: int
    reward: float
    """The mean over all graded answers."""
    answers: int
    """Graded answers."""
    lost: int
    """Answers without a grade, because their grader failed."""
    cut: int
    """Answers that were cut at the token limit."""
    uniform: int
    """Groups whose rewards were all equal."""
    lag: int
    """How many steps older the sampling weights were than the trained ones."""
    drawn_tokens: int
    """Sampled tokens."""
    seconds: float
    """Seconds of the whole iteration, since the step before."""
    measures: Mapping[str, float]
    """Numbers of the loss for these tokens: ratios, clipped shares, distances."""
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
    """What, where, what would help, and what the run does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """How much of the run's time has advanced it so far: after each checkpoint, and at the end."""

    name: ClassVar[str] = "goodput"
    step: int
    """Finished steps."""
    ettr: float
    """The effective training time ratio: ``steps_s`` over ``wall_s``."""
    wall_s: float
    """Seconds since the run's first start, without those in which it did not run."""
    steps_s: float
    """Seconds of the steps that stand."""
    validation_s: float
    """Seconds of validations that stand; the rest went into starts, waits for checkpoints, and lost work."""
    at_s: float
    """When, in seconds since 1970."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFinished:
    """The last step is done, evaluated and saved."""

    name: ClassVar[str] = "finished"
    step: int
    elapsed_s: float
    tokens_seen: int
    step_s: float | None = None
    """The median step of this process, without its first two; none of fewer than three. Compare it with
    ``predicted_step_s``.
    """
    peak_bytes: int | None = None
    """The most that tensors took on any rank, to compare with ``predicted_memory_bytes``; none on a CPU, where a
    process grows by more than its tensors.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStopped:
    """The run was asked to stop before its last step; its state is saved."""

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
        """Take one event; a sink ignores events that it has no use for. Raises Fault where it cannot keep the event."""

    def close(self) -> None:
        """Release what the sink holds. A second call does nothing."""


class Fanout:
    """One sink made of several, written in order and closed in reverse."""

    def __init__(self, sinks: Iterable[Sink]) -> None:
        self._sinks = tuple(sinks)

    def write(self, event: Event) -> None:
        for sink in self._sinks:
            sink.write(event)

    def close(self) -> None:
        """Close every sink, even where one raises."""
        with ExitStack() as stack:
            for sink in self._sinks:
                stack.callback(sink.close)
