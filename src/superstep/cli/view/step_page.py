"""Files of superstep view besides its text: the step as an interactive page, with other plans to switch to;
or a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from superstep.cost.program.memory.activations import unit_bytes
from superstep.cost.program.time.op_prices import Prices
from superstep.cost.program.time.operation import UnitOperations
from superstep.cost.program.time.predict import Prediction, pair_phases, predict, sizes_of
from superstep.errors import UserError
from superstep.observe.chrome_trace import chrome_trace
from superstep.observe.drawing.step_svg import caption_of, draw_svg
from superstep.observe.page.bubble import FORMULAS
from superstep.observe.page.step_animation import ChooserEntry, moving_page
from superstep.observe.page.step_data import StepDrawing, compute_closed_form
from superstep.observe.trace import RecordedStep
from superstep.plan.config import LOOPED, PlanConfig, Schedule
from superstep.plan.resolution.resolve import Resolved
from superstep.program.peak_memory import course

MOST_INSTRUCTIONS = 200_000
"""Of all plans in a page together: a browser's limit for unpacking at once, and a minute of simulation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepView:
    """A step to be drawn, with the inputs of its prediction.

    Attributes:
        run: the resolved run.
        machine: prices of operations here.
        operations: of each unit, for one phase of the step after the other.
        prediction: of the step.
        ran: the recorded step, if any.
    """

    run: Resolved
    machine: Prices
    operations: tuple[UnitOperations, ...]
    prediction: Prediction
    ran: RecordedStep | None = None

    def draw(self) -> StepDrawing:
        """Its drawing, of a step of several phases that of the first."""
        first, operations = pair_phases(self.run, self.operations)[0]
        assert operations is not None
        return StepDrawing(
            plan=first.plan,
            timeline=self.prediction.timeline,
            memory=self.prediction.memory,
            sizes=sizes_of(first, operations) or unit_bytes(first),
            operations=tuple(operations),
            measured=self.ran.timeline if self.ran else None,
            measured_step=self.ran.step if self.ran else 0,
            before_s=self.prediction.before_s,
        )


Rehearse = Callable[[Resolved], tuple[UnitOperations, ...] | None]
Resolve = Callable[..., Resolved]


def write_page(title: str, about: str, view: StepView, *, resolve: Resolve, rehearse: Rehearse) -> str:
    """The page of a step, with the same model under other schedules and ZeRO stages."""
    choices = list(_choices(view, resolve, rehearse))
    plan = view.run.plan
    chosen = next(n for n, one in enumerate(choices) if (one.schedule, one.zero) == (plan.schedule, plan.zero))
    return moving_page(title, about, choices, chosen)


def write_svg(name: str, view: StepView) -> str:
    """The step as SVG; a run's above its prediction."""
    steps = [(f"{name}, predicted", view.prediction.timeline)]
    if view.ran is not None:
        steps.insert(0, (f"{name}, step {view.ran.step} as it ran", view.ran.timeline))
    plan = view.run.plan
    return draw_svg(
        (
            caption_of(
                caption,
                timeline,
                closed=compute_closed_form(timeline, plan) if plan.mesh.pp > 1 else None,
                formula=FORMULAS[plan.schedule],
            ),
            timeline,
        )
        for caption, timeline in steps
    )


def write_trace(name: str, view: StepView) -> str:
    """The step for Perfetto; a run's, followed by its prediction."""
    drawn = view.draw()
    timeline = view.prediction.timeline
    courses = [course(timeline.program, rank, drawn.sizes) for rank in range(timeline.program.pp)]
    if view.ran is None:
        return chrome_trace(timeline, name=f"{name}, predicted", courses=courses)
    return chrome_trace(view.ran.timeline, name=name, courses=courses, predicted=timeline)


def _choices(view: StepView, resolve: Resolve, rehearse: Rehearse) -> Iterator[ChooserEntry]:
    """Every schedule at every ZeRO stage, as far as they differ on this mesh; those that differ from the plan in one of
    the two come first.
    """
    plan = view.run.plan
    schedules = get_args(Schedule) if plan.mesh.pp > 1 else (plan.schedule,)
    zeros = range(4) if plan.mesh.data > 1 else (plan.zero,)
    wanted = [(schedule, zero) for schedule in schedules for zero in zeros]
    room = MOST_INSTRUCTIONS - _instructions(view.prediction)
    entries: dict[tuple[Schedule, int], ChooserEntry] = {}
    rehearsed = {plan.zero: view.operations}
    for schedule, zero in sorted(wanted, key=lambda one: (one[0] != plan.schedule) + (one[1] != plan.zero)):
        if (schedule, zero) == (plan.schedule, plan.zero):
            entries[schedule, zero] = ChooserEntry(schedule=schedule, zero=zero, drawn=view.draw())
        elif room < _instructions(view.prediction):
            why = f"left out to keep the page small; --plan.schedule {schedule} --plan.zero {zero} shows it"
            entries[schedule, zero] = ChooserEntry(schedule=schedule, zero=zero, drawn=None, why=why)
        else:
            entries[schedule, zero] = one = _other(view, schedule, zero, rehearsed, (resolve, rehearse))
            room -= _instructions(one.drawn) if one.drawn else 0
    return iter(entries[one] for one in wanted)


def _other(
    view: StepView,
    schedule: Schedule,
    zero: int,
    rehearsed: dict[int, tuple[UnitOperations, ...]],
    means: tuple[Resolve, Rehearse],
) -> ChooserEntry:
    """The same model, mesh and batch under another schedule or ZeRO stage; or the reason why it is impossible."""
    resolve, rehearse = means
    try:
        run = resolve(replace(view.run.config, plan=_free_schedule(view.run.config.plan, schedule, zero)))
        if zero not in rehearsed:
            rehearsed[zero] = rehearse(run) or view.operations
        prediction = predict(run, view.machine, rehearsed[zero])
    except UserError as error:
        return ChooserEntry(schedule=schedule, zero=zero, drawn=None, why=str(error))
    other = replace(view, run=run, operations=rehearsed[zero], prediction=prediction, ran=None)
    return ChooserEntry(schedule=schedule, zero=zero, drawn=other.draw())


def _free_schedule(plan: PlanConfig, schedule: Schedule, zero: int) -> PlanConfig:
    """Settings that depend on the schedule or the stage become automatic again."""
    chunks = 2 if schedule == "zb-v" else max(plan.chunks, 2) if schedule in LOOPED else 1
    other = replace(plan, schedule=schedule, zero=zero, chunks=chunks, replicas=plan.replicas if zero else 1)
    if schedule != plan.schedule:
        other = replace(other, microbatch_group=None)
    if chunks != plan.chunks:
        other = replace(other, stages=None)
    return other


def _instructions(step: Prediction | StepDrawing) -> int:
    return len(step.timeline.events)


def page_path(target: str | None) -> Path:
    """The default path of the page: in a run's folder, or in the current one."""
    if target is None:
        return Path("demo.step.html")
    return Path(target) / "step.html" if Path(target).is_dir() else Path(Path(target).stem + ".step.html")
