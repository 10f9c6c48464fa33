"""Inputs of one run of a program, and the result of its ``Step``.

A frozen context is passed from the engine through ``Executor.run`` to the handlers of the instructions, ``Step``'s
update included: no argument of a step waits in a field for a later call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from superstep.engine.instruction_timer import Recorder
from superstep.engine.metrics.token_metrics import TokenMetrics
from superstep.engine.values.microbatch import Microbatch
from superstep.launch.stop_request import StopRequest
from superstep.program.instructions import Program

Judge = Callable[[float, float], str]
"""Why a step with this loss and gradient norm is rejected; empty if it is accepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateArguments:
    """The arguments of a ``Step``.

    Attributes:
        valid_tokens: of the whole global batch.
        lr: the learning rate.
        divisor: of the loss.
        inspect: called when the gradients are final, before the update.
        judge: may reject the update.
        stop: whether this rank has a request to stop.
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
        program: of every rank.
        microbatches: of this data-parallel rank, in order.
        metrics: the loss, and metrics of the tokens.
        scale: factor of the loss's gradient: the loss scale over the divisor of the whole step.
        loss_scale: of fp16; else 1.
        number: of the training step that the run is part of, or follows.
        is_training: whether dropout and routers draw as in training.
        update: of a ``Step`` in the program.
        record: records when each instruction ran.
        see_output: called with the number of a unit, and what it returned.
    """

    program: Program
    microbatches: Sequence[Microbatch]
    metrics: TokenMetrics
    scale: float = 1.0
    loss_scale: float = 1.0
    number: int = 0
    is_training: bool = False
    update: UpdateArguments | None = None
    record: Recorder | None = None
    see_output: Callable[[int, Tensor], None] | None = None

    @property
    def noise_step(self) -> int | None:
        """The step that random numbers belong to, from 0; None in evaluation."""
        return self.number - 1 if self.is_training else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The result of one training step, over all ranks.

    Attributes:
        loss: of the global batch, over its divisor: nats per valid token by default.
        grad_norm: the global gradient norm before clipping.
        tokens: valid tokens of the global batch.
        is_stop_requested: whether any rank had a request to stop before the step's sums were taken.
        is_copy_refused: whether a snapshot for the disk was damaged.
        measures: of the objective over counted tokens, by name.
        refused: why the update was rejected; empty if it was made.
        is_skipped: there was no update, as the gradient overflowed in fp16; the next loss scale is smaller.
    """

    loss: float
    grad_norm: float
    tokens: int
    is_stop_requested: bool = False
    is_copy_refused: bool = False
    measures: Mapping[str, float] = field(default_factory=dict)
    refused: str = ""
    is_skipped: bool = False
