"""superstep view run.toml: the step of a plan, as predicted on this machine, and its memory."""

from __future__ import annotations

from collections.abc import Sequence

from superstep.cli.arguments.view import ViewOptions
from superstep.cli.view.step_page import StepView
from superstep.cli.view.step_text import DrawOptions, draw, say, title_of, write_step
from superstep.comm.device import pick
from superstep.cost.program.memory.activations import unit_bytes
from superstep.cost.program.time.operation import UnitOperations
from superstep.cost.program.time.predict import Prediction, pair_phases, predict, sizes_of
from superstep.engine.measure.probe_machine import measure
from superstep.errors import ConfigError
from superstep.observe.drawing.memory import draw_memory
from superstep.observe.number_format import bytes_text
from superstep.plan.resolution.resolve import Resolved
from superstep.program.peak_memory import course
from superstep.train.weights.model import operations


def view_plan(run: Resolved, target: str | None, options: ViewOptions, picture: DrawOptions) -> None:
    """Show the predicted step, and write its page."""
    traced = operations(run)
    if traced is None:
        raise ConfigError(
            f"model.source = '{run.config.model.source}': the work of its units depends on data, so their steps are "
            "not predicted; view --program lists the instructions."
        )
    machine = measure(run, pick(0, run.config.plan.device), traced)
    prediction = predict(run, machine, traced)
    title = title_of(prediction, machine)
    say(f"{title}\n\n{_draw_phases(run, prediction, picture)}")
    if options.memory:
        say("\n" + _memory(run, prediction, picture, traced))
    else:
        step = StepView(run=run, machine=machine, operations=traced, prediction=prediction)
        write_step(step, target, options, title.replace("\n", "; "))


def _draw_phases(run: Resolved, prediction: Prediction, picture: DrawOptions) -> str:
    """The phases of a step, one after the other, each under its name."""
    if not run.plan.phases:
        return draw(prediction.timeline, picture, prediction.step_s)
    longest_s = max(timeline.step_s for timeline in prediction.timelines)
    return "\n".join(
        f"phase {phase.name}\n{draw(timeline, picture, longest_s)}"
        for phase, timeline in zip(run.plan.phases, prediction.timelines, strict=True)
    )


def _memory(run: Resolved, prediction: Prediction, picture: DrawOptions, traced: Sequence[UnitOperations]) -> str:
    """Memory that stays from step to step on each pipeline rank, and temporary memory, over the step, of several phases
    over the first.
    """
    program = prediction.timeline.program
    sizes = sizes_of(*pair_phases(run, traced)[0]) or unit_bytes(run)
    lasting = "\n".join(
        f"rank {rank}  parameters {bytes_text(held.params)}, gradients {bytes_text(held.gradients)}, "
        f"optimizer {bytes_text(held.optimizer)}; with the step's own at most {bytes_text(held.bytes)}"
        for rank, held in enumerate(prediction.memory)
    )
    courses = [course(program, rank, sizes) for rank in range(program.pp)]
    drawn = draw_memory(
        prediction.timeline, courses, width=picture.width, text=bytes_text, has_signs=not picture.is_plain
    )
    return f"{lasting}\n\n{drawn}"
