"""The update of a step: what the program's ``Step`` does."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from superstep.engine.flat.rank_state import RankState
from superstep.engine.metrics.token_metrics import WEIGHTS_MEND
from superstep.engine.optimizer import Optimizer, OwnedRanges
from superstep.engine.overflow import OVERFLOW
from superstep.engine.step_context import StepContext, StepResult, UpdateArguments
from superstep.errors import Fault
from superstep.monitor.status_page import HeartbeatReceiver
from superstep.numerics.fixed_point import OutOfRange, RangeExcess
from superstep.numerics.loss_scale import LossScale, first_scale
from superstep.numerics.update_rules import RULES, OptimizerSettings
from superstep.plan.config import TrainConfig
from superstep.plan.loss_scale import LossScaleConfig
from superstep.program.instructions import Step
from superstep.program.text import describe


class StepUpdate:
    """Sums a step's numbers over all ranks, lets its judge decide, and updates the parameters.

    Args:
        state: of this rank.
        train: the settings of the phase.
        excess: range overflows of exact sums on this rank.
        heart: receives the progress.
        resting: units that are not updated, but in another phase.

    Attributes:
        optimizer: of the trained buffers.
        measures: the objective's measures of the newest step, also available in ``inspect``.
        loss_scale: of the next step; None but in fp16.
    """

    def __init__(
        self,
        state: RankState,
        train: TrainConfig,
        excess: RangeExcess,
        heart: HeartbeatReceiver,
        resting: Sequence[int] = (),
    ) -> None:
        config = state.run.config
        self._scale_settings = config.loss_scale or LossScaleConfig()
        self.loss_scale = first_scale(self._scale_settings) if config.numerics.compute == "fp16" else None
        self._lr_share = train.lr / state.run.config.train.lr
        self._state, self.excess, self._heart = state, excess, heart
        self.measures: Mapping[str, float] = {}
        self.optimizer = Optimizer(
            [
                OwnedRanges(b, tuple(state.owned_ranges(unit, b)))
                for unit, b in state.each_buffer()
                if not b.is_frozen and unit not in resting
            ],
            RULES[train.optimizer],
            OptimizerSettings(
                beta1=train.beta1,
                beta2=train.beta2,
                eps=train.eps,
                weight_decay=train.weight_decay,
                clip_norm=train.clip_norm,
                clip_row_norm=math.inf if train.clip_row_norm is None else train.clip_row_norm,
            ),
            state.mesh.world,
            is_exact=state.run.plan.grain is not None,
            seed=config.train.seed,
        )

    def run(self, context: StepContext, loss: Tensor) -> StepResult:
        """Update the parameters after a step's backward passes, or return the reason of a rejection.

        Args:
            context: of the step.
            loss: summed over this rank's tokens.
        """
        arguments, copies = context.update, self._state.snapshots
        assert arguments is not None, "a program with a Step is given its arguments"
        flags: Sequence[bool] = (False, False)
        self.measures = {}
        try:
            mine = context.metrics.numbers(loss)
            self._heart.waits()
            own_flags = arguments.stop.is_requested, copies is not None and copies.refused is not None
            square, sums, flags = self.optimizer.sums(mine, self.excess, own_flags)
            self._heart.works()
            self.measures = context.metrics.decode(sums)
            loss_value, norm, refused = sums[0] / arguments.divisor, math.sqrt(square) / context.loss_scale, ""
        except OutOfRange as error:
            if arguments.judge is None:
                mend = "" if context.metrics.is_plain else f" {WEIGHTS_MEND}"
                step, rank = context.number, self._state.mesh.rank
                raise Fault(f"{error}{mend}", rank=rank, step=step, instruction=describe(Step())) from error
            self.excess.clear()
            loss_value, norm, refused = math.nan, math.nan, str(error)
        is_skipped = False
        if self.loss_scale is not None and not (math.isfinite(loss_value) and math.isfinite(norm)):
            is_skipped, refused = self._skip(self.loss_scale)
        elif not refused and arguments.judge is not None:
            refused = arguments.judge(loss_value, norm)
        if not refused and not is_skipped:
            self._update(context, arguments, norm)
        return StepResult(
            loss=loss_value,
            grad_norm=norm,
            tokens=arguments.valid_tokens,
            is_stop_requested=flags[0],
            is_copy_refused=flags[1],
            measures=self.measures,
            refused=refused,
            is_skipped=is_skipped,
        )

    def load(self, steps: int, loss_scale: LossScale | None) -> None:
        """Go on after some steps, with their loss scale; None means the first one of fp16."""
        if self.loss_scale is not None:
            self.loss_scale = loss_scale or first_scale(self._scale_settings)
        self.optimizer.steps = steps
        self.optimizer.skipped = 0 if self.loss_scale is None else self.loss_scale.skipped_steps

    def _skip(self, scale: LossScale) -> tuple[bool, str]:
        """Skip a step that has overflowed, and lower the loss scale; else why that is impossible."""
        lower = scale.after_overflow(self._scale_settings)
        if lower is None:
            return False, OVERFLOW
        self.loss_scale = lower
        self.optimizer.skip()
        return True, ""

    def _update(self, context: StepContext, arguments: UpdateArguments, norm: float) -> None:
        loss_scale = context.loss_scale
        if arguments.inspect is not None:
            if self.loss_scale is not None:
                self.optimizer.unscale(loss_scale)
                loss_scale = 1.0
            arguments.inspect()
        self.optimizer.step(arguments.lr * self._lr_share, norm, loss_scale)
        if self.loss_scale is not None:
            self.loss_scale = self.loss_scale.after_step(self._scale_settings)
