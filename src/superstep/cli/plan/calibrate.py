"""Calibration of the planned chips by runs, published steps and measured machines."""

from __future__ import annotations

import math
from pathlib import Path

from superstep.cli.plan.plan_text import calibration_text, write_measured, write_published
from superstep.cost.closed.efficiency import generation
from superstep.errors import ConfigError, StateError
from superstep.hardware.cluster import Cluster
from superstep.hardware.cluster_file import read_cluster
from superstep.observe.trace import load_trace
from superstep.plan.config_io import read_config
from superstep.plan.resolution.resolve import Resolved, resolve
from superstep.planner.calibration.calibrate import Calibration, calibrate
from superstep.planner.calibration.calibrate_observation import STRANGE, Guide
from superstep.planner.calibration.published_row import after_published, is_published, step_slopes
from superstep.program.text import read_program
from superstep.train.run_folder.run_paths import RunFolder


def calibrate_on(path: Path, cluster: Cluster, known: Guide) -> tuple[Guide, str]:
    """The calibrated guide after a run, a published step or a measured machine, and a description.

    Raises:
        StateError: there is no such run, or it has recorded no step.
        ConfigError: a file has an error, a model is the user's own, or a machine's chip is another.
    """
    if is_published(path):
        after, ratio = after_published(path, cluster, known)
        is_strange = abs(math.log(ratio)) > STRANGE
        return known if is_strange else after, write_published(str(path), known, after, ratio, is_used=not is_strange)
    if path.suffix == ".toml":
        after = _after_machine(path, cluster, known)
        return after, write_measured(str(path), known, after)
    run, calibration = calibration_of(path, cluster, known)
    text = calibration_text(calibration, str(path))
    if not calibration.is_believed:
        return known, text
    # Its instructions showed which constants were off; the range narrows as for one step.
    slopes = step_slopes(run, cluster, calibration.efficiency)
    return known.after_step(slopes, 0.0).with_values(calibration.efficiency), text


def calibration_of(root: Path, cluster: Cluster, known: Guide) -> tuple[Resolved, Calibration]:
    """A run, and the constants that fit the formulas best to its recorded step.

    Raises:
        StateError: there is no such run, or it has recorded no step.
        ConfigError: the model is the user's own, or the chip does not multiply in the run's format.
    """
    folder = RunFolder(root=root)
    mends = {
        folder.config: "name the folder of a run, a published step's TOML or a measured machine's",
        folder.program: "resuming the run writes it anew",
        folder.trace: "the run writes one with each checkpoint",
    }
    for path, mend in mends.items():
        if not path.is_file():
            raise StateError(f"--calibrate = '{root}': there is no {path.name} in it; {mend}.")
    config = read_config(folder.config)
    if config.model.source is not None:
        raise ConfigError(
            f"--calibrate = '{root}': model.source = '{config.model.source}', whose steps are not predicted; name "
            "another run."
        )
    run, program = resolve(config), read_program(folder.program.read_text(encoding="utf-8"))
    return run, calibrate(run, load_trace(folder.trace, program).timeline, cluster, known.efficiency)


def _after_machine(path: Path, cluster: Cluster, known: Guide) -> Guide:
    """The best measured product, copy and gather, as shares of the chip's data sheet."""
    machine = read_cluster(path)
    chip, usual = machine.chip, cluster.chip
    if generation(chip) != generation(usual):
        raise ConfigError(
            f"--calibrate = '{path}': {chip.name} is of another generation than {usual.name}; measure one of those "
            "that the plan is for."
        )
    half = usual.peak("bf16") or usual.peak("fp16")
    whole = [each for each in chip.products if each.kernel == "product"]
    products = [each.flops_per_s for each in whole if each.rate in ("bf16", "fp16")]
    copies = [each.bytes_per_s for each in chip.copies if each.kernel == "copy"]
    gathers = [each.bytes_per_s * (each.ranks - 1) / each.ranks for each in machine.collectives
               if each.name == "all-gather" and 1 < each.ranks <= machine.domain]  # fmt: skip
    era = f"products.{generation(chip)}"
    rates: dict[str, float] = {}
    if products and half:
        rates[era if era in known.efficiency.values else "products.other"] = max(products) / half
    if copies:
        rates["memory"] = max(copies) / usual.memory_bytes_per_s
    if gathers:
        rates["link"] = max(gathers) / cluster.link_bytes_per_s
    if not rates:
        raise ConfigError(
            f"--calibrate = '{path}': no product, copy or gather of {chip.name} was measured; superstep measure writes "
            "such a file."
        )
    for name, value in rates.items():
        known = known.after_rate(name, min(value, 1.0))
    return known
