"""Phases: parts of a step, one after the other, each with its loss, program and update.

    step    phase "judge": forward, backward, reduce, update of its units    phase "fool": the same of the others

All run on the same buffers. What a phase does not train has no gradient in it; a step of one phase has no name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from superstep.engine.activations.copiers import open_copiers
from superstep.engine.activations.offloader import Offloader
from superstep.engine.build import assemble
from superstep.engine.executor import Executor
from superstep.engine.flat.rank_state import RankState
from superstep.engine.router_counts import ExpertRouting
from superstep.engine.step_context import StepResult
from superstep.engine.step_update import StepUpdate
from superstep.model.unit import Fields, UnitSpec, in_phase, list_phases
from superstep.monitor.status_page import HeartbeatReceiver
from superstep.plan.resolution.phase_settings import train_of_phase
from superstep.plan.resolution.resolve import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePhase:
    """One phase on a rank.

    Attributes:
        name: empty for a step of one phase.
        plan: of the phase.
        specs: the units, with the phase's loss.
        executor: with modules whose parameters have gradients only where the phase trains them.
        update: of the units that it trains.
        layers: implementations of this rank's layers, on one line.
    """

    name: str
    plan: Plan
    specs: tuple[UnitSpec, ...]
    executor: Executor
    update: StepUpdate
    layers: str


def build_phases(
    state: RankState, routing: ExpertRouting, example: Tensor | Fields | None, heart: HeartbeatReceiver
) -> list[EnginePhase]:
    """The phases of a step, in their order.

    Args:
        state: of this rank.
        routing: of mixtures of experts.
        example: one row of input, or of each field, if it is no row of tokens.
        heart: receives the progress.
    """
    phases, train = [], state.run.config.train
    copiers = open_copiers(state.run, state.mesh.device)
    for name, plan in zip(list_phases(state.specs) or ("",), state.run.plan.list_phases(), strict=True):
        config = replace(state.run.config, train=train_of_phase(train, state.run.config.phases, name))
        run, specs = replace(state.run, config=config, plan=plan), in_phase(state.specs, name) if name else state.specs
        units = assemble(run, specs, state.mesh, state.buffers, routing.exchange, routing.begin, example)
        update = StepUpdate(state, config.train, units.excess, heart, plan.resting)
        offloader = Offloader(copiers, units.caches, state.mesh.device.torch)
        executor = Executor(units, update.run, state.copy, heart, offloader)
        phases.append(
            EnginePhase(name=name, plan=plan, specs=specs, executor=executor, update=update, layers=units.layers)
        )
    return phases


def merge_results(phases: Sequence[EnginePhase], results: Sequence[StepResult]) -> StepResult:
    """The result of a step: the sum of the phases' losses, each of them as a measure, and the norm of all gradients."""
    if len(results) == 1:
        return results[0]
    losses = {f"loss {phase.name}": result.loss for phase, result in zip(phases, results, strict=True)}
    return replace(
        results[-1],
        loss=sum(result.loss for result in results),
        grad_norm=math.sqrt(sum(result.grad_norm**2 for result in results)),
        is_stop_requested=any(result.is_stop_requested for result in results),
        is_copy_refused=any(result.is_copy_refused for result in results),
        measures={**losses, **{name: value for result in results for name, value in result.measures.items()}},
    )
