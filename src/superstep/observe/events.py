"""What a run reports, as values, and the one seam they pass through.

    RunStarted  [Resumed]  (StepDone | LossTold | RouterSeen | Rolled | Retried | Evaluated | Saved | RolledBack
                            | Fingerprinted | Corrupted | Goodput | Warned)*
        │                                                                             (RunFinished | RunStopped)
        ▼
      Sink.write        a display, metrics.jsonl, TensorBoard, ... or a Fanout over several of them

``step`` counts finished steps: the first step of a run reports 1, and an event of step k speaks of the state
after k steps. A run that is resumed at step k goes on with step k + 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted:
    """A run begins, or goes on in a new process."""

    name: ClassVar[str] = "started"
    run: str
    """The run directory."""
    plan: str
    """The plan on one line."""
    parameters: int
    world: int
    """Ranks in all."""
    transport: str
    """How they reach each other; empty where there is one."""
    attention: str = ""
    """What computes attention."""
    steps: int
    """Steps of the whole run."""
    unigram_entropy: float | None = None
    """Nats per token of the validation text under its token frequencies: the best loss without context."""
    predicted_step_s: float | None = None
    predicted_ettr: float | None = None
    """The share of the time that will make headway, if nothing fails; to be held against ``goodput``."""
    predicted_memory_bytes: int | None = None
    """The highest predicted peak of any rank: what its tensors take."""
    predicted_spent_s: Mapping[str, float] = field(default_factory=dict)
    """``predicted_step_s`` in parts that add up to it: compute, waits for each lane, bubble, and the log-probabilities
    that a loss asks for first; means over the ranks."""
    predicted_bytes: Mapping[str, int] = field(default_factory=dict)
    """That peak by what its tensors are: parameters, gradients, optimizer, and what comes and goes within a step."""
    predicted_traffic_bytes: Mapping[str, int] = field(default_factory=dict)
    """What a step's collectives carry by mesh axis, on the rank that has most of it."""
    snapshot_bytes: int = 0
    """What snapshots take at most, on the fullest rank, of its host's memory."""
    snapshots_unpinned: str = ""
    """Why rank 0's GPU cannot copy straight into that memory, and copies by way of the driver's; empty where it can."""
    memory: Literal["allocated", "resident"] = "allocated"
    """What ``memory_bytes`` of a step is: what tensors take, or the whole process (a CPU's)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """The run goes on from the state after ``step`` steps; what was reported of later steps is void."""

    name: ClassVar[str] = "resumed"
    step: int
    path: str
    """The checkpoint; empty where there was none, and the run begins again."""
    passed_over: tuple[str, ...] = ()
    """What is wrong with each newer checkpoint or copy in memory, and where it is now."""
    lost: str = ""
    """Which rank or host was lost; where the run goes on from a snapshot in memory there is no checkpoint to name."""
    lost_at_s: float | None = None
    """When that was seen, in seconds of the host's clock."""
    joined: str = ""
    """Where nothing was lost, and the run goes on under a larger plan: the host that came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledBack:
    """A step was not taken, and the run goes on from the state after ``step`` steps; what was reported of later steps
    is void."""

    name: ClassVar[str] = "rolled_back"
    step: int
    """Finished steps of the state that it goes on from."""
    refused: int
    """The step that was not taken, or after which the state was found corrupt."""
    why: str
    """Which rule it broke, with the figures."""
    loss: float
    """Of the step that was not taken."""
    grad_norm: float
    """Likewise, before clipping."""
    source: str
    """Where the state is from: ``memory``, or the path of a checkpoint."""
    passed_over: tuple[str, ...] = ()
    """What is wrong with each state, in memory or on disk, that would have been gone on from before that."""
    skip: str
    """The data that is left out from here on, as ``train.skip`` has it: a run that is told so from its start computes
    the same. Empty where the same is trained on again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprinted:
    """The state after a step, as sums of its bits: in exact mode the same on any layout."""

    name: ClassVar[str] = "fingerprint"
    step: int
    """Finished steps."""
    weights: str
    """Of the master weights."""
    exp_avg: str
    """Of the first moments."""
    exp_avg_sq: str
    """Of the second moments."""
    gradients: str
    """Of the gradients that the step's update was made of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrupted:
    """Ranks whose state was not what they had computed; the run goes on from a state before it. Or whose copy in memory
    was damaged, so that the disk did not get it; the state is copied again."""

    name: ClassVar[str] = "corrupted"
    step: int
    """Finished steps when it was known which ranks."""
    found: int
    """The step after which, or in which, it was found."""
    ranks: tuple[int, ...]
    """Who they are."""
    hosts: tuple[str, ...]
    """Of these ranks."""
    what: str
    """Which tensors."""
    how: Literal["majority", "replay", "at rest", "recomputed", "checksum"]
    """How it is known: copies outvoted them, the steps were done again, their own sums had changed, others computed the
    same to something else, or a copy had another checksum than what it was made of."""


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
    """The whole step, the wait for its batch included."""
    data_s: float
    """The part of ``step_s`` that was spent waiting for the batch."""
    mfu: float | None
    """Model FLOPs over peak FLOPs, as a share of 1; none where the peak is not known."""
    memory_bytes: int
    """The highest peak of any rank so far, of its tensors or of its whole process: see ``started``."""
    elapsed_s: float
    """Seconds since this process began to train."""
    tokens_seen: int
    """Valid tokens since step 0, resumed or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTold:
    """What the loss of a step tells beside itself: of preferences, say, how many were judged right."""

    name: ClassVar[str] = "measures"
    step: int
    """Finished steps, this one included."""
    names: tuple[str, ...]
    """What is told."""
    values: tuple[float, ...]
    """The number of each name: a mean over what counts, or a maximum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSeen:
    """What the routers of a mixture of experts did in training since they were last reported."""

    name: ClassVar[str] = "router"
    step: int
    """The last step that is counted."""
    steps: int
    """Steps that are counted."""
    chosen: tuple[tuple[int, ...], ...]
    """For each layer and expert, how many (token, choice) pairs chose it."""
    dropped: tuple[tuple[int, ...], ...]
    """For each layer and expert, those among them that it had no room for."""
    balance: tuple[float, ...]
    """For each layer the balance loss, mean over sequences, not weighted; 1 where the load is even (noisy-topk: 0)."""
    z: tuple[float, ...]
    """For each layer the z-loss, mean over sequences, not weighted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rolled:
    """What a step of reinforcement learning learnt from."""

    name: ClassVar[str] = "rolled"
    step: int
    reward: float
    """The mean over all answers that have a grade."""
    answers: int
    """Those that have one."""
    lost: int
    """Those that have none, because their grader failed."""
    cut: int
    """Those that were cut off at the most tokens."""
    uniform: int
    """Groups whose rewards were all equal."""
    lag: int
    """How many steps older the weights that sampled them were than those that were trained."""
    drawn_tokens: int
    """Tokens that were sampled."""
    seconds: float
    """Of the whole iteration, since the step before."""
    measures: Mapping[str, float]
    """What the loss tells of these tokens: ratios, clipped shares, distances."""
    at_s: float
    """When the step was done, in seconds since 1970."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retried:
    """A grader failed, was late or was stopped, and its answer is graded again."""

    name: ClassVar[str] = "retried"
    step: int
    """Finished steps."""
    why: str
    """What became of the grader."""


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
    """A checkpoint is whole on disk."""

    name: ClassVar[str] = "saved"
    step: int
    path: str
    seconds: float
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Warned:
    """Something went wrong that the run goes on in spite of: a checkpoint that could not be written, say."""

    name: ClassVar[str] = "warning"
    step: int
    """Finished steps."""
    text: str
    """What, where, what would help, and what the run does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """How much of the run's time has made headway so far: after each checkpoint, and at the end."""

    name: ClassVar[str] = "goodput"
    step: int
    """Finished steps."""
    ettr: float
    """The effective training time ratio: ``steps_s`` over ``wall_s``."""
    wall_s: float
    """Seconds from the run's first start on, without those in which nobody ran it."""
    steps_s: float
    """Of the steps that stand."""
    validation_s: float
    """Of validations that do; the rest went into starts, waits for checkpoints, and what was lost."""
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
    """The median step of this process, without its first two; none of fewer than three. To be held against
    ``predicted_step_s``."""
    peak_bytes: int | None = None
    """The most that tensors took on any rank, to be held against ``predicted_memory_bytes``; none on a CPU, where a
    process grows by more than its tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStopped:
    """The run was asked to stop before its last step; what was done is saved."""

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
    | LossTold
    | RouterSeen
    | Rolled
    | Retried
    | Evaluated
    | Saved
    | Warned
    | RunFinished
    | RunStopped
)


class Sink(Protocol):
    """Where events go."""

    def write(self, event: Event) -> None:
        """Take one event; an event that says nothing to this sink is passed over.

        Raises:
            Fault: the sink cannot keep it.
        """

    def close(self) -> None:
        """Release what the sink holds. A second call does nothing."""


class Fanout:
    """One sink made of several; they are written in order and closed in reverse."""

    def __init__(self, sinks: Iterable[Sink]) -> None:
        self._sinks = tuple(sinks)

    def write(self, event: Event) -> None:
        """Write to each sink."""
        for sink in self._sinks:
            sink.write(event)

    def close(self) -> None:
        """Close every sink, whatever the others raise."""
        with ExitStack() as stack:
            for sink in self._sinks:
                stack.callback(sink.close)
