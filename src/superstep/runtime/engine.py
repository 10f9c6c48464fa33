"""The engine: one rank's units built from a resolved run, and the two things it does: train a step, evaluate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from superstep.errors import ConfigError, Fault
from superstep.model.exchange import Now
from superstep.model.unit import UnitSpec
from superstep.numerics.dtypes import DTYPES
from superstep.numerics.fixed_point import OutOfRange, exact_loss_sum, require_exact_loss
from superstep.numerics.loss import IGNORE
from superstep.numerics.objective import CROSS_ENTROPY, Objective
from superstep.plan.resolve import Resolved
from superstep.plan.split.sequence import positions
from superstep.program.compile import compile_evaluation, compile_step
from superstep.program.instructions import Step
from superstep.program.text import describe
from superstep.runtime.assemble import assemble, sees_part
from superstep.runtime.buffers import Bytes, UnitBuffers
from superstep.runtime.collectives import gather_sequence, sum_over
from superstep.runtime.exact.modules import require_exact
from superstep.runtime.executor import Executor
from superstep.runtime.flat_parameters import Slot, lay_out
from superstep.runtime.mesh import Mesh
from superstep.runtime.microbatch import Microbatch
from superstep.runtime.optimizer import AdamW, Hyper, Owned
from superstep.runtime.parallel.expert import build_exchange
from superstep.runtime.recorder import Recorder
from superstep.runtime.router_counts import RouterCounts
from superstep.runtime.sleeping import Sleeping
from superstep.runtime.stop import Stop
from superstep.runtime.watch import WEIGHTS_MEND, Watch, require_divisor
from superstep.state.piece import Kind, Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One training step, seen from all ranks.

    Attributes:
        loss: of the global batch, over its divisor: nats per valid token, unless said otherwise.
        grad_norm: the global gradient norm before clipping.
        tokens: valid tokens of the global batch.
        is_stop_asked: whether any rank was asked to stop before the step's sums were taken.
        measures: what the objective tells of the tokens that count, by name.
    """

    loss: float
    grad_norm: float
    tokens: int
    is_stop_asked: bool = False
    measures: Mapping[str, float] = field(default_factory=dict)


