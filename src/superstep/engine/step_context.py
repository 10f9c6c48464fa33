"""What one run of a program is given, and what its ``Step`` gives back.

A frozen context goes from the engine through ``Executor.run`` to the handlers of the instructions, ``Step``'s update
among them: no argument of a step waits in a field for a later call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from superstep.engine.instruction_timer import Recorder
from superstep.engine.microbatch import Microbatch
from superstep.engine.token_metrics import TokenMetrics
from superstep.launch.stop_request import StopRequest
from superstep.program.instructions import Program

Judge = Callable[[float, float], str]
"""Why a step of this loss and gradient norm is not to be taken; empty where it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateArguments:
    """The arguments of a ``Step``.

    Attributes:
        valid_tokens: of the whole global batch.
        lr: the learning rate.
        divisor: of the loss.
        inspect: called when the gradients are final, before the update.
        judge: may refuse the update.
        stop: whether this rank is asked to stop.
    """

    valid_tokens: int
    lr: float
    divisor: float
    inspect: Callable[[], None] | None = None
    judge: Judge | None = None
    stop: StopRequest = field(default_factory=StopRequest)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepContext:
    """One run of a program.

    Attributes:
        program: what every rank runs.
        microbatches: of this data-parallel rank, in order.
        metrics: what the loss is, and what sees the tokens.
        scale: what the loss's gradient is multiplied with: one over the divisor of the whole step.
        number: of the training step that the run is part of, or follows.
        is_training: whether routers draw their noise as a training step does.
        update: what a ``Step`` in the program does.
        record: notes when each instruction ran.
    """

    program: Program
    microbatches: Sequence[Microbatch]
    metrics: TokenMetrics
    scale: float = 1.0
    number: int = 0
    is_training: bool = False
    update: UpdateArguments | None = None
    record: Recorder | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One training step, seen from all ranks.

    Attributes:
        loss: of the global batch, over its divisor: nats per valid token, unless said otherwise.
        grad_norm: the global gradient norm before clipping.
        tokens: valid tokens of the global batch.
        is_stop_asked: whether any rank was asked to stop before the step's sums were taken.
        is_copy_refused: whether a snapshot was damaged that the disk was to have.
        measures: what the objective tells of the tokens that count, by name.
        refused: why the update was not made; empty where it was.
    """

    loss: float
    grad_norm: float
    tokens: int
    is_stop_asked: bool = False
    is_copy_refused: bool = False
    measures: Mapping[str, float] = field(default_factory=dict)
    refused: str = ""
