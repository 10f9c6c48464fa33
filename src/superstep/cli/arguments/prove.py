"""What superstep prove is asked for."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from superstep.cli.new_file import require_new_file
from superstep.cli.options import COMMON, DEMO, read_flags, read_run, sections_of
from superstep.errors import ConfigError
from superstep.plan.config import DeviceKind, RunConfig
from superstep.plan.mesh import AXES

MEMORY_GIB, MOST_GPUS, MOST_GPU_BYTES = 80, 16, 192 << 30

DESCRIPTION = "Run a layout and a one-process fp32 reference on the same batches, and compare every tensor."


@dataclass(frozen=True, slots=True, kw_only=True)
class ProveOptions(RunConfig):
    """What to prove: a run, and how much of it."""

    all: bool = False
    """Sweep every layout that fits the world, tied and untied, packed and padded."""
    world: int | None = None
    """Ranks of the sweep; none takes the plan's."""
    steps: int = 2
    """Steps to compare."""
    exact: bool = False
    """Compare bits: exact mode on this layout against exact mode on one rank, with a restart between layouts."""
    faults: bool = False
    """Compare bits: a run whose ranks are killed, stopped and hung, whose launcher is killed, whose newest checkpoint
    is damaged and whose disk is full, against the same run undisturbed, in exact mode."""
    device: str | None = None
    """Emulated GPUs to run the GPU path on, without one: strict for as many as there are ranks, with 80 GiB each, or
    strict:8x24GiB. Names uses of memory that nothing orders, waits of the host, and calls of NCCL that do not fit."""
    out: str | None = None
    """With --device: a new file for the order in which a step's kernels ran, for ui.perfetto.dev."""
    serve: bool = False
    """Compare bits: a server of the run's newest checkpoint against training, in exact mode."""
    serve_tp: int = 1
    """Ranks of that server."""
    serve_logprobs: int | None = None
    """The fewest log-probabilities of it to compare, all ways together; none takes what `steps` batches have."""


def emulated_gpus(options: ProveOptions) -> tuple[int, int]:
    """How many GPUs ``--device`` asks for, and the bytes of each.

    Raises:
        ConfigError: it is not written as it must be.
    """
    asked = re.fullmatch(r"strict(?::(\d+))?(?:[x:](\d+(?:\.\d+)?)(GiB|MiB))?", options.device or "")
    if asked is None:
        raise ConfigError(f"--device = '{options.device}' must be strict, strict:8 or strict:8x80GiB.")
    count, size, unit = asked.groups()
    ranks = options.world or math.prod(getattr(options.plan, axis) or 1 for axis in AXES)
    return int(count or ranks), int(float(size or MEMORY_GIB) * (2**20 if unit == "MiB" else 2**30))


def _on_gpus(options: ProveOptions) -> DeviceKind:
    count, size = emulated_gpus(options)
    if not 1 <= count <= MOST_GPUS or not 1 << 20 <= size <= MOST_GPU_BYTES:
        raise ConfigError(
            f"--device = '{options.device}': from 1 to {MOST_GPUS} GPUs are emulated, with 1MiB to 192GiB each."
        )
    if options.plan.device == "cpu":
        raise ConfigError("plan.device = 'cpu' and --device exclude each other; leave plan.device out.")
    if options.faults or options.serve or options.exact or options.all:
        raise ConfigError("--device emulates GPUs for one layout; leave --all, --exact, --faults and --serve out.")
    return "cuda"


def read(argv: Sequence[str]) -> tuple[ProveOptions, tuple[str, ...] | None]:
    """The run and how much of it; and the flags, where they change settings that the user has not written himself.

    Raises:
        ConfigError: the file cannot be used, or a flag is wrong.
        SystemExit: help was asked for, and has been given.
    """
    path = Path(argv[0]) if argv and not argv[0].startswith("-") else None
    flags = argv if path is None else argv[1:]
    base = DEMO if path is None else read_run(path / "run.toml" if path.is_dir() else path)
    options = read_flags(
        ProveOptions(**sections_of(base)),
        flags,
        prog="superstep prove [run.toml | RUN]",
        description=DESCRIPTION,
        common=COMMON,
    )
    for name, value in (
        ("steps", options.steps),
        ("world", options.world),
        ("serve-tp", options.serve_tp),
        ("serve-logprobs", options.serve_logprobs),
    ):
        if value is not None and value < 1:
            raise ConfigError(f"--{name} = {value} must be at least 1.")
    if options.serve and (path is None or not path.is_dir()):
        raise ConfigError(
            "--serve needs a run that has a checkpoint; name its folder: superstep prove runs/demo --serve."
        )
    if options.serve and options.all:
        raise ConfigError("--serve and --all exclude each other: a run was trained on one layout; leave --all out.")
    if options.exact and not (options.serve or options.faults) and options.steps < 2:
        raise ConfigError("--steps = 1 leaves none after a restart; --exact needs at least 2.")
    if options.faults and (options.all or options.serve):
        raise ConfigError("--faults hurts one run; leave --all and --serve out.")
    if options.out is not None:
        if options.device is None:
            raise ConfigError("--out is for what ran on emulated GPUs; add --device strict.")
        require_new_file("--out", Path(options.out))
    if options.device is not None:
        options = replace(options, plan=replace(options.plan, device=_on_gpus(options)))
    return options, tuple(flags) if path is None or path.is_dir() else None
