"""Arguments of superstep measure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, get_args

from superstep.cli.flags.new_file import require_new_file
from superstep.cli.flags.options import Bounds, read_flags
from superstep.errors import ConfigError
from superstep.plan.config import DeviceKind, Dtype, ModelConfig, NumericsConfig, PlanConfig, RunConfig
from superstep.plan.resolution.resolve import Resolved, resolve
from superstep.serve.config import Quantize

DESCRIPTION = (
    "Measure the rates of this machine (matrix products, memory, launches, collectives, disk) and write a cluster file."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureOptions:
    """Options of the measurement."""

    out: str | None = None
    """Write the cluster file (TOML) to this file."""
    model: str = "demo"
    """The model with the units of the roofline."""
    dtype: Dtype = "fp32"
    """The dtype of the matrix products."""
    ranks: Annotated[int | None, Bounds(least=1)] = None
    """Ranks that measure at once; none uses one for each GPU, or each core."""
    device: DeviceKind | None = None
    """The device to measure; none uses GPUs if there are any."""
    serve: tuple[str, ...] = ()
    """Also measure the steps of a server in these formats: bf16, fp32, bf16-exact, bf16-w8a8, ...; each takes half a
    minute.
    """
    serve_tp: Annotated[int, Bounds(least=1)] = 1
    """Ranks that share the model of the server."""
    quick: bool = False
    """Measure only the shapes of the model; takes seconds."""
    plot: str | None = None
    """Write the roofline as SVG to this file."""


def read(argv: Sequence[str]) -> MeasureOptions:
    """Parse the options.

    Raises:
        ConfigError: one of them is wrong.
        SystemExit: after printing help.
    """
    options = read_flags(MeasureOptions(), argv, prog="superstep measure", description=DESCRIPTION)
    for flag, path in (("--out", options.out), ("--plot", options.plot)):
        if path is not None:
            require_new_file(flag, Path(path))
    for way in options.serve:
        check_way(way)
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
