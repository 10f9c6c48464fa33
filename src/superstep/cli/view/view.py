"""superstep view: a step as a picture, as predicted on this machine and as a run recorded it; and its routers."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from superstep.cli.arguments.view import ViewOptions
from superstep.cli.arguments.view import read as read_arguments
from superstep.cli.damage import say_damage
from superstep.cli.flags.options import list_named_fields, read_run, settle
from superstep.cli.view.kernel_table import kernel_table
from superstep.cli.view.plan_view import view_plan
from superstep.cli.view.rl_view import draw_rl, is_rolled
from superstep.cli.view.router_view import draw_run_routers
from superstep.cli.view.run_view import view_recorded, write_report
from superstep.cli.view.serve_log_view import draw_replay
from superstep.cli.view.step_text import DrawOptions, say
from superstep.errors import StateError, UserError
from superstep.program.compile import compile_step
from superstep.program.text import write_program
from superstep.run.reports.report import read_recorded
from superstep.serve.scheduling.step_log import is_log
from superstep.train.run_folder.inspect_run import program_of
from superstep.train.run_folder.run_paths import RunFolder
from superstep.train.weights.model import resolve_config


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
        say(draw_replay(Path(target), width=picture.width, has_signs=not is_plain))
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
        if plan_flags := sorted(name for name in list_named_fields(flags) if "." in name):
            flag = plan_flags[0].replace("_", "-")
            raise UserError(f"--{flag}: a run's step is shown as it ran; change the plan of {target}/run.toml.")
        _of_run(RunFolder(root=Path(target)), options, picture)
        return 0
    if target is not None:
        _, options, _ = read_arguments(argv, read_run(Path(target)))
    run = resolve_config(options.run) if target else settle(options.run, flags, resolve_config)
    if options.program:
        say("".join(write_program(compile_step(plan)) for plan in run.plan.list_phases()))
    elif options.kernels:
        say(kernel_table(run))
    else:
        view_plan(run, target, options, picture)
    return 0


def _of_run(folder: RunFolder, options: ViewOptions, picture: DrawOptions) -> None:
    say_damage(folder.metrics)
    if options.program:
        say(write_program(program_of(folder)))
    elif options.router:
        say(draw_run_routers(folder, options.layer, picture))
    elif is_rolled(folder):
        if options.out or options.open:
            raise UserError(f"{folder.root} is a run of tune rl, which is drawn as text; leave out --out and --open.")
        say(draw_rl(folder, width=picture.width, has_signs=not picture.is_plain))
        if not options.text:
            say("\n")
            write_report(folder, read_recorded(folder))
    else:
        view_recorded(folder, options, picture)
