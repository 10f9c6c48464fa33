"""Arguments of superstep measure."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from superstep.cli.flags.new_file import require_new_file
from superstep.cli.flags.options import Parser
from superstep.errors import ConfigError
from superstep.plan.config import Dtype, ModelConfig, NumericsConfig, PlanConfig, RunConfig
from superstep.plan.resolution.resolve import Resolved, resolve
from superstep.serve.config import Quantize

DESCRIPTION = (
    "Measure the rates of this machine (matrix products, memory, launches, collectives, disk) and write a cluster file."
)


def read(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the options.

    Raises:
        ConfigError: one of them is wrong.
        SystemExit: after printing help.
    """
    options = _parser().parse_args(argv)
    for flag, path in (("--out", options.out), ("--plot", options.plot)):
        if path is not None:
            require_new_file(flag, path)
    for way in options.serve:
        check_way(way)
    if options.serve_tp < 1:
        raise ConfigError(f"--serve-tp {options.serve_tp} must be at least 1.")
    if options.ranks is not None and options.ranks < 1:
        raise ConfigError(f"--ranks {options.ranks} must be at least 1.")
    run_of(options.model, options.dtype)
    return options


def run_of(model: str, dtype: Dtype) -> Resolved:
    """A run of the model on one rank, with the microbatch of the demo.

    Raises:
        ConfigError: there is no such model, or it cannot be trained.
    """
    numerics = NumericsConfig(compute=dtype)
    return resolve(RunConfig(model=ModelConfig(name=model), numerics=numerics, plan=PlanConfig(dp=1, microbatch=4)))


def check_way(way: str) -> None:
    """Raise a ConfigError for an unknown format of serving."""
    dtype, _, special = way.partition("-")
    if dtype not in get_args(Dtype) or special not in ("", "exact", *get_args(Quantize)):
        raise ConfigError(
            f"--serve {way} is not a format of a server; write a dtype ({', '.join(get_args(Dtype))}), alone or with "
            f"-exact or a quantization: bf16, bf16-exact, bf16-{get_args(Quantize)[0]}."
        )


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="superstep measure", usage="superstep measure [--FLAG ...]", description=DESCRIPTION, allow_abbrev=False
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the cluster file (TOML) to this file")
    parser.add_argument(
        "--model", default="demo", metavar="NAME", help="the model with the units of the roofline; demo by default"
    )
    parser.add_argument(
        "--dtype",
        default="fp32",
        choices=("fp32", "bf16"),
        metavar="DTYPE",
        help="the dtype of the matrix products: fp32 or bf16; fp32 by default",
    )
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="ranks that measure at once; by default one for each GPU, or each core"
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        metavar="DEVICE",
        help="the device to measure: cpu or cuda; by default GPUs if there are any",
    )
    parser.add_argument(
        "--serve",
        nargs="+",
        default=(),
        metavar="WAY",
        help="also measure the steps of a server in these formats: bf16, fp32, bf16-exact, bf16-w8a8, ...; each takes "
        "half a minute",
    )
    parser.add_argument(
        "--serve-tp", type=int, default=1, metavar="N", help="ranks that share the model of the server; 1 by default"
    )
    parser.add_argument("--quick", action="store_true", help="measure only the shapes of the model; takes seconds")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write the roofline as SVG to this file")
    return parser
