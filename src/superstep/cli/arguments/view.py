"""Arguments of superstep view."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from superstep.cli.flags.options import Parser
from superstep.errors import ConfigError

DESCRIPTION = (
    "Show a training step: WHAT is a run.toml, the step as it would run here, or a run's folder, the step as it "
    "ran; left out, the demo's. Of a run of tune rl, its rollouts, grades and steps on one timeline; of the file that "
    "a server wrote with --serve.replay, its steps over time. Beside the text, a step is written as a page that moves: "
    "step.html of a run's folder, WHAT.step.html of a run.toml; it needs no network."
)

ENDS = (".html", ".svg", ".json")
"""Formats of a written step."""


def read(argv: Sequence[str]) -> tuple[str | None, argparse.Namespace, list[str]]:
    """The target, the options, and the flags of a run.

    Raises:
        ConfigError: an option is wrong.
        SystemExit: after printing help.
    """
    target = argv[0] if argv and not argv[0].startswith("-") else None
    options, rest = _parser().parse_known_args(argv[1:] if target else argv)
    if options.width is not None and options.width < 1:
        raise ConfigError(f"--width = {options.width} must be at least 1.")
    if options.out is not None or options.open:
        for name in ("text", "program", "memory", "kernels", "router"):
            if getattr(options, name):
                raise ConfigError(f"--{name} prints and writes no file; leave it out, or --out and --open.")
    if options.out is not None and Path(options.out).suffix not in ENDS:
        raise ConfigError(f"--out = '{options.out}' ends in none of {', '.join(ENDS)}; name a file that does.")
    return target, options, rest


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="superstep view",
        usage="superstep view [WHAT] [--FLAG]...",
        description=DESCRIPTION,
        epilog="Any field of a run is a flag as well; superstep train --help lists them.",
        allow_abbrev=False,
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--text", action="store_true", help="draw the step as text alone, and write no page")
    form.add_argument("--program", action="store_true", help="print the instructions of each pipeline rank")
    form.add_argument("--memory", action="store_true", help="draw what each pipeline rank holds over the step as well")
    form.add_argument("--kernels", action="store_true", help="print what each layer computes with, and why")
    form.add_argument("--router", action="store_true", help="of a run with experts: where tokens went in training")
    parser.add_argument("--layer", type=int, metavar="N", help="with --router: this layer alone, from 0 on")
    parser.add_argument(
        "--out", metavar="FILE", help="write the page there, or FILE.svg, or FILE.json: a trace for Perfetto"
    )
    parser.add_argument("--open", action="store_true", help="open what was written in the browser")
    parser.add_argument("--width", type=int, metavar="N", help="columns of the drawing; the terminal's by default")
    return parser
