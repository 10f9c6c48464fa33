"""The engine: one rank's units built from a resolved run; it runs training steps and evaluations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from superstep.comm.collectives import DONE, PendingCollective, gather_sequence, sum_over
from superstep.comm.mesh import Mesh
from superstep.engine.build import assemble, sees_part
from superstep.engine.exact.modules import require_exact
from superstep.engine.executor import Executor
from superstep.engine.flat.buffers import UnitBuffers
from superstep.engine.flat.rank_state import RankState
from superstep.engine.flat.snapshots import Snapshots
from superstep.engine.instruction_timer import Recorder
from superstep.engine.layers.implementation import names_of
from superstep.engine.malloc_tuning import keep_what_is_freed
from superstep.engine.microbatch import Microbatch
from superstep.engine.optimizer import Optimizer, OwnedRanges
from superstep.engine.parallel.expert import build_exchange
from superstep.engine.router_counts import RouterCounts
from superstep.engine.step_context import Judge, StepContext, StepResult, UpdateArguments
from superstep.engine.token_metrics import WEIGHTS_MEND, TokenMetrics, require_divisor
from superstep.errors import ConfigError, Fault
from superstep.launch.stop_request import StopRequest
from superstep.model.expert_dispatch import DispatchContext
from superstep.model.unit import UnitSpec
from superstep.monitor.status_page import HeartbeatReceiver, NoHeartbeats
from superstep.numerics.dtypes import DTYPES
from superstep.numerics.fixed_point import OutOfRange, exact_loss_sum, require_exact_loss
from superstep.numerics.loss import IGNORE
from superstep.numerics.objective import CROSS_ENTROPY, Objective
from superstep.numerics.own_loss import OwnLoss, load_loss
from superstep.numerics.update_rules import RULES, OptimizerSettings
from superstep.plan.resolution.resolve import Resolved
from superstep.plan.sharding.sequence import positions
from superstep.program.compile import compile_evaluation, compile_step
from superstep.program.instructions import Program, Step
from superstep.program.text import describe
from superstep.state.snapshots.memory_snapshot import SnapshotMemory

__all__ = ["Engine", "Judge", "StepResult"]


class Engine(RankState):
    """One rank of a run.

    Args:
        run: the resolved run.
        specs: the model's units.
        mesh: the launched ranks.
        example: one row of input, [1, ...], if it is no row of tokens; its shape and dtype count.
        learns: whether it trains; without training there are neither gradients nor moments.
        heart: receives the progress of programs.
        temperature: divides the logits, in losses and in log-probabilities: the sampling temperature of the tokens, if
            any.

    Attributes:
        routers: counts of the training steps; None without experts.
        layers: implementations of this rank's layers, on one line.
        newest_program: of the newest training step, which depends on its number of microbatches.
    """

    def __init__(
        self,
        run: Resolved,
        specs: Sequence[UnitSpec],
        mesh: Mesh,
        example: torch.Tensor | None = None,
        *,
        learns: bool = True,
        heart: HeartbeatReceiver | None = None,
        temperature: float = 1.0,
    ) -> None:
        self.evaluation_program = compile_evaluation(run.plan)
        self._others: dict[int, tuple[Program, Program]] = {}
        plan, config = run.plan, run.config
        if plan.grain is not None:
            require_exact(DTYPES[config.numerics.compute], mesh.device)
        if mesh.device.kind == "cpu":
            keep_what_is_freed()
        super().__init__(run, specs, mesh, learns=learns)
        self.newest_program = self.step_program
        self.optimizer = Optimizer(
            [OwnedRanges(b, tuple(self._owned_ranges(unit, b))) for unit, b in self._each() if not b.is_frozen],
            RULES[config.train.optimizer],
            OptimizerSettings(
                beta1=config.train.beta1,
                beta2=config.train.beta2,
                eps=config.train.eps,
                weight_decay=config.train.weight_decay,
                clip_norm=config.train.clip_norm,
            ),
            mesh.world,
            is_exact=plan.grain is not None,
        )
        self._exchange = build_exchange(run, mesh)
        moe = run.decoder.moe if run.decoder else None
        self.routers = RouterCounts(moe, run.shape.layers, config.train.batch_sequences, mesh) if moe else None
        self._temperature = temperature
        loss = config.train.loss
        self._objective: Objective = CROSS_ENTROPY if loss is None else OwnLoss(load_loss(loss))
        machine = assemble(run, self.specs, mesh, self.buffers, self._exchange, self._begin, example)
        self.layers = names_of(choice for chosen in machine.chosen.values() for choice in chosen)
        self._excess = machine.excess
        self.snapshots: Snapshots | None = None
        """What copies the state, where anything does."""
        self._heart = heart or NoHeartbeats()
        self._executor = Executor(machine, self._update, self._snapshot, self._heart)
        self._measures: Mapping[str, float] = {}

    def _snapshot(self, unit: int) -> PendingCollective:
        return DONE if self.snapshots is None else self.snapshots.copy(unit)

    def trained_buffers(self) -> Iterator[UnitBuffers]:
        """Buffers that the optimizer updates."""
        return (b for _, b in self._each() if not b.is_frozen)

    def keep_snapshots(self, memory: SnapshotMemory) -> Snapshots:
        """Let the step program copy the state into a memory, where it has a ``Snapshot`` and one is due."""
        frozen = self.step_program.frozen
        trained = {u: [b for b in each if not b.is_frozen] for u, each in self.buffers.items() if u not in frozen}
        self.snapshots = Snapshots(memory, trained, self.mesh.device)
        return self.snapshots

    def _begin(self, context: StepContext, m: int) -> None:
        """Set the next sequences in the exchange."""
        plan, train, count = self.run.plan, self.run.config.train, len(context.microbatches)
        first = (self.mesh.at.dp * count + m) * plan.microbatch
        self._exchange.now = DispatchContext(
            sequences=tuple(range(first, first + plan.microbatch)),
            batch_sequences=count * plan.microbatch * self.mesh.shape.dp,
            seed=train.seed,
            step=self.optimizer.steps if context.is_training else None,
        )

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
        divisor = require_divisor(float(valid_tokens) if divisor is None else divisor)
        self.newest_program, _ = self._programs(len(microbatches))
        context = StepContext(
            program=self.newest_program,
            microbatches=microbatches,
            metrics=self._watching(objective or self._objective, microbatches),
            scale=1.0 / divisor,
            number=self.optimizer.steps + 1,
            is_training=True,
            update=UpdateArguments(
                valid_tokens=valid_tokens,
                lr=lr,
                divisor=divisor,
                inspect=inspect,
                judge=judge,
                stop=stop or StopRequest(),
            ),
            record=record,
        )
        return self._run_step(context)

    def _run_step(self, context: StepContext) -> StepResult:
        for b in self.trained_buffers():
            b.zero_gradient()
        result = self._executor.run(context).step
        assert result is not None, "a step program has a Step"
        if self.routers is not None:
            counts = self._exchange.take_counts()
            if not result.refused:
                self.routers.add(counts)
        return result

    def _programs(self, count: int) -> tuple[Program, Program]:
        """Step and evaluation programs for ``count`` microbatches on a rank."""
        plan = self.run.plan
        if count == plan.microbatches:
            return self.step_program, self.evaluation_program
        if count not in self._others:
            other = replace(plan, microbatches=count)
            self._others[count] = compile_step(other), compile_evaluation(other)
        return self._others[count]

    def _watching(
        self, objective: Objective, microbatches: Sequence[Microbatch], *, keeps: bool = False
    ) -> TokenMetrics:
        """The metrics and loss of the next run of a program."""
        is_exact, temperature = self.run.plan.grain is not None, self._temperature
        watch = TokenMetrics(
            objective, microbatches, self.mesh, is_exact=is_exact, keeps=keeps, temperature=temperature
        )
        if (watch.sees or not watch.is_plain or temperature != 1.0) and self.specs[-1].loss is not None:
            raise ConfigError(
                f"unit '{self.specs[-1].name}' has a loss of its own, which says nothing of single tokens: give it no "
                "streams, no objective and no temperature, or leave its loss out."
            )
        return watch

    def _update(self, context: StepContext, loss: torch.Tensor) -> StepResult:
        """Update the parameters after a step's backward passes, or return the reason of a rejection.

        Args:
            context: of the step.
            loss: summed over this rank's tokens.
        """
        arguments = context.update
        assert arguments is not None, "a program with a Step is given its arguments"
        flags: Sequence[bool] = (False, False)
        self._measures = {}
        try:
            mine = self._to_sum(context.metrics, loss)
            self._heart.waits()
            is_copy_refused = self.snapshots is not None and self.snapshots.refused is not None
            own_flags = arguments.stop.is_asked, is_copy_refused
            square, sums, flags = self.optimizer.sums(mine, self._excess, own_flags)
            self._heart.works()
            self._measures = self._mean_measures(context.metrics, sums[1:])
            loss_value, norm, refused = sums[0] / arguments.divisor, math.sqrt(square), ""
        except OutOfRange as error:
            if arguments.judge is None:
                mend = "" if context.metrics.is_plain else f" {WEIGHTS_MEND}"
                step, place = context.number, describe(Step())
                raise Fault(f"{error}{mend}", rank=self.mesh.rank, step=step, instruction=place) from error
            self._excess.clear()
            loss_value, norm, refused = math.nan, math.nan, str(error)
        if not refused and arguments.judge is not None:
            refused = arguments.judge(loss_value, norm)
        if not refused:
            if arguments.inspect is not None:
                arguments.inspect()
            self.optimizer.step(arguments.lr, norm)
        return StepResult(
            loss=loss_value,
            grad_norm=norm,
            tokens=arguments.valid_tokens,
            is_stop_asked=flags[0],
            is_copy_refused=flags[1],
            measures=self._measures,
            refused=refused,
        )

    @property
    def measures(self) -> Mapping[str, float]:
        """The objective's measures of the newest step, also available in ``inspect``."""
        return self._measures

    @property
    def _sees_part(self) -> bool:
        """Whether each tp rank processes its own part of the tokens."""
        return sees_part(self.run.plan, self.run.outline)

    def _to_sum(self, metrics: TokenMetrics, loss: torch.Tensor) -> torch.Tensor:
        """Numbers to sum over all ranks after a run: the loss, and metrics of the tokens, fp64."""
        # Where every tp rank computed the same loss, one of them counts it.
        is_counted = self.mesh.at.tp == 0 or self._sees_part
        loss = (loss * is_counted).double().view(1)
        return loss if not metrics.sees else torch.cat((loss, metrics.numbers(is_counted=is_counted)))

    def _mean_measures(self, metrics: TokenMetrics, summed: Sequence[float]) -> Mapping[str, float]:
        if not metrics.sees:
            return {}
        measures, size = metrics.decode(summed)
        if self.run.plan.grain is not None:
            require_exact_loss(size)  # losses of both signs may leave the range together and still have a small sum
        return measures

    def evaluate(
        self, microbatches: Sequence[Microbatch], *, objective: Objective = CROSS_ENTROPY
    ) -> tuple[float, float]:
        """The loss summed over the tokens of one global batch, and the number of targets, on all ranks; with a stream
        ``weights``, the sum of their sizes.
        """
        metrics = self._watching(objective, microbatches)
        own_loss = self._evaluate(metrics, microbatches)
        weighed = [_weight_sum(m) for m in microbatches]
        is_counted = self.mesh.at.tp == 0 and self.mesh.at.pp == self.run.plan.placement[-1]
        totals = torch.cat((self._to_sum(metrics, own_loss)[:1], torch.stack(weighed).sum().view(1) * is_counted))
        loss, weight = sum_over(totals, self.mesh.world).tolist()
        return loss, weight

    def _evaluate(self, metrics: TokenMetrics, microbatches: Sequence[Microbatch]) -> torch.Tensor:
        """Run the evaluation program; the loss, summed over this rank's tokens."""
        _, program = self._programs(len(microbatches))
        number = self.optimizer.steps
        context = StepContext(program=program, microbatches=microbatches, metrics=metrics, number=number)
        loss = self._executor.run(context).loss
        self._exchange.take_counts()  # drop the counts: only training counts
        return loss

    def own_logprobs(self, microbatches: Sequence[Microbatch]) -> list[torch.Tensor]:
        """The log-probability of each target of this rank's microbatches, fp32, in their order and of the targets'
        shape; zero for ignored targets. None on ranks without the last unit. Every rank calls this together.
        """
        watch = self._watching(CROSS_ENTROPY, [_bare(m) for m in microbatches], keeps=True)
        self._evaluate(watch, microbatches)
        if not watch.has_kept:
            return []
        ways = self.mesh.tp.size() if self.mesh.tp is not None and self._sees_part else 1
        logprobs = []
        for m, microbatch in enumerate(microbatches):
            rows, *dims = microbatch.targets.shape
            if ways == 1:
                logprobs.append(watch.kept(m).view(rows, *dims))
            else:
                assert self.mesh.tp is not None
                logprobs.append(gather_sequence(watch.kept(m).view(rows, dims[0] // ways, *dims[1:]), self.mesh.tp))
        return logprobs

    def logprobs(self, microbatches: Sequence[Microbatch]) -> torch.Tensor:
        """The log-probability of each target of the whole global batch, [rows, S] and fp32, the same on every rank: in
        exact mode the same bits on every layout. Zero for ignored targets. Every rank calls this together.
        """
        own, at = self.own_logprobs(microbatches), self.mesh.at
        size, *dims = microbatches[0].targets.shape
        cp, tokens = self.mesh.shape.cp, dims[0] * self.mesh.shape.cp if dims else 0
        count = len(microbatches) * size
        whole = torch.zeros(
            count * self.mesh.shape.dp, *([tokens, *dims[1:]] if dims else []), device=self.mesh.device.torch
        )
        # Of the ranks that share a token one adds it to the others' zeros, which is exact.
        if own and at.tp == 0:
            mine = torch.cat(own)
            first = at.dp * count
            rows = whole[first : first + len(mine)]
            if cp > 1:
                rows[:, list(positions(tokens, cp=cp, rank=at.cp))] = mine
            else:
                rows.copy_(mine)
        return sum_over(whole, self.mesh.world)

    def note_loaded(self, steps: int) -> None:
        """Call this after the state was written from outside: parameters are refreshed from the master weights.

        Args:
            steps: updates that the optimizer has made.
        """
        self.optimizer.steps = steps
        for _, b in self._each():
            if not b.shards_optimizer:
                b.refresh()


def _bare(microbatch: Microbatch) -> Microbatch:
    """The same without its streams."""
    return Microbatch(tokens=microbatch.tokens, targets=microbatch.targets, starts=microbatch.starts)


def _weight_sum(microbatch: Microbatch) -> torch.Tensor:
    """The number of a microbatch's targets, or the sum of their weights' sizes: fp64, in any order."""
    counts = microbatch.targets != IGNORE
    weights = microbatch.streams.get("weights")
    return exact_loss_sum(counts if weights is None else weights.abs().where(counts, 0.0))
