"""The engine: one rank's units built from a resolved run; it runs training steps and evaluations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from superstep.comm.mesh import Mesh
from superstep.engine.exact.machine_check import require_exact
from superstep.engine.flat.rank_state import RankState
from superstep.engine.instruction_timer import Recorder
from superstep.engine.malloc_tuning import keep_what_is_freed, return_what_is_freed
from superstep.engine.metrics.token_metrics import Score, TokenMetrics, require_divisor
from superstep.engine.overflow import OVERFLOW, UnitOverflows
from superstep.engine.phase import EnginePhase, build_phases, merge_results
from superstep.engine.router_counts import ExpertRouting
from superstep.engine.step_context import Judge, StepContext, StepResult, UpdateArguments
from superstep.engine.values.microbatch import Microbatch
from superstep.launch.stop_request import StopRequest
from superstep.model.unit import Fields, UnitSpec
from superstep.monitor.status_page import HeartbeatReceiver, NoHeartbeats
from superstep.numerics.loss_scale import LossScale
from superstep.numerics.objective import CROSS_ENTROPY, Objective
from superstep.numerics.own_loss import OwnLoss, load_loss
from superstep.plan.resolution.resolve import Resolved
from superstep.program.compile import compile_evaluation, compile_step
from superstep.program.instructions import Program

__all__ = ["Engine", "Judge", "StepResult"]


class Engine(RankState):
    """One rank of a run.

    Args:
        run: the resolved run.
        specs: the model's units.
        mesh: the launched ranks.
        example: one row of input, [1, ...], or of each field, if it is no row of tokens; shapes and dtypes count.
        learns: whether it trains; without training there are neither gradients nor moments.
        heart: receives the progress of programs.
        temperature: divides the logits, in losses and in log-probabilities: the sampling temperature of the tokens, if
            any.

    Attributes:
        optimizer: of the trained buffers.
        routers: counts of the training steps; None without experts.
        layers: implementations of this rank's layers, on one line.
        newest_program: of the newest training step, which depends on its number of microbatches.
    """

    def __init__(
        self,
        run: Resolved,
        specs: Sequence[UnitSpec],
        mesh: Mesh,
        example: torch.Tensor | Fields | None = None,
        *,
        learns: bool = True,
        heart: HeartbeatReceiver | None = None,
        temperature: float = 1.0,
    ) -> None:
        self.evaluation_program = compile_evaluation(run.plan)
        self._others: dict[int, tuple[tuple[Program, ...], Program]] = {}
        if run.plan.grain is not None:
            require_exact(run.config.numerics.compute, mesh.device)
            if run.decoder is None:  # a user's layers compute by torch's own kernels
                mesh.device.keep_order()
        if mesh.device.kind == "cpu":
            (return_what_is_freed if run.plan.offloaded else keep_what_is_freed)()
        super().__init__(run, specs, mesh, learns=learns)
        self.newest_program = self.step_program
        self._temperature = temperature
        loss = run.config.train.loss
        self._objective: Objective = CROSS_ENTROPY if loss is None else OwnLoss(load_loss(loss))
        self._routing = ExpertRouting(run, mesh)
        self.routers = self._routing.counts
        self._phases = build_phases(self, self._routing, example, heart or NoHeartbeats())
        self._executor, self._update = self._phases[0].executor, self._phases[0].update
        self.optimizer, self.layers = self._update.optimizer, self._phases[0].layers

    def train_step(  # noqa: PLR0913
        self,
        microbatches: Sequence[Microbatch],
        *,
        valid_tokens: int,
        lr: float,
        divisor: float | None = None,
        objective: Objective | None = None,
        inspect: Callable[[], None] | None = None,
        judge: Judge | None = None,
        record: Recorder | None = None,
        stop: StopRequest | None = None,
    ) -> StepResult:
        """Run the step program.

        Args:
            microbatches: of this data-parallel rank, in order. For another number than the plan's, which must be the
                same on all ranks, a program is compiled and kept.
            valid_tokens: of the whole global batch.
            lr: the learning rate.
            divisor: the one divisor of the loss, above zero; None means ``valid_tokens``.
            objective: of a target's log-probability and of the microbatches' streams; None means the loss of
                ``train.loss``.
            inspect: called when the gradients are final, before the update.
            judge: called before the update with numbers that are equal on all ranks; a reason rejects the update.
                Without it a sum that leaves its exact range is a fault, with it a reason.
            record: records when each instruction ran.
            stop: whether this rank has a request to stop; read at the end of the step.

        Raises:
            DataError: the divisor is invalid, or a stream is missing or of another shape than the targets.
            ConfigError: the last unit has a loss of its own, which supports no streams and objectives.
        """
        divisor, number = require_divisor(float(valid_tokens) if divisor is None else divisor), self.optimizer.steps + 1
        programs, _ = self._programs(len(microbatches))
        update = UpdateArguments(
            valid_tokens=valid_tokens, lr=lr, divisor=divisor, inspect=inspect, judge=judge, stop=stop or StopRequest()
        )
        loss_scale = 1.0 if self.loss_scale is None else self.loss_scale.factor
        results = []
        for phase, program in zip(self._phases, programs, strict=True):
            self.newest_program, self.resting = program, phase.plan.resting
            context = StepContext(
                program=program,
                microbatches=microbatches,
                metrics=self._watch(objective or self._objective, microbatches, phase=phase),
                scale=loss_scale / divisor,
                loss_scale=loss_scale,
                number=number,
                is_training=True,
                update=update,
                record=record if phase is self._phases[0] else None,
            )
            results.append(self._run_phase(phase, context))
        merged = merge_results(self._phases, results)
        if merged.refused == OVERFLOW:
            merged = replace(merged, refused=f"{OVERFLOW}: {self._find_overflow(microbatches)}")
        self._routing.end(is_counted=not (merged.refused or merged.is_skipped))
        return merged

    def _run_phase(self, phase: EnginePhase, context: StepContext) -> StepResult:
        for b in self.list_trained_buffers():
            b.zero_gradient()
        result = phase.executor.run(context).step
        assert result is not None, "a step program has a Step"
        return result

    def _programs(self, count: int) -> tuple[tuple[Program, ...], Program]:
        """Step programs of the phases, and the evaluation program, for ``count`` microbatches on a rank."""
        plan = self.run.plan
        if count == plan.microbatches:
            return self.step_programs, self.evaluation_program
        if count not in self._others:
            other = replace(plan, microbatches=count)
            self._others[count] = tuple(map(compile_step, other.list_phases())), compile_evaluation(other)
        return self._others[count]

    def _watch(
        self,
        objective: Objective,
        microbatches: Sequence[Microbatch],
        *,
        keeps: bool = False,
        phase: EnginePhase | None = None,
    ) -> TokenMetrics:
        """The metrics and loss of the next run of a program; evaluations have the loss of the first phase."""
        last = (phase or self._phases[0]).specs[-1]
        return TokenMetrics(
            self.run, self.mesh, last, objective, microbatches, keeps=keeps, temperature=self._temperature
        )

    @property
    def measures(self) -> Mapping[str, float]:
        """The objective's measures of the newest step, also available in ``inspect``."""
        return self._update.measures

    def evaluate(
        self, microbatches: Sequence[Microbatch], *, objective: Objective = CROSS_ENTROPY
    ) -> tuple[float, float]:
        """The loss summed over the tokens of one global batch, and the number of targets, on all ranks; with a stream
        ``weights``, the sum of their sizes.
        """
        score = self.score(microbatches, objective=objective)
        return score.loss, score.targets

    def score(self, microbatches: Sequence[Microbatch], *, objective: Objective = CROSS_ENTROPY) -> Score:
        """The same, with the number of targets that are classified correctly. Every rank calls this together."""
        metrics = self._watch(objective, microbatches)
        return metrics.totals(self._evaluate(metrics, microbatches))

    def _find_overflow(self, microbatches: Sequence[Microbatch]) -> str:
        """The unit where a step that has overflowed did so first: forward, else on the way back. Every rank calls this
        together.
        """
        units, device, world = self.run.plan.units, self.mesh.device.torch, self.mesh.world
        gradients = UnitOverflows(len(units), device)
        for unit, b in self.each_buffer():
            if not b.is_frozen:
                gradients.see(unit, b.complete_gradient())
        outputs = UnitOverflows(len(units), device)
        bare = [_bare(m) for m in microbatches]
        self._evaluate(self._watch(CROSS_ENTROPY, bare), bare, outputs.see)
        if forward := outputs.list_units(world):
            return f"the first unit whose output is not finite is '{units[forward[0]]}'."
        if backward := gradients.list_units(world):
            return f"the first unit, from the last one on, whose gradient is not finite is '{units[backward[-1]]}'."
        return "a second pass over the batch did not."

    def _evaluate(
        self,
        metrics: TokenMetrics,
        microbatches: Sequence[Microbatch],
        see_output: Callable[[int, torch.Tensor], None] | None = None,
    ) -> torch.Tensor:
        """Run the evaluation program; the loss, summed over this rank's tokens."""
        _, program = self._programs(len(microbatches))
        number = self.optimizer.steps
        context = StepContext(
            program=program, microbatches=microbatches, metrics=metrics, number=number, see_output=see_output
        )
        loss = self._executor.run(context).loss
        self._routing.end(is_counted=False)
        return loss

    def own_logprobs(self, microbatches: Sequence[Microbatch]) -> list[torch.Tensor]:
        """The log-probability of each target of this rank's microbatches, fp32, in their order and of the targets'
        shape; zero for ignored targets. None on ranks without the last unit. Every rank calls this together.
        """
        return self._watch_logprobs(microbatches).own_logprobs()

    def logprobs(self, microbatches: Sequence[Microbatch]) -> torch.Tensor:
        """The log-probability of each target of the whole global batch, [rows, S] and fp32, the same on every rank: in
        exact mode the same bits on every layout. Zero for ignored targets. Every rank calls this together.
        """
        return self._watch_logprobs(microbatches).logprobs()

    def _watch_logprobs(self, microbatches: Sequence[Microbatch]) -> TokenMetrics:
        metrics = self._watch(CROSS_ENTROPY, [_bare(m) for m in microbatches], keeps=True)
        self._evaluate(metrics, microbatches)
        return metrics

    @property
    def loss_scale(self) -> LossScale | None:
        """Of the next step; None but in fp16."""
        return self._update.loss_scale

    def note_loaded(self, steps: int, loss_scale: LossScale | None = None) -> None:
        """Call this after the state was written from outside: parameters are refreshed from the master weights.

        Args:
            steps: of the training so far.
            loss_scale: after them; None means the first one of fp16.
        """
        for phase in self._phases:
            phase.update.load(steps, loss_scale)
        for _, b in self.each_buffer():
            if not b.shards_optimizer:
                b.refresh()


def _bare(microbatch: Microbatch) -> Microbatch:
    """The same without its streams."""
    return replace(microbatch, streams={})
