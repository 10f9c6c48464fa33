"""Arguments of superstep view."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from superstep.cli.flags.options import Parser
from superstep.errors import ConfigError

DESCRIPTION = (
    "Draw a training step. For a run.toml, WHAT is the predicted step on this machine; for the folder of a run, it is "
    "the recorded step; by default, it is the demo. For a run of tune rl, draw its rollouts, grades and steps on one "
    "timeline. For the file that a server wrote with --serve.replay, draw its steps over time. In addition to the "
    "text, a step is written as a page that plays it: step.html in the folder of a run, or WHAT.step.html for a "
    "run.toml. The page needs no network."
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
                raise ConfigError(
                    f"--{name} prints and writes no file; leave out --{name}, or leave out --out and --open."
                )
    if options.out is not None and Path(options.out).suffix not in ENDS:
        raise ConfigError(f"--out = '{options.out}' must end in one of {', '.join(ENDS)}.")
    return target, options, rest


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="superstep view",
        usage="superstep view [WHAT] [--FLAG]...",
        description=DESCRIPTION,
        epilog="Every field of a run is also a flag; superstep train --help lists them.",
        allow_abbrev=False,
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--text", action="store_true", help="draw the step only as text, and write no page")
    form.add_argument("--program", action="store_true", help="print the instructions of each pipeline rank")
    form.add_argument("--memory", action="store_true", help="also draw the memory of each pipeline rank over the step")
    form.add_argument("--kernels", action="store_true", help="print the kernel of each layer, and the reason")
    form.add_argument(
        "--router", action="store_true", help="for a run with experts: draw where tokens went in training"
    )
    parser.add_argument("--layer", type=int, metavar="N", help="with --router: draw only this layer, counted from 0")
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="write this file: a page (.html), a drawing (.svg) or a trace for Perfetto (.json)",
    )
    parser.add_argument("--open", action="store_true", help="open the page in the browser")
    parser.add_argument(
        "--width", type=int, metavar="N", help="columns of the drawing; by default those of the terminal"
    )
    return parser
