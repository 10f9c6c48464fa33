"""Incremental steps: gradients of several calls are added, and the update is a separate call.

    add(batch)  add(batch)  ...  update(lr, hyper)
       │           │                 │
       └─ + ───────┴─ gradient ──────┘ zero again

The loss is a sum without a divisor: the caller weighs the tokens. So the distribution of tokens over calls makes no
difference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from superstep.comm.mesh import Mesh
from superstep.engine.engine import Engine
from superstep.engine.metrics.token_metrics import TokenMetrics
from superstep.engine.step_context import StepContext
from superstep.engine.values.microbatch import Microbatch
from superstep.errors import ConfigError, Fault
from superstep.model.unit import UnitSpec
from superstep.numerics.fixed_point import OutOfRange
from superstep.numerics.objective import Objective
from superstep.numerics.update_rules import OptimizerSettings
from superstep.plan.resolution.resolve import Resolved
from superstep.program.instructions import Program, Step

EXACT_SCALE = 2.0**-12
"""Exact mode scales gradients by this: its sums have a range for the mean of some thousand tokens, and a power of two
is exact.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassResult:
    """The result of a pass over some tokens.

    Attributes:
        logp: of each target, fp32, of the targets' shape; zero for ignored ones.
        loss: summed over the targets.
        measures: of the objective, by name.
    """

    logp: Tensor
    loss: float
    measures: Mapping[str, float]


class PiecemealEngine(Engine):
    """An engine of one rank with separate gradients and updates.

    Args:
        run: the resolved run; rows and lengths of the inputs may differ from it.
        specs: the model's units.
        mesh: of one rank.

    Raises:
        ConfigError: there are several ranks, or the plan's step has several microbatches.
    """

    def __init__(self, run: Resolved, specs: Sequence[UnitSpec], mesh: Mesh) -> None:
        if mesh.shape.world > 1:
            raise ConfigError(f"a step in pieces is taken on one rank, and the plan has {mesh.shape.world}.")
        if run.plan.microbatches > 1:
            raise ConfigError(f"a piece is one microbatch, and the plan has {run.plan.microbatches}.")
        super().__init__(run, specs, mesh)
        self._gradient_program = _without_update(self.step_program)
        self._scale = 1.0 if run.plan.grain is None else EXACT_SCALE

    def add(self, microbatch: Microbatch, objective: Objective) -> PassResult:
        """Add the gradient of some sequences to those since the last update.

        Raises:
            DataError: a stream is missing, or of another shape than the targets.
        """
        metrics = self._watch(objective, [microbatch], keeps=True)
        context = StepContext(
            program=self._gradient_program,
            microbatches=[microbatch],
            metrics=metrics,
            scale=self._scale,
            number=self.optimizer.steps + 1,
            is_training=True,
        )
        return self._result(microbatch, metrics, self._executor.run(context).loss)

    def look(self, microbatch: Microbatch, objective: Objective) -> PassResult:
        """The same without a gradient."""
        metrics = self._watch(objective, [microbatch], keeps=True)
        return self._result(microbatch, metrics, self._evaluate(metrics, [microbatch]))

    def _result(self, microbatch: Microbatch, metrics: TokenMetrics, loss: Tensor) -> PassResult:
        measures = metrics.decode(metrics.numbers(loss).tolist())
        logp = metrics.read_logprobs(0).view(microbatch.targets.shape)
        return PassResult(logp=logp, loss=float(loss), measures=measures)

    def update(self, lr: float, hyper: OptimizerSettings) -> float:
        """Update by the added gradients, and zero them; the gradients' norm before clipping.

        Args:
            lr: the learning rate.
            hyper: of this update.

        Raises:
            Fault: a gradient is not finite, or exceeds the range of exact sums; there was no update, and the gradients
                are dropped.
        """
        scale, nothing = self._scale, torch.zeros(1, dtype=torch.float64, device=self.mesh.device.torch)
        try:
            square, _, _ = self.optimizer.sums(nothing, self._update.excess)
            norm = math.sqrt(square)
            if not math.isfinite(norm):
                raise Fault(f"the gradients have norm {norm}: no update was made; look at the weights and advantages.")
            self.optimizer.hyper = replace(hyper, eps=hyper.eps * scale, clip_norm=hyper.clip_norm * scale)
            self.optimizer.step(lr, norm)
        except OutOfRange as error:
            raise Fault(f"{error} No update was made; give tokens smaller weights or advantages.") from error
        finally:
            self.drop_gradients()
        return norm / scale

    def drop_gradients(self) -> None:
        """Zero the gradients."""
        self._update.excess.clear()
        for b in self.list_trained_buffers():
            b.zero_gradient()


def _without_update(program: Program) -> Program:
    ranks = (tuple(x for x in instructions if not isinstance(x, Step)) for instructions in program.ranks)
    return replace(program, ranks=tuple(ranks))