class Engine:
    """One rank of a run.

    Args:
        run: the resolved run.
        specs: the model's units.
        mesh: the launched ranks.
        example: one row of input, [1, ...], where it is no row of tokens; its shape and dtype count.
        learns: whether it takes steps; what only evaluates has neither gradients nor moments.

    Attributes:
        routers: counts of the training steps; None without experts.
    """

    def __init__(
        self,
        run: Resolved,
        specs: Sequence[UnitSpec],
        mesh: Mesh,
        example: torch.Tensor | None = None,
        *,
        learns: bool = True,
    ) -> None:
        self.run = run
        self.mesh = mesh
        self.specs = tuple(specs)
        self.step_program = compile_step(run.plan)
        self.evaluation_program = compile_evaluation(run.plan)
        plan, config = run.plan, run.config
        compute = DTYPES[config.numerics.compute]
        if plan.grain is not None:
            require_exact(compute, mesh.device)
        layouts = lay_out(
            tuple(specs),
            plan.mesh,
            mesh.at,
            plan.rules,
            sequence_parallel=plan.sequence_parallel,
            padding=plan.padding,
            is_exact=plan.grain is not None,
        )
        self.buffers = {
            unit: tuple(
                UnitBuffers(
                    layout,
                    zero=plan.zero,
                    shards=mesh.sharers[layout.family].shards,
                    place=mesh.sharers[layout.family].shard,
                    compute=compute,
                    device=mesh.device,
                    seed=config.train.seed,
                    is_exact=plan.grain is not None,
                    is_frozen=not (learns and plan.trains(layout.family)),
                )
                for layout in layouts[unit]
            )
            for unit in self.step_program.held_by(mesh.at.pp)
        }
        self.optimizer = AdamW(
            [Owned(b, tuple(self._owned_ranges(unit, b))) for unit, b in self._each() if not b.is_frozen],
            Hyper(
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
        self._is_training = False
        machine = assemble(run, self.specs, mesh, self.buffers, self._exchange, self._begin, example)
        self._excess = machine.excess
        self._executor = Executor(machine, self._update)
        self._lr = 0.0
        self._divisor = 1.0
        self._result = (0.0, 0.0)
        self._measures: Mapping[str, float] = {}
        self._stop = Stop()
        self._is_stop_asked = False
        self._inspect: Callable[[], None] | None = None

    def _each(self) -> Iterator[tuple[int, UnitBuffers]]:
        """Every flat buffer, with its unit."""
        return ((unit, b) for unit, buffers in self.buffers.items() for b in buffers)

    def _begin(self, m: int) -> None:
        """Tell the exchange which sequences come next."""
        plan, train = self.run.plan, self.run.config.train
        first = (self.mesh.at.dp * plan.microbatches + m) * plan.microbatch
        self._exchange.now = Now(
            sequences=tuple(range(first, first + plan.microbatch)),
            batch_sequences=train.batch_sequences,
            seed=train.seed,
            step=self.optimizer.steps if self._is_training else None,
        )

    def _owned_ranges(self, unit: int, b: UnitBuffers) -> Iterator[tuple[int, int]]:
        """The ranges of a shard that no other rank counts: whole where cut, else on the first place."""
        at, sharers = self.mesh.at, self.mesh.sharers[b.layout.family]
        if at.pp != min(self.step_program.holders(unit)) or sharers.replica > 0 or (b.zero == 0 and sharers.shard > 0):
            return
        for slot, low, high in b.held():
            if at.tp == 0 or b.layout.family == "experts" or not slot.is_replicated:
                start = slot.start + low - b.start
                yield start, start + high - low

    def train_step(  # noqa: PLR0913
        self,
        microbatches: Sequence[Microbatch],
        *,
        valid_tokens: int,
        lr: float,
        divisor: float | None = None,
        objective: Objective = CROSS_ENTROPY,
        inspect: Callable[[], None] | None = None,
        record: Recorder | None = None,
        stop: Stop | None = None,
    ) -> StepResult:
        """Run the step program.

        Args:
            microbatches: this data-parallel rank's, in order.
            valid_tokens: of the whole global batch.
            lr: the learning rate.
            divisor: the one divisor of the loss, above zero; None means ``valid_tokens``.
            objective: what is made of a target's log-probability and of the microbatches' streams.
            inspect: called when the gradients are final, before the update.
            record: what notes when each instruction ran.
            stop: whether this rank is asked to stop; asked for at the end of the step.

        Raises:
            DataError: the divisor divides nothing, or a stream is missing or of another shape than the targets.
            ConfigError: the last unit has a loss of its own, which knows nothing of streams and objectives.
        """
        self._stop = stop or Stop()
        self._lr, self._inspect, self._is_training = lr, inspect, True
        self._divisor = require_divisor(float(valid_tokens) if divisor is None else divisor)
        self._watch = self._watching(objective, microbatches)
        for _, b in self._each():
            if not b.is_frozen:
                b.zero_gradient()
        scale = 1.0 / self._divisor
        self._executor.run(self.step_program, microbatches, scale=scale, watch=self._watch, record=record)
        if self.routers is not None:
            self.routers.add(self._exchange.told())
        loss, norm = self._result
        return StepResult(
            loss=loss,
            grad_norm=norm,
            tokens=valid_tokens,
            is_stop_asked=self._is_stop_asked,
            measures=self._measures,
        )

    def _watching(self, objective: Objective, microbatches: Sequence[Microbatch], *, keeps: bool = False) -> Watch:
        """What the loss is in the run of a program to come."""
        is_exact = self.run.plan.grain is not None
        watch = Watch(objective, microbatches, self.mesh, is_exact=is_exact, keeps=keeps)
        if (watch.sees or not watch.is_plain) and self.specs[-1].loss is not None:
            raise ConfigError(
                f"unit '{self.specs[-1].name}' has a loss of its own, which says nothing of single tokens: give it no "
                "streams and no objective, or leave its loss out."
            )
        return watch

    def _update(self) -> None:
        try:
            square, told, self._is_stop_asked = self.optimizer.sums(
                self._told(), self._excess, is_stop_asked=self._stop.is_asked
            )
            self._measures = self._measured(told[1:])
        except OutOfRange as error:
            step = self.optimizer.steps + 1
            mend = "" if self._watch.is_plain else f" {WEIGHTS_MEND}"
            raise Fault(f"{error}{mend}", rank=self.mesh.rank, step=step, instruction=describe(Step())) from error
        self._result = (told[0] / self._divisor, math.sqrt(square))
        if self._inspect is not None:
            self._inspect()
        self.optimizer.step(self._lr, self._result[1])

    @property
    def measures(self) -> Mapping[str, float]:
        """What the objective tells of the newest step, for ``inspect`` too."""
        return self._measures

    @property
    def _sees_part(self) -> bool:
        """Whether each tp rank sees a part of the tokens of its own."""
        return sees_part(self.run.plan, self.run.outline)

    def _told(self) -> torch.Tensor:
        """What is to be summed over all ranks after a run: the loss, and what was seen of the tokens, fp64."""
        # Where every tp rank computed the same loss, one of them counts it.
        is_counted = self.mesh.at.tp == 0 or self._sees_part
        loss = (self._executor.loss * is_counted).double().view(1)
        return loss if not self._watch.sees else torch.cat((loss, self._watch.numbers(is_counted=is_counted)))

    def _measured(self, summed: Sequence[float]) -> Mapping[str, float]:
        if not self._watch.sees:
            return {}
        measures, size = self._watch.told(summed)
        if self.run.plan.grain is not None:
            require_exact_loss(size)  # losses of both signs may leave the range together and sum to little
        return measures

    def evaluate(
        self, microbatches: Sequence[Microbatch], *, objective: Objective = CROSS_ENTROPY
    ) -> tuple[float, float]:
        """The loss summed over the tokens of one global batch, and how many have a target, on all ranks; with a stream
        ``weights``, the sizes of their weights together.
        """
        self._evaluate(self._watching(objective, microbatches), microbatches)
        weighed = [_weight_sum(m) for m in microbatches]
        is_counted = self.mesh.at.tp == 0 and self.mesh.at.pp == self.run.plan.placement[-1]
        told = torch.cat((self._told()[:1], torch.stack(weighed).sum().view(1) * is_counted))
        loss, weight = sum_over(told, self.mesh.world).tolist()
        return loss, weight

    def _evaluate(self, watch: Watch, microbatches: Sequence[Microbatch]) -> None:
        self._is_training, self._watch = False, watch
        self._executor.run(self.evaluation_program, microbatches, scale=1.0, watch=watch)
        self._exchange.told()  # of training alone is kept count

    def own_logprobs(self, microbatches: Sequence[Microbatch]) -> list[torch.Tensor]:
        """The log-probability of each target of this rank's microbatches, fp32, in their order and of the targets'
        shape; zero where a target is ignored. None on ranks without the last unit. Every rank calls it.
        """
        watch = self._watching(CROSS_ENTROPY, [_bare(m) for m in microbatches], keeps=True)
        self._evaluate(watch, microbatches)
        if not watch.has_kept:
            return []
        ways = self.mesh.tp.size() if self.mesh.tp is not None and self._sees_part else 1
        found = []
        for m, microbatch in enumerate(microbatches):
            rows, *dims = microbatch.targets.shape
            if ways == 1:
                found.append(watch.kept(m).view(rows, *dims))
            else:
                assert self.mesh.tp is not None
                found.append(gather_sequence(watch.kept(m).view(rows, dims[0] // ways, *dims[1:]), self.mesh.tp))
        return found

    def logprobs(self, microbatches: Sequence[Microbatch]) -> torch.Tensor:
        """The log-probability of each target of the whole global batch, [batch_sequences, S] and fp32, the same on
        every rank: in exact mode the same bits on every layout. Zero where a target is ignored. Every rank calls it.
        """
        own, plan, at = self.own_logprobs(microbatches), self.run.plan, self.mesh.at
        _, *dims = microbatches[0].targets.shape
        cp, tokens = self.mesh.shape.cp, dims[0] * self.mesh.shape.cp if dims else 0
        whole = torch.zeros(
            self.run.config.train.batch_sequences, *([tokens, *dims[1:]] if dims else []), device=self.mesh.device.torch
        )
        # Of the ranks that share a token one adds it to the others' zeros, which rounds nothing.
        if own and at.tp == 0:
            mine = torch.cat(own)
            first = at.dp * plan.microbatches * plan.microbatch
            rows = whole[first : first + len(mine)]
            if cp > 1:
                rows[:, list(positions(tokens, cp=cp, rank=at.cp))] = mine
            else:
                rows.copy_(mine)
        return sum_over(whole, self.mesh.world)

    def pieces(self, kinds: Sequence[Kind]) -> Iterator[Piece]:
        """What this rank holds of the state, piece by piece, in the order of the units: of all that is trained."""
        return self._pieces(kinds, is_frozen=False)

    def frozen_pieces(self) -> Iterator[Piece]:
        """What this rank holds of the weights that are not trained, in the compute dtype."""
        return self._pieces(("weight",), is_frozen=True)

    def _pieces(self, kinds: Sequence[Kind], *, is_frozen: bool) -> Iterator[Piece]:
        for unit, b in self._each():
            if b.is_frozen != is_frozen:
                continue
            owned = set(self._owned_ranges(unit, b))
            for kind in kinds:
                buffer = {
                    "weight": b.master,
                    "exp_avg": b.exp_avg,
                    "exp_avg_sq": b.exp_avg_sq,
                    "gradient": b.reduced,
                }[kind]
                for slot, low, high in b.held():
                    start = slot.start + low - b.start
                    values = b.view(buffer, slot, low, high)
                    yield from _pieces(kind, slot, low, values, (start, start + high - low) in owned)

    def loaded(self, steps: int) -> None:
        """To be called after the state was written to from outside: parameters follow the master weights.

        Args:
            steps: updates that the optimizer has made.
        """
        self.optimizer.steps = steps
        for _, b in self._each():
            if b.zero == 0:
                b.refresh()

    def sleep(self, folder: Path | None = None) -> Sleeping:
        """Give this rank's memory back until the returned value's ``wake``. Between two steps only.

        Args:
            folder: for a file with what was held; None keeps that in the host's memory.
        """
        return Sleeping((b for _, b in self._each()), folder)

    def bytes(self) -> Bytes:
        """What this rank's buffers hold now, by category."""
        every = [b.bytes() for _, b in self._each()]
        return Bytes(
            params=sum(b.params for b in every),
            gradients=sum(b.gradients for b in every),
            optimizer=sum(b.optimizer for b in every),
            transient=sum(b.transient for b in every),
        )


def _bare(microbatch: Microbatch) -> Microbatch:
    """The same without its streams."""
    return Microbatch(tokens=microbatch.tokens, targets=microbatch.targets, starts=microbatch.starts)


def _weight_sum(microbatch: Microbatch) -> torch.Tensor:
    """How many targets a microbatch has, or the sizes of their weights together: fp64, in any order."""
    counts = microbatch.targets != IGNORE
    weights = microbatch.streams.get("weights")
    return exact_loss_sum(counts if weights is None else weights.abs().where(counts, 0.0))


def _pieces(kind: Kind, slot: Slot, low: int, values: torch.Tensor, is_owner: bool) -> Iterator[Piece]:
    """What the elements of a slot from ``low`` on are globally: a piece of one tensor, or of each of a stack."""
    stacked = 1 if slot.spec.stack else 0
    names = slot.spec.stack[slot.index[0]] if stacked else (slot.spec.name,)
    numel = math.prod(slot.held_shape[stacked:])
    high = low + values.numel()
    for number, name in enumerate(names):
        start, stop = max(low, number * numel), min(high, (number + 1) * numel)
        if start < stop:
            yield Piece(
                kind=kind,
                name=name,
                shape=slot.shape[stacked:],
                index=slot.index[stacked:],
                low=start - number * numel,
                values=values[start - low : stop - low],
                is_owner=is_owner,
            )
