"""Arguments of superstep prove."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from superstep.cli.flags.new_file import require_new_file
from superstep.cli.flags.options import COMMON, DEMO, Bounds, ranks_of, read_flags, read_run, sections_of
from superstep.errors import ConfigError
from superstep.plan.config import DeviceKind, PlanConfig, RunConfig
from superstep.plan.mesh import AXES

MEMORY_GIB, MOST_GPUS, MOST_GPU_BYTES = 80, 16, 192 << 30

_COUNT, _SIZE = r"(?P<count>\d+)", r"(?P<size>\d+(?:\.\d+)?)(?P<unit>GiB|MiB)"
DEVICE_FORMS = ("strict", f"strict:{_COUNT}", f"strict:{_SIZE}", f"strict:{_COUNT}x{_SIZE}")

DESCRIPTION = "Run a layout and a one-process fp32 reference on the same batches, and compare every tensor."


@dataclass(frozen=True, slots=True, kw_only=True)
class ProveOptions(RunConfig):
    """A run, and the kind of its proof."""

    all: bool = False
    """Prove every layout on this number of ranks, with tied and untied weights, packed and padded data."""
    world: Annotated[int | None, Bounds(least=1)] = None
    """Ranks of the sweep; none uses the plan's."""
    steps: Annotated[int, Bounds(least=1)] = 2
    """Steps to compare."""
    exact: bool = False
    """Compare bits: this layout with one rank, in exact mode, with a restart between layouts."""
    faults: bool = False
    """Compare bits: a run with killed, stopped and hung ranks, a killed launcher, a damaged newest checkpoint and a
    full disk, against the same run undisturbed, in exact mode.
    """
    device: str | None = None
    """Emulated GPUs to run the GPU path without a real one: strict for as many as there are ranks, with 80 GiB each;
    else strict:8, strict:24GiB or strict:8x24GiB. Reports unordered uses of memory, waits of the host, and calls of
    NCCL that do not match.
    """
    out: str | None = None
    """With --device: a new file for the order of a step's kernels, for ui.perfetto.dev."""
    serve: bool = False
    """Compare bits: a server of the run's newest checkpoint with training, in exact mode."""
    serve_tp: Annotated[int, Bounds(least=1)] = 1
    """With --serve: ranks of the server."""
    serve_logprobs: Annotated[int | None, Bounds(least=1)] = None
    """The fewest log-probabilities of it to compare, over all ways; none uses the number in `steps` batches."""


def parse_emulated_gpus(options: ProveOptions) -> tuple[int, int]:
    """The number of GPUs of ``--device``, by default one for each rank, and the bytes of each.

    Raises:
        ConfigError: it has the wrong form, or the number or size is too large.
    """
    text = options.device or ""
    form_match = next((match for form in DEVICE_FORMS if (match := re.fullmatch(form, text))), None)
    if form_match is None:
        raise ConfigError(
            f"--device = '{text}' must be strict, strict:8, strict:24GiB or strict:8x24GiB: the number of GPUs, and "
            f"the memory of each in GiB or MiB{_nearest_form(text) or '.'}"
        )
    given = form_match.groupdict()
    count = int(given.get("count") or ranks_of(options.plan))
    size_bytes = int(float(given.get("size") or MEMORY_GIB) * (2**20 if given.get("unit") == "MiB" else 2**30))
    if not 1 <= count <= MOST_GPUS or not 1 << 20 <= size_bytes <= MOST_GPU_BYTES:
        ranks = "" if given.get("count") else f", and the plan has {count} ranks"
        raise ConfigError(
            f"--device = '{text}': the number of GPUs must be from 1 to {MOST_GPUS}, with 1MiB to 192GiB each{ranks}."
        )
    return count, size_bytes


def _nearest_form(text: str) -> str:
    """A suggestion for a text that is nearly one of the forms."""
    meant = re.fullmatch(r"strict\W*(?:(\d+)[x:,* ]+)?x?(\d+(?:\.\d+)?) ?(?:([gm])i?b?)?", text, re.IGNORECASE)
    if meant is None:
        return ""
    count, number, unit = meant.groups()
    if count is None and unit is None:
        return f"; did you mean 'strict:{number}'?"
    count = f"{count}x" if count else ""
    return f"; did you mean 'strict:{count}{number}{'MiB' if unit in ('m', 'M') else 'GiB'}'?"


def require_gpus(options: ProveOptions, plan: PlanConfig) -> None:
    """Check that ``--device`` has a GPU for each rank.

    Args:
        options: with the device.
        plan: resolved, if possible.

    Raises:
        ConfigError: it has fewer.
    """
    (count, _), ranks = parse_emulated_gpus(options), ranks_of(plan)
    if count < ranks:
        axes = " x ".join(f"{axis} {getattr(plan, axis)}" for axis in AXES if (getattr(plan, axis) or 1) > 1)
        mend = str(options.device).replace(str(count), str(ranks), 1)
        raise ConfigError(
            f"--device = '{options.device}': the plan has {ranks} ranks ({axes}), and each needs a GPU of its own; "
            f"write {mend}, or leave the number out."
        )


def _on_gpus(options: ProveOptions) -> DeviceKind:
    parse_emulated_gpus(options)
    if options.plan.device == "cpu":
        raise ConfigError("plan.device = 'cpu' and --device exclude each other; leave plan.device out.")
    if options.faults or options.serve or options.exact or options.all or options.world:
        others = "--all, --world, --exact, --faults and --serve"
        raise ConfigError(f"--device emulates GPUs for one layout; leave {others} out.")
    return "cuda"


def read(argv: Sequence[str]) -> tuple[ProveOptions, tuple[str, ...] | None]:
    """The run and the kind of its proof; and the flags, if they change settings that are not the user's own.

    Raises:
        ConfigError: the file cannot be used, or a flag is wrong.
        SystemExit: after printing help.
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
    if options.serve and (path is None or not path.is_dir()):
        raise ConfigError("--serve needs a run with a checkpoint; name its folder: superstep prove runs/demo --serve.")
    if options.serve and options.all:
        raise ConfigError("--serve and --all exclude each other: a run was trained on one layout; leave --all out.")
    if options.exact and not (options.serve or options.faults) and options.steps < 2:
        raise ConfigError("--steps = 1 leaves no step after the restart; --exact needs at least 2.")
    if options.faults and (options.all or options.serve):
        raise ConfigError("--faults injects faults into one run; leave --all and --serve out.")
    if options.out is not None:
        if options.device is None:
            raise ConfigError("--out writes the order of kernels on emulated GPUs; add --device strict.")
        require_new_file("--out", Path(options.out))
    if options.device is not None:
        options = replace(options, plan=replace(options.plan, device=_on_gpus(options)))
    for given, name, needed, what in (
        (options.world is not None and not options.all, "world", "all", "the sweep of layouts"),
        (options.serve_tp != 1 and not options.serve, "serve-tp", "serve", "the proof of a server"),
        (options.serve_logprobs is not None and not options.serve, "serve-logprobs", "serve", "the proof of a server"),
    ):
        if given:
            raise ConfigError(
                f"--{name} has an effect only with --{needed}, {what}; add --{needed}, or leave --{name} out."
            )
    return options, tuple(flags) if path is None or path.is_dir() else None
