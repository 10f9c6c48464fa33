"""What the recorded step of a run says of the chips that it ran on."""

from __future__ import annotations

from pathlib import Path

from superstep.cost.closed.efficiency import FITTED
from superstep.errors import ConfigError, StateError
from superstep.hardware.cluster import Cluster
from superstep.observe.trace import load_trace
from superstep.plan.resolve import resolve
from superstep.plan.toml import read_config
from superstep.planner.calibrate import Calibration, calibrated
from superstep.program.text import read_program
from superstep.train.run_folder import RunFolder


def calibration_of(root: Path, cluster: Cluster) -> Calibration:
    """The constants with which the formulas come nearest to the step that a run recorded.

    Raises:
        StateError: there is no such run, or it has recorded no step.
        ConfigError: the model is the user's own, or the chip does not multiply in the run's format.
    """
    folder = RunFolder(root=root)
    mends = {
        folder.config: "name the folder of a run",
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
    program = read_program(folder.program.read_text(encoding="utf-8"))
    return calibrated(resolve(config), load_trace(folder.trace, program).timeline, cluster, FITTED)
