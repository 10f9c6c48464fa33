"""superstep view RUN: the recorded step of a run above the predicted one, and the run's report written again."""

from __future__ import annotations

from dataclasses import replace

from superstep.cli.arguments.view import ViewOptions
from superstep.cli.view.step_page import StepView
from superstep.cli.view.step_text import DrawOptions, draw, say, title_of, write_step
from superstep.cost.program.time.predict import predict
from superstep.cost.program.time.prediction_file import read_predicted_from
from superstep.errors import Fault, StateError
from superstep.observe.number_format import seconds_text
from superstep.observe.page.report import report_page
from superstep.observe.trace import RecordedStep, load_trace
from superstep.plan.config_io import read_config
from superstep.program.timeline import Timeline
from superstep.run.reports.report import load_reported_run
from superstep.train.run_folder.inspect_run import program_of
from superstep.train.run_folder.run_paths import RunFolder, write_whole
from superstep.train.weights.model import operations, resolve_config


def view_recorded(folder: RunFolder, options: ViewOptions, picture: DrawOptions) -> None:
    """Show both steps on one scale."""
    program = program_of(folder)
    has_report = options.out is None and not options.text
    if not folder.trace.is_file():
        if has_report:
            write_report(folder)
        raise StateError(
            f"'{folder.root}' has no trace yet: the run writes one with each checkpoint (state.save_every), and "
            f"superstep trace {folder.root} while it trains. Until then, superstep view {folder.config} shows "
            "the predicted step."
        )
    ran = load_trace(folder.trace, program)
    step = _read_prediction(folder, ran)
    if step is None:
        if options.out or options.open:
            raise StateError(
                f"'{folder.root}' has no prediction ({folder.prediction.name}), so it has no page of its step; leave "
                "out --out and --open."
            )
        say(f"step {ran.step} of {folder.root}, as it ran\n\n{draw(ran.timeline, picture, ran.timeline.step_s)}")
    else:
        prediction = step.prediction
        took_s, predicted_s = ran.timeline.step_s, prediction.timeline.step_s
        title = (
            f"step {ran.step} of {folder.root}, as it ran: {seconds_text(took_s)}, predicted "
            f"{seconds_text(predicted_s)}"
        )
        if prediction.before_s:
            title += f" (and {seconds_text(prediction.before_s)} for log-probabilities before it)"
        machine, longest_s = title_of(prediction, step.machine, when="when the run began"), max(took_s, predicted_s)
        say(
            f"{title}\n\n{draw(ran.timeline, picture, longest_s)}\n"
            f"{machine}\n\n{draw(prediction.timeline, picture, longest_s)}"
        )
        write_step(step, str(folder.root), options, f"{title}; {machine}".replace("\n", "; "))
    if has_report:
        write_report(folder, ran.timeline)


def _read_prediction(folder: RunFolder, ran: RecordedStep) -> StepView | None:
    """The recorded step with the run's own prediction; None without one, such as for a model with
    data-dependent work.
    """
    if not folder.prediction.is_file():
        return None
    given = read_predicted_from(folder.prediction)
    run = resolve_config(replace(read_config(folder.config), plan=given.plan))
    traced = operations(run)
    if traced is None:
        return None
    prediction = predict(run, given.machine, traced, is_weighed=given.is_weighed)
    return StepView(run=run, machine=given.machine, operations=traced, prediction=prediction, ran=ran)


def write_report(folder: RunFolder, ran: Timeline | None = None) -> None:
    """Write the run's own page again."""
    if folder.metrics.is_file() and folder.config.is_file():
        run = load_reported_run(folder, ran=ran)
        try:
            write_whole(folder.report, report_page([run]))
            say(f"the report of the run: {folder.report}\n")
        except Fault:  # such as another user's run
            say(f"no report: {folder.report} cannot be written\n")
