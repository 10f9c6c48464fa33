"""superstep view: a step as a picture, as predicted on this machine and as a run recorded it; and its routers."""

from __future__ import annotations

import os
import shutil
import sys
import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from superstep.cli.arguments.view import ViewOptions
from superstep.cli.arguments.view import read as read_arguments
from superstep.cli.damage import say_damage
from superstep.cli.flags.options import named_in, read_run, settle
from superstep.cli.view.kernel_table import kernel_table
from superstep.cli.view.rl_view import draw_rl, is_rolled
from superstep.cli.view.serve_log_view import draw_replay
from superstep.cli.view.step_page import StepView, page_path, write_page, write_svg, write_trace
from superstep.comm.device import pick
from superstep.cost.program.memory.activations import unit_bytes
from superstep.cost.program.time.op_prices import Prices
from superstep.cost.program.time.operation import UnitOperations
from superstep.cost.program.time.predict import Prediction, predict, sizes_of
from superstep.cost.program.time.prediction_file import read_predicted_from
from superstep.engine.measure.probe_machine import measure
from superstep.errors import ConfigError, Fault, StateError, UserError
from superstep.observe.drawing.memory import draw_memory
from superstep.observe.drawing.timeline import GUTTER, draw_text
from superstep.observe.jsonl import read
from superstep.observe.number_format import bytes_text, seconds_text
from superstep.observe.page.report import report_page
from superstep.observe.router import ASCII, COLOURS, SHADES, draw_routers, reports
from superstep.observe.trace import RecordedStep, load_trace
from superstep.plan.config_io import read_config
from superstep.plan.resolution.resolve import Resolved
from superstep.program.compile import compile_step
from superstep.program.peak_memory import course
from superstep.program.text import write_program
from superstep.program.timeline import Timeline
from superstep.run.reports.report import read_recorded, run_told
from superstep.serve.scheduling.step_log import is_log
from superstep.train.run_folder.inspect_run import program_of, require_run
from superstep.train.run_folder.run_paths import RunFolder, write_whole
from superstep.train.weights.model import operations, resolve_config


@dataclass(frozen=True, slots=True)
class DrawOptions:
    """Options of a drawing.

    Attributes:
        width: columns.
        has_colour: whether the output is a terminal with colours.
        is_plain: whether to use neither colours nor terminal signs: NO_COLOR, or a dumb terminal.
    """

    width: int
    has_colour: bool
    is_plain: bool


def main(argv: Sequence[str]) -> int:
    """Print the step of a configuration, or a run's recorded step and the predicted one below it."""
    target, options, flags = read_arguments(argv)
    is_plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    picture = DrawOptions(
        width=options.width or shutil.get_terminal_size().columns,
        has_colour=sys.stdout.isatty() and not is_plain,
        is_plain=is_plain,
    )
    if target is not None and not Path(target).exists():
        raise StateError(
            f"'{target}' is not there; name a run.toml or the folder of a run, or leave it out to see the demo's plan."
        )
    if target is not None and is_log(Path(target)):
        _say(draw_replay(Path(target), width=picture.width, has_signs=not is_plain))
        return 0
    is_run = target is not None and Path(target).is_dir()
    if options.layer is not None and not options.router:
        raise UserError("--layer chooses a layer for --router; add --router.")
    if options.router and not is_run:
        raise UserError(
            "--router shows where a run's tokens went; name the folder of a run: superstep view RUN --router."
        )
    if target is not None and is_run:
        for name in ("memory", "kernels"):
            if getattr(options, name):
                raise UserError(f"--{name} shows the {name} of a plan: superstep view {target}/run.toml --{name}.")
        if plan_flags := sorted(name for name in named_in(flags) if "." in name):
            flag = plan_flags[0].replace("_", "-")
            raise UserError(f"--{flag}: a run's step is shown as it ran; change the plan of {target}/run.toml.")
        _of_run(RunFolder(root=Path(target)), options, picture)
        return 0
    if target is not None:
        _, options, _ = read_arguments(argv, read_run(Path(target)))
    run = resolve_config(options.run) if target else settle(options.run, flags, resolve_config)
    if options.program:
        _say(write_program(compile_step(run.plan)))
    elif options.kernels:
        _say(kernel_table(run))
    else:
        _view_predicted(run, target, options, picture)
    return 0


def _of_run(folder: RunFolder, options: ViewOptions, picture: DrawOptions) -> None:
    say_damage(folder.metrics)
    if options.program:
        _say(write_program(program_of(folder)))
    elif options.router:
        _say(_routers(folder, options.layer, picture))
    elif is_rolled(folder):
        if options.out or options.open:
            raise UserError(f"{folder.root} is a run of tune rl, which is drawn as text; leave out --out and --open.")
        _say(draw_rl(folder, width=picture.width, has_signs=not picture.is_plain))
        if not options.text:
            _say("\n")
            _report(folder, read_recorded(folder))
    else:
        _view_recorded(folder, options, picture)


def _view_predicted(run: Resolved, target: str | None, options: ViewOptions, picture: DrawOptions) -> None:
    traced = operations(run)
    if traced is None:
        raise ConfigError(
            f"model.source = '{run.config.model.source}': the work of its units depends on data, so their steps are "
            "not predicted; view --program lists the instructions."
        )
    machine = measure(run, pick(0, run.config.plan.device), traced)
    prediction = predict(run, machine, traced)
    title = _title(prediction, machine)
    _say(f"{title}\n\n{_draw(prediction.timeline, picture, prediction.step_s)}")
    if options.memory:
        _say("\n" + _memory(run, prediction, picture, traced))
    else:
        step = StepView(run=run, machine=machine, operations=traced, prediction=prediction)
        _write(step, target, options, title.replace("\n", "; "))


def _write(step: StepView, target: str | None, options: ViewOptions, about: str) -> None:
    """Write the step to a file, unless only text is wanted."""
    if options.text:
        return
    path = Path(options.out) if options.out else page_path(target)
    name = target or "the demo"
    match path.suffix:
        case ".svg":
            kind, text = "a drawing", write_svg(name, step)
        case ".json":
            kind, text = "a trace, for ui.perfetto.dev or chrome://tracing", write_trace(name, step)
        case _:
            kind = "a page that plays it"
            text = write_page(f"{name}: a step", about, step, resolve=resolve_config, rehearse=operations)
    try:
        write_whole(path, text, makes_folder=bool(options.out))
    except Fault:
        if options.out or options.open:
            raise
        # The text is enough if no file can be written.
        _say(f"\nno page: {path} cannot be written; --out names another file\n")
        return
    _say(f"\nthe step as {kind}: {path}\n")
    if options.open:
        webbrowser.open(path.resolve().as_uri())


def _memory(run: Resolved, prediction: Prediction, picture: DrawOptions, traced: Sequence[UnitOperations]) -> str:
    """Memory that stays from step to step on each pipeline rank, and temporary memory, over the step."""
    program = prediction.timeline.program
    sizes = sizes_of(run, traced) or unit_bytes(run)
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


def _view_recorded(folder: RunFolder, options: ViewOptions, picture: DrawOptions) -> None:
    """Both steps on one scale."""
    program = program_of(folder)
    has_report = options.out is None and not options.text
    if not folder.trace.is_file():
        if has_report:
            _report(folder)
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
        _say(f"step {ran.step} of {folder.root}, as it ran\n\n{_draw(ran.timeline, picture, ran.timeline.step_s)}")
    else:
        prediction = step.prediction
        took_s, predicted_s = ran.timeline.step_s, prediction.timeline.step_s
        title = (
            f"step {ran.step} of {folder.root}, as it ran: {seconds_text(took_s)}, predicted "
            f"{seconds_text(predicted_s)}"
        )
        if prediction.before_s:
            title += f" (and {seconds_text(prediction.before_s)} for log-probabilities before it)"
        machine, longest_s = _title(prediction, step.machine, when="when the run began"), max(took_s, predicted_s)
        _say(
            f"{title}\n\n{_draw(ran.timeline, picture, longest_s)}\n"
            f"{machine}\n\n{_draw(prediction.timeline, picture, longest_s)}"
        )
        _write(step, str(folder.root), options, f"{title}; {machine}".replace("\n", "; "))
    if has_report:
        _report(folder, ran.timeline)


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


def _report(folder: RunFolder, ran: Timeline | None = None) -> None:
    """Write the run's own page again."""
    if folder.metrics.is_file() and folder.config.is_file():
        run = run_told(folder, ran=ran)
        try:
            write_whole(folder.report, report_page([run]))
            _say(f"the report of the run: {folder.report}\n")
        except Fault:  # such as another user's run
            _say(f"no report: {folder.report} cannot be written\n")


def _routers(folder: RunFolder, layer: int | None, picture: DrawOptions) -> str:
    require_run(folder)
    run = resolve_config(read_config(folder.config))
    if run.decoder is None or run.decoder.moe is None:
        raise StateError(
            f"'{folder.root}' has no experts and so no router; name a run with experts, such as one of superstep train "
            "recipes/moe.toml."
        )
    if layer is not None and not 0 <= layer < run.decoder.layers:
        raise UserError(
            f"--layer {layer}: the layers of '{folder.root}' are 0 to {run.decoder.layers - 1}; name one of them."
        )
    routed = reports(read(folder.metrics)) if folder.metrics.is_file() else []
    if not routed:
        raise StateError(
            f"'{folder.root}' has no report of its routers yet: the run writes one every "
            f"{run.config.observe.log_every} steps (observe.log_every). Try again after that."
        )
    ink = ASCII if picture.is_plain else COLOURS if picture.has_colour else SHADES
    title = f"where the tokens of {folder.root} went, in steps {routed[0].first} to {routed[-1].last}"
    layers = range(run.decoder.layers) if layer is None else [layer]
    return f"{title}\n\n{draw_routers(routed, layers, width=picture.width, ink=ink)}"


def _title(prediction: Prediction, machine: Prices, *, when: str = "for this machine") -> str:
    full = max(prediction.memory, key=lambda rank: rank.bytes)
    return (
        f"predicted {when}: {machine.gemm_flops_per_s / 1e9:.3g} GFLOP/s in products, "
        f"{machine.memory_bytes_per_s / 1e9:.3g} GB/s of memory, {machine.link_bytes_per_s / 1e9:.3g} GB/s between "
        f"ranks\nfullest rank {bytes_text(full.bytes)}: parameters {bytes_text(full.params)}, gradients "
        f"{bytes_text(full.gradients)}, optimizer {bytes_text(full.optimizer)}, within the step "
        f"{bytes_text(full.batch + full.peak.bytes)}"
    )


def _draw(timeline: Timeline, picture: DrawOptions, scale_s: float) -> str:
    """The drawing; its width is the picture's share for the step in ``scale_s``."""
    columns = round((picture.width - GUTTER) * timeline.step_s / scale_s) if scale_s else picture.width
    return draw_text(timeline, GUTTER + columns, picture.has_colour)


def _say(text: str) -> None:
    print(text, end="")
